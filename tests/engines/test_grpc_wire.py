"""Messages made around their pixels, in the memory in which these were made."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from dataclasses import replace

import engine_requests
import grpc
import numpy as np
import pytest
import sglang_requests
from engine_requests import FACTS, answer, until
from scripted_vllm import client, scripted
from smg_grpc_proto.generated import sglang_scheduler_pb2, vllm_engine_pb2

from pixelgate.engines import sglang_wire, vllm_wire
from pixelgate.engines.grpc_wire import room_before
from pixelgate.errors import EngineError, EngineUnavailableError, RequestError
from pixelgate.pixels.outgoing import Outgoing, memory_of, outgoing
from pixelgate.testing.strict_engine import StrictEngine

DIALECTS = {
    "vllm": (vllm_wire.encode, vllm_engine_pb2, lambda: engine_requests.request("uint8", grids=((4, 4),))),
    "sglang": (sglang_wire.encode, sglang_scheduler_pb2, lambda: sglang_requests.request(((2, 3),))),
}


def with_pixels(request, array):
    """``request`` with the values of its only picture in ``array``."""
    pixels, *others = request.images.tensors
    array = array.view(pixels.parts[0].dtype).reshape(pixels.parts[0].shape)
    array[...] = pixels.parts[0]
    tensors = (replace(pixels, parts=(array,)), *others)
    return replace(request, images=replace(request.images, tensors=tensors))


def is_in(message, array):
    return np.shares_memory(np.frombuffer(message, np.uint8), array)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("spare", [*range(-1, 20), *range(125, 136), *range(16_380, 16_394), 200_000])
def test_whatever_the_room_it_is_the_same_message(dialect, spare):
    encode, protocol, made = DIALECTS[dialect]
    request = made()
    expected = encode(request)
    nbytes = request.images.tensors[0].nbytes
    array = np.asarray(Outgoing(nbytes, len(expected) - nbytes + spare))
    message = encode(with_pixels(request, array))
    assert is_in(message, array) == (spare >= 0 and spare != 1)
    assert len(message) == len(expected) + (spare if is_in(message, array) else 0)
    parse = protocol.GenerateRequest.FromString
    assert parse(message) == parse(expected)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_there_is_room_for_a_usual_message_and_little_of_it_is_wasted(dialect):
    encode, _, made = DIALECTS[dialect]
    request = made()
    request = replace(request, token_ids=request.token_ids + (31_999,) * 4000)
    array = outgoing((request.images.tensors[0].nbytes,), "uint8", room_before(len(request.token_ids)))
    message = encode(with_pixels(request, array))
    assert is_in(message, array)
    assert len(message) < len(encode(request)) + (5 << 10)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_message_with_more_in_it_is_joined(dialect):
    encode, protocol, made = DIALECTS[dialect]
    request = made()
    request = replace(request, sampling=replace(request.sampling, stop=("x" * (1 << 17),)))
    array = outgoing((request.images.tensors[0].nbytes,), "uint8", room_before(1 << 20))
    message = encode(with_pixels(request, array))
    assert not is_in(message, array)
    assert message == encode(request)
    assert len(protocol.GenerateRequest.FromString(message).sampling_params.stop[0]) == 1 << 17


@pytest.fixture
def lendings(monkeypatch):
    """For every message with a single picture whether it was made in place."""
    lend, found = Outgoing.lend, []

    def noted(memory, front):
        whole = lend(memory, front)
        found.append(whole is not None)
        return whole

    monkeypatch.setattr(Outgoing, "lend", noted)
    return found


def kept_picture(stream=True):
    """A tensor with room before it, and requests with different prompts for it."""
    first = engine_requests.request("uint8", stream=stream, grids=((4, 4),))
    array = outgoing((first.images.tensors[0].nbytes,), "uint8", 4096)
    first = with_pixels(first, array)
    ids = first.token_ids
    return array, [replace(first, request_id=f"r-{i}", token_ids=(*ids, *[6] * i)) for i in range(5)]


def arrived(server):
    """What an engine has got: of each request its prompt and pixels."""
    return {
        got.request_id: (tuple(got.tokenized.input_ids), got.mm_inputs.pixel_values.inline) for got in server.requests
    }


def sent(requests, pixels):
    return {request.request_id: (request.token_ids, pixels) for request in requests}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tensor_that_is_kept_is_sent_in_place_again_and_again(lendings, stream):
    array, requests = kept_picture(stream)
    before = array.tobytes()
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        for request in requests:
            await answer(engine, request)
    assert lendings == [True] * 5
    assert arrived(server) == sent(requests, before)
    assert array.tobytes() == before


@pytest.mark.parametrize("stream", [True, False])
async def test_while_one_sends_it_others_copy_it(lendings, stream):
    array, requests = kept_picture(stream)
    memory = memory_of(array)
    held = [memory.lend(bytes(memory.room))]
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        await answer(engine, requests[0])
        held.clear()
        await asyncio.gather(*(answer(engine, request) for request in requests[1:]))
    assert lendings[:3] == [True, False, True]
    assert arrived(server) == sent(requests, array.tobytes())


@pytest.mark.parametrize("stream", [True, False])
async def test_whatever_becomes_of_a_request_the_next_may_do_the_same(lendings, stream):
    array, requests = kept_picture(stream)
    async with StrictEngine(FACTS, delay=5) as server, client(server.url) as engine:
        (await engine._connected()).one_reply = not stream
        task = asyncio.create_task(answer(engine, requests[0]))
        await until(lambda: server.running)
        task.cancel()
        await asyncio.wait([task])
        task = asyncio.create_task(answer(engine, requests[1]))
        await until(lambda: server.running)
        await engine.close()
        with pytest.raises(EngineUnavailableError):
            await task
        del task  # and with it the failure, which has the frames that hold the message
    async with StrictEngine(replace(FACTS, vocab_size=7)) as server, client(server.url) as engine:
        (await engine._connected()).one_reply = not stream
        with pytest.raises(RequestError):
            await answer(engine, requests[2])
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        await answer(engine, requests[3])
        assert arrived(server) == sent(requests[3:4], array.tobytes())
    assert lendings == [True] * 4


@pytest.mark.parametrize("one_step", [True, False])
@pytest.mark.parametrize("status", [grpc.StatusCode.OK, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_a_failed_request_keeps_no_tensor(status, one_step):
    sent = engine_requests.request("bfloat16", stream=False, grids=((4, 4),))
    array = outgoing((sent.images.tensors[0].nbytes,), "uint8", 4096)
    sent, gone = with_pixels(sent, array), weakref.ref(memory_of(array))
    async with scripted([], None if status is grpc.StatusCode.OK else status) as (engine, _):
        (await engine._connected()).one_reply = one_step
        gc.disable()
        try:
            with contextlib.suppress(EngineError):
                await answer(engine, sent)
            del sent, array
            await until(lambda: gone() is None)
        finally:
            gc.enable()
