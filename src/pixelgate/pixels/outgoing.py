"""Tensors made where they will be sent from: at the end of a bytes object, with room for the rest of a message.

A message to an engine has to be one bytes object. To join one around a finished tensor is to copy the tensor, and with
the interpreter's lock held.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.pixels.affine import NUMPY_DTYPES

_ALIGNED = 16  # bytes, as malloc aligns
# Who makes a bytes object without contents may write them, as long as nobody else has it: so says CPython's reference.
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


class Outgoing:
    """Memory for a tensor of ``nbytes`` with ``room`` bytes before it, which one sender at a time may fill."""

    def __init__(self, nbytes: int, room: int) -> None:
        self.nbytes, self.room = nbytes, room
        self._whole: bytes = _new(None, room + nbytes)
        self._start: int = _address(self._whole)
        self._references = sys.getrefcount(self._whole)
        self._lock = threading.Lock()
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self._start + room, False),
        }

    def lend(self, front: bytes) -> bytes | None:
        """``front``, which must be ``room`` bytes, and the tensor; None while anybody else has what this gave before.

        Whoever lets go of it lets the next one change it.
        """
        assert len(front) == self.room
        with self._lock:
            if sys.getrefcount(self._whole) > self._references:
                return None
            ctypes.memmove(self._start, front, len(front))
            return self._whole


def outgoing(shape: tuple[int, ...], dtype: str, room: int = 0) -> NDArray[Any]:
    """A C-contiguous array of undefined contents, with at least ``room`` bytes before it."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * NUMPY_DTYPES[dtype].itemsize
    memory = Outgoing(nbytes, -(-room // _ALIGNED) * _ALIGNED)
    return np.asarray(memory).view(NUMPY_DTYPES[dtype]).reshape(shape)


def memory_of(array: NDArray[Any]) -> Outgoing | None:
    """The memory of a tensor that `outgoing` made; None for any other array, and for a part of such a tensor."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    whole = isinstance(base, Outgoing) and array.nbytes == base.nbytes and array.flags.c_contiguous
    return base if whole else None


def size_of(array: NDArray[Any]) -> int:
    """Bytes that a tensor takes, with the room before it."""
    memory = memory_of(array)
    return array.nbytes if memory is None else memory.room + memory.nbytes
