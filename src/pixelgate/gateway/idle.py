"""What a burst of requests has left in memory goes back to the system when nobody asks any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pixelgate.process import trim

AFTER = 30.0
"""Seconds without a request; the next one then has its memory faulted in anew."""


class Activity:
    """How many requests there have been, and how many are under way."""

    def __init__(self) -> None:
        self.begun = 0
        self.under_way = 0

    @contextmanager
    def request(self) -> Iterator[None]:
        """One more, as long as the block runs."""
        self.begun += 1
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1


async def give_back_memory(activity: Activity, let_go: Callable[[], None] = lambda: None, after: float = AFTER) -> None:
    """Without end: once ``after`` seconds have passed without a request, give back what the last ones have left.

    ``let_go`` does so with what is more than memory; it is called on a thread.
    """
    seen = given = activity.begun
    while True:
        await asyncio.sleep(after)
        if activity.begun == seen != given and not activity.under_way:
            await asyncio.to_thread(let_go)
            await asyncio.to_thread(trim)
            given = seen
        seen = activity.begun
