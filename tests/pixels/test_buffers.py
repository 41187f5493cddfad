from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

from pixelgate.pixels.buffers import BufferPool

KIB, MIB = 1 << 10, 1 << 20


def memory_of(array):
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", np.uint8), ("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)],
)
@pytest.mark.parametrize("shape", [(4, 1176), (1000, 1176), (7,), (0, 1176), ()])
def test_arrays_are_of_the_shape_and_dtype_that_were_asked_for(shape, dtype, expected):
    array = BufferPool(MIB).take(shape, dtype)
    assert (array.shape, array.dtype) == (shape, np.dtype(expected))
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.flags.writeable
    array[...] = 1
    assert (array == 1).all()


def test_memory_that_was_given_back_is_taken_again():
    pool = BufferPool(MIB)
    first = pool.take((100, 1176), "float32")
    place = memory_of(first)
    pool.give(first)
    assert pool.idle_bytes >= 100 * 1176 * 4
    # another dtype and a similar size, as of the next picture
    second = pool.take((199, 1176), "bfloat16")
    assert memory_of(second) == place
    assert pool.idle_bytes == 0
    third = pool.take((199, 1176), "bfloat16")
    assert memory_of(third) != place


def test_what_is_taken_is_nobody_elses():
    pool = BufferPool(64 * MIB)
    held = []
    for round_ in range(3):
        for number in range(10):
            array = pool.take((64, 1176), "float32")
            array[...] = number
            held.append(array)
        assert len({memory_of(array) for array in held}) == 10
        assert [array[0, 0] for array in held] == list(range(10)), round_
        while held:
            pool.give(held.pop())


def test_a_view_gives_back_the_whole():
    pool = BufferPool(MIB)
    array = pool.take((100, 1176), "uint8")
    place = memory_of(array)
    pool.give(array[3:].reshape(-1)[5:])
    assert memory_of(pool.take((100, 1176), "uint8")) == place


def test_no_more_waits_than_allowed_and_sizes_not_used_lately_go_first():
    pool = BufferPool(4 * MIB)
    old, new, newer = (pool.take((size,), "uint8") for size in (MIB, 2 * MIB, 2 * MIB))
    places = memory_of(new), memory_of(newer)
    pool.give(old)
    assert pool.idle_bytes == MIB
    pool.give(new)
    assert pool.idle_bytes == 3 * MIB
    pool.give(newer)
    assert pool.idle_bytes == 4 * MIB
    assert memory_of(pool.take((2 * MIB,), "uint8")) in places
    assert pool.idle_bytes == 2 * MIB


def test_a_pool_full_of_old_sizes_still_takes_new_ones():
    pool = BufferPool(MIB)
    for array in [pool.take((64 * KIB,), "uint8") for _ in range(16)]:
        pool.give(array)
    assert pool.idle_bytes == MIB
    large = pool.take((512 * KIB,), "uint8")
    place = memory_of(large)
    pool.give(large)
    assert pool.idle_bytes == MIB
    assert memory_of(pool.take((512 * KIB,), "uint8")) == place
    assert pool.idle_bytes == 512 * KIB


def test_what_is_larger_than_the_pool_is_freed():
    pool = BufferPool(MIB)
    small = pool.take((1000,), "uint8")
    pool.give(small)
    waiting = pool.idle_bytes
    pool.give(pool.take((2 * MIB,), "uint8"))
    assert pool.idle_bytes == waiting
    none = BufferPool(0)
    none.give(none.take((10,), "uint8"))
    assert none.idle_bytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, 65536, 65537, 81921, 100_001, MIB, MIB + 1, 24_000_001, (1 << 31) + 1])
def test_little_is_rounded_up(nbytes):
    from pixelgate.pixels.buffers import _rounded

    size = _rounded(nbytes)
    assert size >= max(nbytes, 65536)
    assert size <= max(nbytes * 1.25 + 1, 65536)
    assert _rounded(size) == size


def test_threads_never_hold_the_same_memory():
    pool = BufferPool(MIB)
    wrong = []

    def work(number):
        rng = np.random.default_rng(number)
        for _ in range(300):
            array = pool.take((int(rng.integers(1, 200)), 1176), "uint8")
            array[...] = number
            if not (array == number).all():
                wrong.append(number)
            pool.give(array)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < pool.idle_bytes <= MIB
    assert pool.idle_bytes == sum(size * len(waiting) for size, waiting in pool._idle.items())
