"""What all requests together may hold of something: encoded bytes, pixels, tensor bytes, workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from pixelgate.errors import BusyError, TooLargeError
from pixelgate.fairness import NOBODY, FairQueue, Owner

_BUSY = "the gateway has too much to do at the moment; try again later"

Waited = Callable[[float], None]


class Budget:
    """``total`` units of ``unit``, lent in turn to clients that wait up to ``wait`` seconds; None: for ever.

    At most ``most_waiting`` requests wait, no client with more than its share of them. Used from one event loop. What a
    request takes at once it gets at once or not at all.
    """

    def __init__(self, unit: str, total: int, wait: float | None = None, most_waiting: int | None = None) -> None:
        self.unit = unit
        self.total = total
        self.wait = wait
        self.most_waiting = most_waiting
        self.used = 0
        self._queue: FairQueue[tuple[int, asyncio.Future[None]]] = FairQueue()

    def share(self, owner: Owner = NOBODY, waited: Waited = lambda seconds: None) -> Share:
        """One request's part, empty; a context manager that gives all of it back however the request ends.

        ``waited`` is told for how many seconds the request had to wait, each time that it had to.
        """
        return Share(self, owner, waited)

    async def take(self, amount: int, owner: Owner = NOBODY, waited: Waited = lambda seconds: None) -> None:
        """Wait for ``amount`` and hold it; nothing is not waited for.

        Raises BusyError after ``wait`` seconds, or at once if too many wait.
        """
        if not amount or (not self._queue and self.used + amount <= self.total):
            self.used += amount
            return
        if self.most_waiting is not None and self._queue.is_full_for(owner, self.most_waiting):
            raise BusyError(_BUSY)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = amount, turn
        self._queue.push(owner, place)
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self.wait):
                await turn
        except BaseException as failure:
            if turn.done() and not turn.cancelled():  # its turn came at the very moment of its end
                self.give_back(amount)
            else:
                self._queue.remove(owner, place)
                self._lend()  # who stood behind it may fit
            if isinstance(failure, TimeoutError):
                raise BusyError(_BUSY) from None
            raise
        finally:
            waited(time.perf_counter() - start)

    def give_back(self, amount: int) -> None:
        """Return what was taken."""
        self.used -= amount
        self._lend()

    def _lend(self) -> None:
        while self._queue:
            amount, turn = self._queue.peek()
            if not turn.done():  # whoever is done has given up, and is about to take its place out
                if self.used + amount > self.total:
                    return
                self.used += amount
                turn.set_result(None)
            self._queue.pop()


class Share:
    """What one request holds of a budget."""

    def __init__(self, budget: Budget, owner: Owner, waited: Waited) -> None:
        self._budget = budget
        self._owner = owner
        self._waited = waited
        self.held = 0

    async def take(self, amount: int) -> None:
        """Hold ``amount`` more. Raises BusyError, or TooLargeError where the budget could never lend that much."""
        if self.held + amount > self._budget.total:
            raise TooLargeError(
                f"the request needs more than the {self._budget.total} {self._budget.unit} that all requests "
                "together may hold in one of the gateway's processes"
            )
        await self._budget.take(amount, self._owner, self._waited)
        self.held += amount

    def release(self) -> None:
        """Give everything back."""
        self._budget.give_back(self.held)
        self.held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
