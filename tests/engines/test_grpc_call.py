"""A call in one step, and as a stream: what the library keeps of it, and for how long."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from engine_requests import FACTS, answer, free_port, request, until
from scripted_vllm import chunk, client, complete, scripted

from pixelgate.engines import grpc_call
from pixelgate.engines.vllm_wire import encode
from pixelgate.errors import (
    EngineDeclinedError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    RequestError,
    TooLargeError,
)
from pixelgate.testing.strict_engine import StrictEngine

REPLY = (10, 11, 12, 999)


@pytest.fixture
def ways(monkeypatch):
    """The kinds of all calls that requests become."""
    call, found = grpc_call.Call.__init__, []

    def noted(self, *args, **kwargs):
        call(self, *args, **kwargs)
        found.append("one step" if isinstance(self._call, grpc.aio.UnaryUnaryCall) else "a stream")

    monkeypatch.setattr(grpc_call.Call, "__init__", noted)
    return found


async def knows_one_reply(engine):
    (await engine._connected()).one_reply = True


@pytest.mark.parametrize(
    ("way", "fields"),
    [("one step", {"stream": False}), ("a stream", {}), ("a stream", {"stream": False, "n": 2, "temperature": 0.5})],
)
@pytest.mark.parametrize("dtype", [None, "uint8"])
async def test_one_step_is_for_what_has_one_reply(ways, way, fields, dtype):
    sent = request(dtype, **fields)
    async with StrictEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        for each in (request(stream=False), sent, sent):
            deltas = await answer(engine, each)
        assert engine._connection.kept == 0
    assert ways == ["a stream", way, way]
    tokens = {delta.index: () for delta in deltas}
    for delta in deltas:
        tokens[delta.index] += delta.token_ids
    assert tokens == dict.fromkeys(range(sent.sampling.n), REPLY)
    assert len(server.requests) == 3


@pytest.mark.parametrize("replies", [[chunk(1)], []])
async def test_an_engine_with_more_to_say_than_one_reply_is_heard(ways, replies):
    last = complete(output_ids=[1, 2], finish_reason="stop", prompt_tokens=3)
    async with scripted([*replies, last]) as (engine, _):
        for _ in range(3):
            async with asyncio.timeout(5):
                deltas = await answer(engine, request(stream=False))
            assert deltas[-1].finish_reason == "stop"
    assert ways[1:] == ["a stream" if replies else "one step"] * 2


async def test_what_an_engine_has_shown_holds_for_its_connection(ways):
    """Another at the same address, which has more to say, is heard too."""
    port = free_port()
    last = complete(output_ids=[1, 2], finish_reason="stop", prompt_tokens=3)
    async with client(f"vllm+grpc://127.0.0.1:{port}", generate_timeout=5) as engine:
        for messages in ([last], [chunk(1), last]):
            async with scripted(messages, port=port):
                await until(engine.healthy)
                for _ in range(2):
                    assert (await answer(engine, request(stream=False)))[-1].finish_reason == "stop"
            await until(lambda: not engine._connection.up())
    assert ways == ["a stream", "one step", "a stream", "a stream"]


async def test_an_engine_that_begins_to_say_more_is_heard_after_the_first_that_was_not(ways):
    last = complete(output_ids=[1, 2], finish_reason="stop", prompt_tokens=3)
    async with scripted([last]) as (_, servicer), client(servicer.url, generate_timeout=0.3) as engine:
        await answer(engine, request(stream=False))
        servicer.messages = [chunk(1), last]
        with pytest.raises(EngineTimeoutError):
            await answer(engine, request(stream=False))
        for _ in range(2):
            assert (await answer(engine, request(stream=False)))[-1].finish_reason == "stop"
    assert ways == ["a stream", "one step", "a stream", "a stream"]


async def test_few_bytes_are_kept_so(ways, monkeypatch):
    sent = [request("uint8", request_id=f"r-{i}", stream=False) for i in range(5)]
    nbytes = len(encode(sent[0]))
    monkeypatch.setattr(grpc_call, "_STEPS", 2 * nbytes)
    async with StrictEngine(FACTS, reply_ids=REPLY, delay=0.1) as server, client(server.url) as engine:
        await knows_one_reply(engine)
        asked = [asyncio.create_task(answer(engine, each)) for each in sent]
        await until(lambda: len(ways) == 5)
        assert engine._connection.kept == 2 * nbytes
        assert [deltas[-1].finish_reason for deltas in await asyncio.gather(*asked)] == ["stop"] * 5
        assert sorted(ways) == ["a stream"] * 3 + ["one step"] * 2
        assert engine._connection.kept == 0
        monkeypatch.setattr(grpc_call, "_STEP", nbytes - 1)
        await answer(engine, sent[0])
        assert ways[5:] == ["a stream"]


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.OK, EngineError),
        (grpc.StatusCode.INVALID_ARGUMENT, RequestError),
        (grpc.StatusCode.UNAVAILABLE, EngineDeclinedError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, EngineTimeoutError),
        (grpc.StatusCode.INTERNAL, EngineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, EngineDeclinedError),
    ],
)
async def test_failures_in_one_step_are_those_of_a_stream(ways, status, expected):
    async with scripted([], None if status is grpc.StatusCode.OK else status) as (engine, _):
        await knows_one_reply(engine)
        for stream in (False, True):
            with pytest.raises(expected) as caught:
                await answer(engine, request("bfloat16", stream=stream))
            assert type(caught.value) is expected
            assert engine._connection.kept == 0
    assert ways == ["one step", "a stream"]


async def test_a_message_above_the_engines_limit_is_too_large(ways):
    async with scripted() as (engine, servicer):
        await knows_one_reply(engine)
        with pytest.raises(TooLargeError, match="fewer or smaller pictures"):
            await answer(engine, request("bfloat16", stream=False, grids=((40, 60),)))
    assert (ways, servicer.calls) == (["one step"], 0)


@pytest.mark.parametrize("end", ["cancel", "close", "deadline"])
async def test_one_step_can_be_given_up(ways, end):
    sent = request("uint8", stream=False)
    late = {"generate_timeout": 0.3} if end == "deadline" else {}
    async with StrictEngine(FACTS, delay=5) as server, client(server.url, **late) as engine:
        await knows_one_reply(engine)
        task = asyncio.create_task(answer(engine, sent))
        await until(lambda: server.running)
        connection = engine._connection
        assert connection.kept == len(encode(sent))
        if end == "cancel":
            task.cancel()
        if end == "close":
            await engine.close()
        expected = {"cancel": asyncio.CancelledError, "close": EngineUnavailableError, "deadline": EngineTimeoutError}
        with pytest.raises(expected[end]):
            await task
        assert connection.kept == 0
        await until(lambda: not server.running)
        assert server.aborted == (["r-1"] if end == "cancel" else [])
    assert ways == ["one step"]
