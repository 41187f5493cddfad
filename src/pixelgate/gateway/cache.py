"""Values kept for the next request, within a budget of bytes; what was used longest ago goes first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


class Cache(Generic[_K, _V]):
    """At most ``max_bytes`` of values, each as large as it is said to be. Thread-safe.

    ``dropped`` is told of every value that leaves, be it for another of its key.
    """

    def __init__(self, max_bytes: int, dropped: Callable[[_V], None] = lambda value: None) -> None:
        self._max_bytes = max_bytes
        self._dropped = dropped
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
            gone = [self._values.pop(key)] if key in self._values else []
            self._bytes += nbytes - sum(size for _, size in gone)
            self._values[key] = value, nbytes
            while self._bytes > self._max_bytes:
                oldest = self._values.pop(next(iter(self._values)))
                self._bytes -= oldest[1]
                gone.append(oldest)
        for old, _ in gone:
            self._dropped(old)
        return True
