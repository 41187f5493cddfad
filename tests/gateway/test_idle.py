"""Memory that a burst has left is given back once, when nobody asks any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pixelgate.gateway import idle


@pytest.fixture
async def looked(monkeypatch):
    """Let ``idle`` look, time and again without waiting; how often memory was given back until then."""
    turn, waiting, trims = asyncio.Event(), asyncio.Event(), []

    async def sleep(seconds):
        assert seconds == idle.AFTER
        waiting.set()
        await turn.wait()
        turn.clear()

    monkeypatch.setattr(idle.asyncio, "sleep", sleep)
    monkeypatch.setattr(idle, "trim", lambda: trims.append(threading.current_thread()))
    activity = idle.Activity()
    task = asyncio.create_task(idle.give_back_memory(activity))

    async def look():
        await waiting.wait()
        waiting.clear()
        turn.set()
        await waiting.wait()
        return len(trims)

    yield activity, look, trims
    task.cancel()


async def test_once_after_each_burst_and_never_beside_a_request(looked):
    activity, look, trims = looked
    assert [await look(), await look()] == [0, 0]  # nobody has asked yet
    with activity.request(), activity.request():
        assert [await look(), await look()] == [0, 0]
    assert activity.under_way == 0
    assert [await look(), await look(), await look()] == [1, 1, 1]
    with activity.request():
        pass
    assert [await look(), await look(), await look()] == [1, 2, 2]
    assert threading.main_thread() not in trims


async def test_a_request_that_fails_is_over_as_well():
    activity = idle.Activity()
    with pytest.raises(ValueError, match="no"), activity.request():
        raise ValueError("no")
    assert (activity.begun, activity.under_way) == (1, 0)
