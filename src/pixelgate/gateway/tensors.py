"""Finished tensors: those that requests are using, and those that are kept for the next.

A tensor is made once however many requests want it at the same time, and lives in pooled memory that goes back to the
pool when it is neither kept nor used.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from pixelgate.errors import BusyError, PixelgateError
from pixelgate.gateway.cache import Cache
from pixelgate.pixels.buffers import BufferPool, memory_of

Make = Callable[[], Coroutine[Any, Any, NDArray[Any]]]


@dataclass(eq=False)
class Lease:
    """A tensor that somebody reads; nobody writes to it.

    Whoever is certainly done with it says so by `Tensors.release`. From whoever is not, as a request that was cancelled
    while a thread was still reading, it is never taken: its memory does not go back to the pool.
    """

    array: NDArray[Any]
    users: int
    kept: bool = True


@dataclass(eq=False)
class _Flight:
    """A tensor that is being made, and how many wait for it."""

    task: asyncio.Task[Lease]
    waiting: int = 0


class Tensors:
    """Tensors by identity, of which at most ``max_bytes`` are kept. Used from one event loop."""

    def __init__(self, buffers: BufferPool, max_bytes: int) -> None:
        self.buffers = buffers
        self.kept: Cache[str, Lease] = Cache(max_bytes, self._dropped)
        self._flights: dict[str, _Flight] = {}

    def find(self, identity: str) -> Lease | None:
        """A tensor that is kept."""
        lease = self.kept.get(identity)
        if lease is not None:
            lease.users += 1
        return lease

    async def obtain(self, identity: str, make: Make | None) -> Lease | None:
        """A tensor that is kept, or is being made for another request, or else what ``make`` makes; None without it.

        It goes on being made for the others when whoever wanted it first gives up, and is cancelled when all have. What
        ``make`` raises everybody gets, but that the gateway is too busy for whoever began: then the next tries.
        """
        while True:
            if (lease := self.find(identity)) is not None:
                return lease
            flight, begins = self._flights.get(identity), False
            if flight is None:
                if make is None:
                    return None
                flight, begins = _Flight(asyncio.create_task(self._run(identity, make))), True
                self._flights[identity] = flight
            try:
                return await self._landed(identity, flight)
            except BusyError:
                if begins:
                    raise

    async def _landed(self, identity: str, flight: _Flight) -> Lease:
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except PixelgateError as failure:
            raise copy.copy(failure) from None  # each says of it where in its own request it happened
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                self._flights.pop(identity)
                flight.task.cancel()

    def release(self, lease: Lease) -> None:
        """Say that one user is done with a tensor and holds no view of it."""
        lease.users -= 1
        self._recycle(lease)

    async def _run(self, identity: str, make: Make) -> Lease:
        flight = self._flights[identity]
        try:
            array = await make()
        except BaseException:
            if self._flights.get(identity) is flight:
                del self._flights[identity]
            raise
        del self._flights[identity]
        # Counted for all who wait, before anything can drop it; from now on everybody finds it among the kept.
        lease = Lease(array, users=flight.waiting)
        lease.kept = self.kept.put(identity, lease, memory_of(array).nbytes)
        return lease

    def _dropped(self, lease: Lease) -> None:
        lease.kept = False
        self._recycle(lease)

    def _recycle(self, lease: Lease) -> None:
        if not lease.kept and not lease.users:
            self.buffers.give(lease.array)
