"""How late the event loop is: nothing that takes long may run on it."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from pixelgate.gateway.metrics import Metrics

INTERVAL = 0.02
"""Seconds between two looks; whatever stops the loop for longer is seen."""

_SHOWN_EVERY = 1.0
_REMEMBERED = 60


async def watch(metrics: Metrics) -> None:
    """Measure without end.

    Each look that was due and could not be taken counts, with the time by which it was late: so a stop of the loop
    weighs as much as it does for requests, which come at any time.
    """
    recent: deque[float] = deque(maxlen=_REMEMBERED)
    shown, worst = time.perf_counter(), 0.0
    while True:
        due = time.perf_counter() + INTERVAL
        await asyncio.sleep(INTERVAL)
        now = time.perf_counter()
        late = max(now - due, 0.0)  # the loop's clock has whole milliseconds
        worst = max(worst, late)
        observe(metrics, late)
        if now - shown >= _SHOWN_EVERY:
            recent.append(worst)
            metrics.loop_lag_max.set(max(recent))
            shown, worst = now, 0.0


def observe(metrics: Metrics, late: float) -> None:
    """Count a look that was ``late`` seconds late, and those that were due meanwhile."""
    metrics.loop_lag.observe(late)
    while (late := late - INTERVAL) > 0:
        metrics.loop_lag.observe(late)
