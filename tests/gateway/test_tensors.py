"""Finished tensors: one run for all who want it, memory that nobody loses, and none that two have."""

from __future__ import annotations

import asyncio
import gc
import random

import numpy as np
import pytest

from pixelgate.errors import BusyError, DecodeError
from pixelgate.gateway.cache import Cache
from pixelgate.gateway.tensors import Tensors
from pixelgate.pixels.buffers import BufferPool

SHAPE = (64, 1024)  # 64 KiB, the smallest block of a pool
BLOCK = 1 << 16


def test_a_cache_keeps_what_was_used_last_within_its_bytes():
    gone = []
    cache = Cache(100, gone.append)
    for name in "abc":
        assert cache.put(name, name, 30)
    assert cache.get("a") == "a"
    assert cache.put("d", "d", 30)
    assert gone == ["b"]
    assert cache.get("b") is None
    assert cache.nbytes == 90
    assert cache.put("c", "C", 50)
    assert gone == ["b", "c", "a"]
    assert (cache.get("c"), cache.nbytes) == ("C", 80)
    assert not cache.put("e", "e", 101)
    assert (cache.get("e"), cache.nbytes) == (None, 80)
    assert not Cache(0).put("a", "a", 1)


def maker(tensors, value, log=None, wait=0.0):
    async def make():
        if log is not None:
            log.append(value)
        out = tensors.buffers.take(SHAPE, "uint8")
        out[:] = value
        await asyncio.sleep(wait)
        return out

    return make


async def test_fifty_who_want_a_new_tensor_make_one_run():
    tensors, log = Tensors(BufferPool(1 << 20), 1 << 20), []
    leases = await asyncio.gather(*(tensors.obtain("a", maker(tensors, 7, log, 0.01)) for _ in range(50)))
    assert log == [7]
    assert {id(lease) for lease in leases} == {id(leases[0])}
    assert leases[0].users == 50
    assert (await tensors.obtain("a", maker(tensors, 8, log))).array[0, 0] == 7
    assert log == [7]


async def test_the_run_goes_on_without_whoever_came_first_and_ends_with_the_last():
    tensors, log, ended = Tensors(BufferPool(1 << 20), 1 << 20), [], []

    def make(value):
        async def work():
            try:
                return await maker(tensors, value, log, 0.05)()
            except asyncio.CancelledError:
                ended.append(value)
                raise

        return work

    tasks = [asyncio.create_task(tensors.obtain("a", make(1))) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    tasks[1].cancel()
    assert (await tasks[2]).array[0, 0] == 1
    tasks = [asyncio.create_task(tensors.obtain("b", make(2))) for _ in range(3)]
    await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    lease = await tensors.obtain("b", make(3))  # at once, while the other is still ending
    assert (lease.array[0, 0], ended, log) == (3, [2], [1, 2, 3])


async def test_everybody_gets_the_failure_and_may_say_of_it_where():
    tensors = Tensors(BufferPool(1 << 20), 1 << 20)
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
    assert (await tensors.obtain("a", maker(tensors, 1))).array[0, 0] == 1  # a failure is not kept


async def test_whoever_only_names_a_tensor_makes_none_but_waits_for_it():
    tensors = Tensors(BufferPool(1 << 20), 0)
    assert await tensors.obtain("a", None) is None
    made = asyncio.create_task(tensors.obtain("a", maker(tensors, 5, wait=0.01)))
    await asyncio.sleep(0)
    named = await tensors.obtain("a", None)
    assert named is await made
    assert named.users == 2


async def test_when_the_first_is_told_to_come_back_the_next_tries():
    tensors, log = Tensors(BufferPool(1 << 20), 1 << 20), []

    async def busy():
        await asyncio.sleep(0.01)
        raise BusyError("later")

    first = asyncio.create_task(tensors.obtain("a", busy))
    await asyncio.sleep(0)
    others = [asyncio.create_task(tensors.obtain("a", maker(tensors, value, log))) for value in (1, 2)]
    with pytest.raises(BusyError):
        await first
    assert [(await other).array[0, 0] for other in others] == [1, 1]
    assert log == [1]


async def test_memory_goes_back_when_it_is_neither_kept_nor_used():
    pool = BufferPool(1 << 20)
    tensors = Tensors(pool, 2 * BLOCK)
    first = await tensors.obtain("a", maker(tensors, 1))
    again = await tensors.obtain("a", maker(tensors, 9))
    for name, value in (("b", 2), ("c", 3)):
        tensors.release(await tensors.obtain(name, maker(tensors, value)))
    assert tensors.find("a") is None
    assert pool.idle_bytes == 0
    tensors.release(first)
    assert pool.idle_bytes == 0
    assert again.array[0, 0] == 1
    tensors.release(again)
    assert pool.idle_bytes == BLOCK
    tensors.release(await tensors.obtain("d", maker(tensors, 4)))  # takes it, and b leaves
    assert pool.idle_bytes == BLOCK
    nothing_kept = Tensors(pool, 0)
    lease = await nothing_kept.obtain("a", maker(nothing_kept, 1))
    assert pool.idle_bytes == 0
    nothing_kept.release(lease)
    assert pool.idle_bytes == BLOCK


async def test_what_somebody_never_released_is_not_used_again():
    pool = BufferPool(1 << 20)
    tensors = Tensors(pool, BLOCK)
    lost = (await tensors.obtain("a", maker(tensors, 1))).array
    tensors.release(await tensors.obtain("b", maker(tensors, 2)))
    gc.collect()
    assert pool.idle_bytes == 0
    assert pool.take(SHAPE, "uint8").ctypes.data != lost.ctypes.data


@pytest.mark.parametrize("seed", range(4))
async def test_nobody_ever_sees_another_tensor_than_its_own(seed):
    """Many requests, few kept, random endings: each reads what it asked for as long as it holds it."""
    rng = random.Random(seed)
    tensors = Tensors(BufferPool(4 * BLOCK), 3 * BLOCK)

    async def use(value):
        lease = await tensors.obtain(str(value), maker(tensors, value, wait=rng.random() / 500))
        for _ in range(3):
            assert np.all(lease.array == value)
            await asyncio.sleep(rng.random() / 500)
        assert np.all(lease.array == value)
        if rng.random() < 0.9:
            tensors.release(lease)

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
