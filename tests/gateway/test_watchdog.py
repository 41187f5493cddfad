from __future__ import annotations

import asyncio
import time

import pytest
from running import until

from pixelgate.gateway import watchdog
from pixelgate.gateway.metrics import Metrics


def value(metrics, name):
    return metrics.registry.get_sample_value(f"pixelgate_event_loop_lag_{name}")


@pytest.fixture
async def metrics(monkeypatch):
    monkeypatch.setattr(watchdog, "_SHOWN_EVERY", 0.05)
    metrics = Metrics()
    task = asyncio.create_task(watchdog.watch(metrics))
    await asyncio.sleep(0)
    yield metrics
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_loop_that_stands_still_is_seen(metrics):
    await until(lambda: value(metrics, "seconds_count") >= 5)
    looks = value(metrics, "seconds_count")
    time.sleep(0.3)  # noqa: ASYNC251 - the mistake that is to be found
    await until(lambda: value(metrics, "max_seconds") >= 0.3 - watchdog.INTERVAL)
    # all that were due while it stood still, each with its own time
    assert value(metrics, "seconds_count") - looks >= 0.3 / watchdog.INTERVAL - 1
    assert value(metrics, "seconds_sum") >= sum(0.02 * n for n in range(14))


async def test_the_maximum_is_forgotten_after_a_while(monkeypatch):
    monkeypatch.setattr(watchdog, "_SHOWN_EVERY", 0.05)
    monkeypatch.setattr(watchdog, "_REMEMBERED", 1)
    metrics = Metrics()
    task = asyncio.create_task(watchdog.watch(metrics))
    await asyncio.sleep(0)
    time.sleep(1.0)  # noqa: ASYNC251
    await until(lambda: value(metrics, "max_seconds") > 0.9)
    await until(lambda: value(metrics, "max_seconds") < 0.9)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_looks_that_were_missed_count():
    metrics = Metrics()
    watchdog.observe(metrics, 0.05)
    assert value(metrics, "seconds_count") == 3
    assert value(metrics, "seconds_sum") == pytest.approx(0.05 + 0.03 + 0.01)
    watchdog.observe(metrics, 0.0)
    assert value(metrics, "seconds_count") == 4
