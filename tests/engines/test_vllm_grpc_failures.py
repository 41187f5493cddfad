"""What the vLLM client makes of engines that refuse, fail, vanish or die, and of its own end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import grpc
import pytest
from engine_requests import BFLOAT16, FACTS, answer, free_port, request, until
from grpc.aio import _call as aio
from grpc_health.v1 import health, health_pb2_grpc
from scripted_vllm import chunk, client, complete, scripted

from pixelgate.engines.vllm_grpc import SERVICE, VllmGrpcEngine
from pixelgate.errors import (
    EngineDeclinedError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnreachableError,
    RequestError,
    TooLargeError,
)
from pixelgate.testing.strict_engine import StrictEngine

REPLY = (10, 11, 12, 999)


@pytest.fixture
def subprocess_engine(tmp_path):
    """Starts the strict engine as a command; gives its process and its address."""
    config = {"model_type": "qwen2_5_vl", "vocab_size": 1000, "image_token_id": 900, "eos_token_id": 999}
    (tmp_path / "config.json").write_text(json.dumps(config))
    processor = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    command = [sys.executable, "-m", "pixelgate.testing.strict_engine", "--checkpoint", str(tmp_path), "--port", "0"]
    process = subprocess.Popen([*command, "--delay", "0.05", "--reply", "x" * 400], stdout=subprocess.PIPE, text=True)
    with process:
        yield process, process.stdout.readline().strip()
        process.kill()


async def test_a_refusal_is_told_in_our_words_and_logged_in_the_engines(caplog):
    bad = request("uint8")
    bad = replace(bad, images=replace(bad.images, hashes=("x", "y")))
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        with pytest.raises(RequestError) as caught:
            await answer(engine, bad)
        assert not server.running
    assert "hex digits" not in str(caught.value)
    assert "64 lowercase hex digits" in caplog.text
    assert "x" * 2000 not in caplog.text
    assert not server.aborted


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, RequestError),
        (grpc.StatusCode.UNAVAILABLE, EngineUnavailableError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, EngineTimeoutError),
        (grpc.StatusCode.NOT_FOUND, EngineError),
        (grpc.StatusCode.INTERNAL, EngineError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, EngineUnavailableError),
    ],
)
async def test_every_status_has_its_error(status, expected, caplog):
    async with scripted([chunk(1)], status) as (engine, servicer):
        with pytest.raises(expected) as caught:
            await answer(engine, request())
    assert type(caught.value) is expected  # above all: never EngineUnreachableError once the request was sent
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "secret words" in caplog.text
    assert servicer.calls == 1


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_an_engine_that_is_well_may_turn_a_request_away(status):
    async with scripted([], status) as (engine, servicer):
        with pytest.raises(EngineDeclinedError):
            await answer(engine, request())
        assert servicer.calls == 1


async def test_an_engine_that_is_not_well_has_turned_nothing_away():
    async with scripted([], grpc.StatusCode.UNAVAILABLE) as (engine, servicer):
        await engine.describe()
        await servicer.health.set(SERVICE, 2)
        with pytest.raises(EngineUnavailableError) as caught:
            await answer(engine, request())
        assert type(caught.value) is EngineUnavailableError


async def test_an_engine_that_died_and_is_back_at_once_has_turned_nothing_away():
    port = free_port()
    async with client(f"vllm+grpc://127.0.0.1:{port}") as engine:
        async with StrictEngine(FACTS, delay=5, port=port) as server:
            task = asyncio.create_task(answer(engine, request()))
            await until(lambda: server.running)
        async with StrictEngine(FACTS, port=port) as server:
            with pytest.raises(EngineUnavailableError) as caught:
                await task
            assert type(caught.value) is EngineUnavailableError
            await until(engine.healthy)
            assert not server.requests


async def test_a_connection_that_breaks_just_behind_a_request_has_the_calls_own_error(monkeypatch):
    done_writing = aio.StreamStreamCall.done_writing

    async def broken(call):
        await done_writing(call)
        raise grpc.aio.InternalError("Failed grpc_call_start_batch")  # what the library says when the call is over

    monkeypatch.setattr(aio.StreamStreamCall, "done_writing", broken)
    async with scripted([], grpc.StatusCode.INTERNAL) as (engine, _):
        with pytest.raises(EngineError):
            await answer(engine, request())


async def test_a_message_above_the_engines_limit_is_too_large():
    async with scripted() as (engine, servicer):
        with pytest.raises(TooLargeError, match="fewer or smaller pictures"):
            await answer(engine, request("bfloat16", grids=((40, 60),)))
    assert servicer.calls == 0


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "before it was complete"),
        ([chunk(1)], "before it was complete"),
        ([chunk(1), complete(finish_reason="error")], "with an error"),
        ([complete(output_ids=[1])], "with an error"),
    ],
)
async def test_an_answer_without_a_proper_end_is_an_error(messages, complaint):
    async with scripted(messages) as (engine, _):
        with pytest.raises(EngineError, match=complaint):
            await answer(engine, request())


async def test_an_engine_that_is_too_slow_misses_the_deadline():
    async with StrictEngine(FACTS, delay=5) as server, client(server.url, generate_timeout=0.1) as engine:
        with pytest.raises(EngineTimeoutError):
            await answer(engine, request())
        await until(lambda: server.cancelled == ["r-1"])


async def test_an_engine_that_is_down_is_unreachable_and_used_again_when_it_is_back():
    port = free_port()
    async with client(f"vllm+grpc://127.0.0.1:{port}") as engine:
        for call in (engine.describe, lambda: answer(engine, request())):
            with pytest.raises(EngineUnreachableError) as caught:
                await call()
            assert str(port) not in str(caught.value)
        assert not await engine.healthy()
        async with StrictEngine(FACTS, reply_ids=REPLY, port=port) as server:
            await until(engine.healthy)
            assert (await answer(engine, request()))[-1].finish_reason == "stop"
        assert len(server.requests) == 1


async def test_an_address_that_does_not_answer_is_unreachable_in_time():
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are taken, and then nothing is said
        async with client(f"vllm+grpc://127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.1) as engine:
            with pytest.raises(EngineUnreachableError):
                await answer(engine, request())


async def test_an_engine_that_warms_up_is_unavailable_and_gets_nothing():
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        await server.set_serving(False)
        with pytest.raises(EngineUnavailableError, match="not ready"):
            await engine.describe()
        assert not await engine.healthy()
        with pytest.raises(EngineUnreachableError, match="not ready"):
            await answer(engine, request())
        assert not server.requests
        await server.set_serving(True)
        assert await engine.healthy()


async def test_an_engine_that_came_back_with_other_pixels_gets_nothing():
    port = free_port()
    async with client(f"vllm+grpc://127.0.0.1:{port}") as engine:
        async with StrictEngine(FACTS, port=port):
            await answer(engine, request("uint8"))
        async with StrictEngine(BFLOAT16, port=port) as server:
            await until(engine.healthy)
            with pytest.raises(EngineUnreachableError, match="another form"):
                await answer(engine, request("uint8"))
            assert not server.requests
            await answer(engine, request("bfloat16"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"max_images": 1}, "at most 1 pictures"),
        ({"max_context": 14}, "fewer than 14 tokens"),
        ({"max_embeddings_per_image": 3}, "at most 3 tokens"),
    ],
)
async def test_an_engine_that_came_back_smaller_gets_what_still_fits(settings, why):
    port = free_port()
    large = request("uint8")
    plans = tuple(SimpleNamespace(tokens=span.length) for span in large.images.spans)
    large = replace(large, images=replace(large.images, plans=plans))
    async with client(f"vllm+grpc://127.0.0.1:{port}") as engine:
        async with StrictEngine(FACTS, port=port):
            await answer(engine, large)
        async with StrictEngine(replace(FACTS, **settings), port=port) as server:
            await until(engine.healthy)
            with pytest.raises(EngineUnreachableError, match=why):
                await answer(engine, large)
            assert not server.requests
            assert (await answer(engine, request()))[-1].finish_reason == "stop"


@pytest.mark.parametrize("change", [{"model_type": "qwen2_vl"}, {"vocab_size": 1001}])
async def test_an_engine_that_came_back_with_another_model_gets_nothing(change, caplog):
    port = free_port()
    async with client(f"vllm+grpc://127.0.0.1:{port}") as engine:
        async with StrictEngine(FACTS, port=port):
            await answer(engine, request())
        async with StrictEngine(replace(FACTS, **change), port=port) as server:
            await until(engine.healthy)
            for _ in range(2):
                with pytest.raises(EngineUnreachableError, match="another model"):
                    await answer(engine, request())
            assert not server.requests
            assert caplog.text.count(f"came back with another model: {next(iter(change))} is") == 1
        async with StrictEngine(FACTS, port=port):
            await until(engine.healthy)
            assert (await answer(engine, request()))[-1].finish_reason == "stop"


@pytest.mark.parametrize("after", ["_serving", "_encoded"])
async def test_a_request_for_a_connection_that_was_lost_meanwhile_is_not_sent(monkeypatch, after):
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        await engine.describe()

        async def lost(*arguments):
            result = await real(*arguments)
            engine._connection.facts = None
            engine._connection.drops += 1
            return result

        real = getattr(engine, after)
        if after == "_serving":
            engine._connection.facts = None
        monkeypatch.setattr(engine, after, lost)
        with pytest.raises(EngineUnreachableError):
            await answer(engine, request())
        assert not server.requests


async def test_facts_that_are_told_again_over_the_same_connection_stop_no_request(monkeypatch):
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        real = engine._encoded

        async def asked_meanwhile(*arguments):
            await engine.describe()
            return await real(*arguments)

        monkeypatch.setattr(engine, "_encoded", asked_meanwhile)
        assert (await answer(engine, request("uint8")))[-1].finish_reason == "stop"


async def test_a_server_that_is_no_vllm_is_an_engine_error():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with client(f"vllm+grpc://127.0.0.1:{port}") as engine:
        with pytest.raises(EngineError):
            await engine.describe()
        assert not await engine.healthy()
    await server.stop(None)


async def test_questions_that_an_engine_calls_invalid_or_answers_late_are_the_engines_fault():
    class Odd(health.aio.HealthServicer):
        async def Check(self, request, context):
            if late:
                await asyncio.sleep(5)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "what?")

    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Odd(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with client(f"vllm+grpc://127.0.0.1:{port}", call_timeout=0.1) as engine:
        late = False
        with pytest.raises(EngineError, match="questions about itself"):
            await engine.describe()
        late = True
        with pytest.raises(EngineUnavailableError, match="in time"):
            await engine.describe()
    await server.stop(None)


async def test_an_engine_that_dies_in_the_middle_is_unavailable_but_was_reached(subprocess_engine):
    process, url = subprocess_engine
    async with client(url) as engine:
        deltas = engine.generate(request("bfloat16"))
        assert (await anext(deltas)).token_ids == (ord("x"),)
        process.kill()
        with pytest.raises(EngineUnavailableError) as caught:
            await anext(deltas)
        assert type(caught.value) is EngineUnavailableError
        assert not await engine.healthy()


async def test_closing_the_client_ends_its_requests():
    async with StrictEngine(FACTS, delay=5) as server, client(server.url) as engine:
        task = asyncio.create_task(answer(engine, request()))
        await until(lambda: server.running)
        await engine.close()
        with pytest.raises(EngineUnavailableError, match="closed"):
            await task
        await until(lambda: not server.running)


async def test_closing_the_client_ends_its_attempt_to_connect():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = VllmGrpcEngine(f"vllm+grpc://127.0.0.1:{silent.getsockname()[1]}")
        task = asyncio.create_task(answer(engine, request()))
        await asyncio.sleep(0.05)
        await engine.close()
        with pytest.raises(EngineUnreachableError):
            await task


@pytest.mark.parametrize("ask", ["describe", "generate"])
async def test_closing_the_client_ends_its_questions(ask):
    asked = asyncio.Event()

    class Slow(health.aio.HealthServicer):
        async def Check(self, request, context):
            asked.set()
            await asyncio.sleep(5)

    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(Slow(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine = VllmGrpcEngine(f"vllm+grpc://127.0.0.1:{port}")
    task = asyncio.create_task(engine.describe() if ask == "describe" else answer(engine, request()))
    await asked.wait()
    await engine.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        await task
    asked.clear()
    task = asyncio.create_task(engine.describe())  # used again, it connects again
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await engine.close()
    await server.stop(None)
