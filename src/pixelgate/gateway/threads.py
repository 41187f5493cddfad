"""The threads that work on pictures and prompts, given to clients in turn."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pixelgate.budget import Budget, Waited
from pixelgate.fairness import Owner

_T = TypeVar("_T")
_AHEAD = 2  # jobs handed over for each thread, so that none waits for the event loop between two


class Threads:
    """``count`` threads. What waits for one waits in a fair queue: a request is done when its share is done.

    ``waited`` is told, on the thread, for how many seconds a job had to wait for it.
    """

    def __init__(self, count: int, waited: Waited = lambda seconds: None) -> None:
        self._waited = waited
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="pixelgate-thread")
        self._turns = Budget("jobs", _AHEAD * count)

    async def run(self, owner: Owner, work: Callable[..., _T], *arguments: Any) -> _T:
        """The result of ``work`` on a thread. Cancelled before its turn it is not begun."""
        wanted = time.perf_counter()
        await self._turns.take(1, owner)
        loop = asyncio.get_running_loop()

        def begin() -> _T:
            self._waited(time.perf_counter() - wanted)
            return work(*arguments)

        def over(_: Future[_T]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._turns.give_back, 1)

        try:
            job = self._pool.submit(contextvars.copy_context().run, begin)  # with the request's id, for the log
        except BaseException:
            self._turns.give_back(1)
            raise
        job.add_done_callback(over)  # the thread's end, which may be long after this task's
        return await asyncio.wrap_future(job)

    def shutdown(self) -> None:
        """Wait for what has begun, and begin nothing more."""
        self._pool.shutdown(cancel_futures=True)
