"""Reusable output memory.

Fresh memory costs a page fault per 4 KiB, for a large tensor as much time as its arithmetic; memory that is handed back
and taken again costs nothing.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.pixels.affine import NUMPY_DTYPES

_SMALLEST = 1 << 16


class BufferPool:
    """Arrays that are given back and taken again. At most ``max_idle_bytes`` wait; sizes not used lately go first.

    Whoever takes an array owns it until giving it back, and must hold no view of it afterwards. Thread-safe.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle = max_idle_bytes
        self._idle: dict[int, list[NDArray[np.uint8]]] = {}  # by size, the one used last at the end
        self._idle_bytes = 0
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes waiting to be taken again."""
        return self._idle_bytes

    def take(self, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """A C-contiguous array of undefined contents."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * NUMPY_DTYPES[dtype].itemsize
        size = _rounded(nbytes)
        with self._lock:
            memory = self._remove(size) if size in self._idle else None
        if memory is None:
            memory = np.empty(size, np.uint8)
        return memory[:nbytes].view(NUMPY_DTYPES[dtype]).reshape(shape)

    def give(self, array: NDArray[Any]) -> None:
        """Hand back an array that came from ``take``."""
        memory = memory_of(array)
        if memory.size > self._max_idle:
            return
        with self._lock:
            waiting = self._idle.pop(memory.size, [])
            waiting.append(memory)
            self._idle[memory.size] = waiting
            self._idle_bytes += memory.size
            while self._idle_bytes > self._max_idle:
                self._remove(next(iter(self._idle)))

    def _remove(self, size: int) -> NDArray[np.uint8]:
        waiting = self._idle[size]
        memory = waiting.pop()
        self._idle_bytes -= size
        if not waiting:
            del self._idle[size]
        return memory


def memory_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    """All the memory behind an array that came from a pool."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _rounded(nbytes: int) -> int:
    """The next size of four per power of two, so that pictures of similar size share memory."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step
