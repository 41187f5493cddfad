"""Tensors in the memory that will be sent."""

from __future__ import annotations

import gc
import threading
import weakref

import ml_dtypes
import numpy as np
import pytest

from pixelgate.pixels.outgoing import Outgoing, memory_of, outgoing, size_of


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", np.uint8), ("float32", np.float32), ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)],
)
@pytest.mark.parametrize("shape", [(4, 1176), (1000, 1176), (7,), (0, 1176), ()])
@pytest.mark.parametrize("room", [0, 1, 4100])
def test_arrays_are_of_the_shape_and_dtype_that_were_asked_for(shape, dtype, expected, room):
    array = outgoing(shape, dtype, room)
    assert (array.shape, array.dtype) == (shape, np.dtype(expected))
    assert array.flags.c_contiguous
    assert array.flags.aligned
    assert array.flags.writeable
    array[...] = 1
    assert (array == 1).all()
    assert size_of(array) >= array.nbytes + room


@pytest.mark.parametrize("shape", [(3, 5), (100, 1176)])
def test_what_is_sent_is_what_comes_before_it_and_the_tensor(shape):
    array = outgoing(shape, "float32", 10)
    array[...] = np.arange(array.size).reshape(shape)
    memory = memory_of(array)
    assert memory.room >= 10
    whole = memory.lend(b"x" * memory.room)
    assert type(whole) is bytes
    assert whole == b"x" * memory.room + array.tobytes()
    assert np.shares_memory(np.frombuffer(whole, np.uint8), array)


def test_one_has_it_at_a_time():
    array = outgoing((4,), "uint8", 16)
    array[...] = 7
    memory = memory_of(array)
    for front in (b"a" * 16, b"b" * 16):
        whole = memory.lend(front)
        assert whole == front + b"\7" * 4
        assert memory.lend(b"c" * 16) is None
        held = [whole]
        del whole
        assert memory.lend(b"c" * 16) is None
        assert held == [front + b"\7" * 4]
        del held


def test_of_many_who_want_it_at_once_one_gets_it():
    memory, begin, got = Outgoing(4, 16), threading.Barrier(8), []

    def want():
        begin.wait()
        got.append(memory.lend(bytes(16)))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert sum(each is not None for each in got) == 1


def test_whole_tensors_are_known_in_every_shape_and_parts_are_not():
    array = outgoing((6, 4), "bfloat16", 16)
    memory = memory_of(array)
    assert memory_of(array.reshape(2, 3, 4)[None].view(np.uint8)) is memory
    for other in (array[1:], array[:, :2], array.T, array.copy(), np.zeros(4), np.frombuffer(b"abcd", np.uint8)):
        assert memory_of(other) is None
        assert size_of(other) == other.nbytes


def test_the_memory_lives_as_long_as_somebody_reads_it():
    array = outgoing((1 << 20,), "uint8", 16)
    array[...] = 3
    memory = memory_of(array)
    gone = weakref.ref(memory)
    whole, view = memory.lend(bytes(16)), array[5:]
    gc.disable()
    try:
        del array, memory
        assert gone() is not None
        assert (view == 3).all()
        del view
        assert gone() is None
        assert whole == bytes(16) + b"\3" * (1 << 20)
    finally:
        gc.enable()


def test_more_than_there_is_of_memory_is_an_error():
    with pytest.raises(MemoryError):
        outgoing((1 << 61,), "uint8")
