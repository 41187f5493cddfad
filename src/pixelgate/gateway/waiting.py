"""Engines take minutes to load a model; a gateway that starts with them waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pixelgate.errors import ConfigError, EngineUnavailableError

_RETRY_SECONDS = 1.0

_T = TypeVar("_T")


async def until_available(ask: Callable[[], Awaitable[_T]], wait: float, engines: str) -> _T:
    """The answer of ``ask``, which is tried for ``wait`` seconds as long as no engine is available.

    Raises ConfigError, in which ``engines`` says who was asked: "engine of ...".
    """
    deadline = time.monotonic() + wait
    while True:
        try:
            return await ask()
        except EngineUnavailableError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ConfigError(f"no {engines} answered within {wait:g} seconds") from None
            await asyncio.sleep(min(_RETRY_SECONDS, left))
