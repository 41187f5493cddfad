"""Values kept for the next request, within a budget of bytes; what was used longest ago goes first."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Cache(Generic[_K, _V]):
    """At most ``max_bytes`` of values, each as large as it is said to be. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: dict[_K, tuple[_V, int]] = {}  # the one used last at the end
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self._bytes

    def get(self, key: _K) -> _V | None:
        """The value of ``key``, if it is still there."""
        with self._lock:
            found = self._values.pop(key, None)
            if found is None:
                return None
            self._values[key] = found
            return found[0]

    def put(self, key: _K, value: _V, nbytes: int) -> bool:
        """Keep a value in the place of others; False where it is larger than the whole budget."""
        if nbytes > self._max_bytes:
            return False
        with self._lock:
            if key in self._values:
                self._bytes -= self._values.pop(key)[1]
            self._values[key] = value, nbytes
            self._bytes += nbytes
            while self._bytes > self._max_bytes:
                self._bytes -= self._values.pop(next(iter(self._values)))[1]
        return True
