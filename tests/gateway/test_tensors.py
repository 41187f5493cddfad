"""Finished tensors: one run for all who want it, and memory that nobody loses."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref

import numpy as np
import pytest

from pixelgate.errors import BusyError, DecodeError
from pixelgate.gateway.cache import Cache
from pixelgate.gateway.tensors import Tensors
from pixelgate.pixels.outgoing import memory_of, outgoing

SHAPE = (64, 1024)
BLOCK = 1 << 16


def test_a_cache_keeps_what_was_used_last_within_its_bytes():
    cache = Cache(100)
    for name in "abc":
        assert cache.put(name, name, 30)
    assert cache.get("a") == "a"
    assert cache.put("d", "d", 30)
    assert cache.get("b") is None
    assert cache.nbytes == 90
    assert cache.put("c", "C", 50)
    assert cache.get("a") is None
    assert (cache.get("c"), cache.get("d"), cache.nbytes) == ("C", "d", 80)
    assert not cache.put("e", "e", 101)
    assert (cache.get("e"), cache.nbytes) == (None, 80)
    assert not Cache(0).put("a", "a", 1)


def maker(value, log=None, wait=0.0):
    async def make():
        if log is not None:
            log.append(value)
        out = outgoing(SHAPE, "uint8")
        out[:] = value
        await asyncio.sleep(wait)
        return out

    return make


async def test_fifty_who_want_a_new_tensor_make_one_run():
    tensors, log = Tensors(1 << 20), []
    got = await asyncio.gather(*(tensors.obtain("a", maker(7, log, 0.01)) for _ in range(50)))
    assert log == [7]
    assert {id(tensor) for tensor in got} == {id(got[0])}
    assert (await tensors.obtain("a", maker(8, log)))[0, 0] == 7
    assert log == [7]


async def test_the_run_goes_on_without_whoever_came_first_and_ends_with_the_last():
    tensors, log, ended = Tensors(1 << 20), [], []

    def make(value):
        async def work():
            try:
                return await maker(value, log, 0.05)()
            except asyncio.CancelledError:
                ended.append(value)
                raise

        return work

    tasks = [asyncio.create_task(tensors.obtain("a", make(1))) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    tasks[1].cancel()
    assert (await tasks[2])[0, 0] == 1
    tasks = [asyncio.create_task(tensors.obtain("b", make(2))) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tensor = await tensors.obtain("b", make(3))  # at once, while the other is still ending
    assert (tensor[0, 0], ended, log) == (3, [2], [1, 2, 3])


async def test_everybody_gets_the_failure_and_may_say_of_it_where():
    tensors = Tensors(1 << 20)
    runs = []

    async def fail():
        runs.append(1)
        await asyncio.sleep(0.01)
        raise DecodeError("damaged")

    failures = await asyncio.gather(*(tensors.obtain("a", fail) for _ in range(3)), return_exceptions=True)
    assert [str(failure) for failure in failures] == ["damaged"] * 3
    assert {type(failure) for failure in failures} == {DecodeError}
    failures[0].param = "here"
    assert failures[1].param is None
    assert len(runs) == 1
    assert (await tensors.obtain("a", maker(1)))[0, 0] == 1  # a failure is not kept


async def test_whoever_only_names_a_tensor_makes_none_but_waits_for_it():
    tensors = Tensors(0)
    assert await tensors.obtain("a", None) is None
    made = asyncio.create_task(tensors.obtain("a", maker(5, wait=0.01)))
    await asyncio.sleep(0)
    named = await tensors.obtain("a", None)
    assert named is await made


async def test_when_the_first_is_told_to_come_back_the_next_tries():
    tensors, log = Tensors(1 << 20), []

    async def busy():
        await asyncio.sleep(0.01)
        raise BusyError("later")

    first = asyncio.create_task(tensors.obtain("a", busy))
    await asyncio.sleep(0)
    others = [asyncio.create_task(tensors.obtain("a", maker(value, log))) for value in (1, 2)]
    with pytest.raises(BusyError):
        await first
    assert [(await other)[0, 0] for other in others] == [1, 1]
    assert log == [1]


async def test_memory_goes_when_it_is_neither_kept_nor_used():
    tensors, there = Tensors(2 * BLOCK), weakref.WeakValueDictionary()

    async def obtain(name, value):
        tensor = await tensors.obtain(name, maker(value))
        there[name] = memory_of(tensor)
        return tensor

    gc.disable()
    try:
        first = await obtain("a", 1)
        again = await obtain("a", 9)
        for name, value in (("b", 2), ("c", 3)):
            await obtain(name, value)
        assert {*there} == {"a", "b", "c"}
        assert tensors.kept.get("a") is None
        del first
        assert again[0, 0] == 1
        del again
        assert {*there} == {"b", "c"}
        await obtain("d", 4)
        assert {*there} == {"c", "d"}
        nothing_kept = Tensors(0)
        tensor = await nothing_kept.obtain("a", maker(1))
        there["a"] = memory_of(tensor)
        del tensor
        await asyncio.sleep(0)
        assert {*there} == {"c", "d"}
    finally:
        gc.enable()


async def test_the_room_before_a_tensor_counts():
    tensors = Tensors(BLOCK)

    async def make():
        return outgoing(SHAPE, "uint8", 16)

    assert await tensors.obtain("a", make) is not None
    assert tensors.kept.get("a") is None
    assert await tensors.obtain("a", maker(1)) is not None
    assert tensors.kept.nbytes == BLOCK


@pytest.mark.parametrize("seed", range(4))
async def test_nobody_ever_sees_another_tensor_than_its_own(seed):
    """Many requests, few kept, random endings: each reads what it asked for as long as it holds it."""
    rng = random.Random(seed)
    tensors = Tensors(3 * BLOCK)

    async def use(value):
        tensor = await tensors.obtain(str(value), maker(value, wait=rng.random() / 500))
        for _ in range(3):
            assert np.all(tensor == value)
            await asyncio.sleep(rng.random() / 500)
        assert np.all(tensor == value)

    async def request():
        await asyncio.sleep(rng.random() / 10)
        task = asyncio.create_task(use(rng.randrange(12)))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() / 200)
            task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    await asyncio.gather(*(request() for _ in range(300)))
    assert tensors.kept.nbytes <= 3 * BLOCK
    assert not tensors._flights
