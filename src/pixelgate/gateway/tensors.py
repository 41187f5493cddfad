"""Finished tensors by what they are of: kept for the next request, and made once for all who want one now."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from pixelgate.errors import BusyError, PixelgateError
from pixelgate.gateway.cache import Cache
from pixelgate.pixels.outgoing import size_of

Make = Callable[[], Coroutine[Any, Any, NDArray[Any]]]


@dataclass(eq=False)
class _Flight:
    """A tensor that is being made, and how many wait for it."""

    task: asyncio.Task[NDArray[Any]]
    waiting: int = 0


class Tensors:
    """Tensors by identity, of which at most ``max_bytes`` are kept. Nobody writes to them. Used from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.kept: Cache[str, NDArray[Any]] = Cache(max_bytes)
        self._flights: dict[str, _Flight] = {}

    async def obtain(self, identity: str, make: Make | None) -> NDArray[Any] | None:
        """A tensor that is kept, or is being made for another request, or else what ``make`` makes; None without it.

        It goes on being made for the others when whoever wanted it first gives up, and is cancelled when all have. What
        ``make`` raises everybody gets, but that the gateway is too busy for whoever began: then the next tries.
        """
        while True:
            if (kept := self.kept.get(identity)) is not None:
                return kept
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

    async def _landed(self, identity: str, flight: _Flight) -> NDArray[Any]:
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

    async def _run(self, identity: str, make: Make) -> NDArray[Any]:
        flight = self._flights[identity]
        try:
            made = await make()
        finally:
            if self._flights.get(identity) is flight:
                del self._flights[identity]
        self.kept.put(identity, made, size_of(made))
        return made
