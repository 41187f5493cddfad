"""The SGLang client against a strict engine: answers, facts, aborts, and engines that fail in every way."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import zipfile
from contextlib import aclosing
from dataclasses import replace

import grpc
import numpy as np
import pytest
from engine_requests import answer, free_port, until
from sglang_requests import FACTS, client, request, scripted
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.engines import connect
from pixelgate.engines.engine import Delta, EngineFacts, TokenLogprob, misfit
from pixelgate.engines.fleet import Fleet
from pixelgate.engines.sglang_grpc import SglangGrpcEngine
from pixelgate.engines.sglang_wire import MAX_PIXEL_BYTES
from pixelgate.errors import (
    ConfigError,
    EngineDeclinedError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnreachableError,
    RequestError,
    TooLargeError,
)
from pixelgate.testing.strict_sglang import StrictSglangEngine

REPLY = (10, 11, 12, 999)
PICTURES = ((2, 3), (1, 2))


@pytest.fixture
def subprocess_engine(tmp_path):
    """Starts the strict engine as a command; gives its process and its address."""
    config = {"model_type": "mistral3", "vocab_size": 1000, "image_token_id": 900, "eos_token_id": 999}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "PixtralImageProcessor"}))
    (tmp_path / "processor_config.json").write_text(json.dumps({"patch_size": 4}))
    command = [sys.executable, "-m", "pixelgate.testing.strict_sglang", "--checkpoint", str(tmp_path), "--port", "0"]
    process = subprocess.Popen([*command, "--delay", "0.05", "--reply", "x" * 400], stdout=subprocess.PIPE, text=True)
    with process:
        yield process, process.stdout.readline().strip()
        process.kill()


async def test_pictures_arrive_as_they_were_sent():
    sent = request(PICTURES)
    async with StrictSglangEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, sent)
    count = len(sent.token_ids)
    assert deltas == [
        *(Delta((id_,), prompt_tokens=count, completion_tokens=i) for i, id_ in enumerate(REPLY, 1)),
        Delta((), "stop", prompt_tokens=count, completion_tokens=4),
    ]
    (got,) = server.requests
    pixels = np.frombuffer(got.mm_inputs.pixel_values.data, np.float32).reshape(2, 3, 8, 12)
    assert np.array_equal(pixels[0], sent.images.tensors[0].parts[0][0])
    assert np.array_equal(pixels[1, :, :4, :8], sent.images.tensors[0].parts[1][0])
    assert tuple(got.tokenized.input_ids) == sent.token_ids
    assert not server.cancelled
    assert not server.aborted


async def test_pictures_large_enough_for_a_thread_arrive_too():
    facts = replace(FACTS, max_context=1 << 16)
    async with StrictSglangEngine(facts, reply_ids=REPLY) as server, client(server.url) as engine:
        assert (await answer(engine, request(((90, 90), (1, 1)))))[-1].finish_reason == "stop"


async def test_without_stream_there_is_one_delta():
    async with StrictSglangEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, request(PICTURES, stream=False))
        assert deltas == [
            Delta(REPLY, "stop", prompt_tokens=len(server.requests[0].tokenized.input_ids), completion_tokens=4)
        ]
        (delta,) = await answer(engine, request(stream=False, max_tokens=2, logprobs=1))
        assert (delta.token_ids, delta.finish_reason) == ((10, 11), "length")
        assert delta.logprobs == (TokenLogprob(10, -0.5, ((10, -0.5),)), TokenLogprob(11, -0.5, ((11, -0.5),)))


@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_have_their_numbers(stream):
    async with StrictSglangEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, request(n=2, temperature=1.0, stream=stream))
    for index in (0, 1):
        own = [delta for delta in deltas if delta.index == index]
        assert [id_ for delta in own for id_ in delta.token_ids] == list(REPLY)
        assert own[-1].finish_reason == "stop"


async def test_the_stop_token_is_named():
    async with StrictSglangEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, request(stop_token_ids=(11,), logprobs=0))
    assert deltas[-1] == Delta((), "stop", prompt_tokens=3, completion_tokens=2, matched_stop=11)
    assert deltas[0].logprobs == (TokenLogprob(10, -0.5),)


async def test_the_facts_of_an_engine():
    async with StrictSglangEngine(FACTS) as server, client(server.url) as engine:
        assert await engine.describe() == EngineFacts(
            model_name="mistral3",
            model_type="mistral3",
            pixel_dtype="float32",
            max_context=512,
            max_images=3,
            max_pixel_bytes=MAX_PIXEL_BYTES,
            eos_token_ids=(999,),
            checkpoint="mistral3",
        )
        assert await engine.healthy()


async def test_what_an_engine_leaves_unsaid_is_not_known():
    async with scripted(vocab_size=128_256, max_context_length=8192) as (engine, _):
        facts = await engine.describe()
    assert (facts.max_context, facts.max_images, facts.vocab_size) == (None, None, None)


async def test_a_tensor_above_the_limit_is_not_for_this_engine():
    async with StrictSglangEngine(FACTS) as server, client(server.url) as engine:
        facts = replace(await engine.describe(), max_pixel_bytes=100)
    assert "100 bytes" in misfit(request(PICTURES), facts)


async def test_the_files_of_an_engine(subprocess_engine):
    _, url = subprocess_engine
    engine = connect.remote(url)
    archive = zipfile.ZipFile(io.BytesIO(await engine.archive(1 << 20)))
    assert {"config.json", "processor_config.json"} <= set(archive.namelist())
    await engine.close()


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llama4"])
async def test_a_model_that_would_be_answered_wrong_is_refused(kind):
    with pytest.raises(ConfigError, match="sglang\\+http://"):
        SglangGrpcEngine("sglang+grpc://127.0.0.1:1", model_type=kind)
    with pytest.raises(ConfigError, match="sglang\\+http://"):
        connect.engine("sglang+grpc://127.0.0.1:1", model_type=kind, image_processor="Any")
    async with StrictSglangEngine(replace(FACTS, model_type=kind)) as server, client(server.url) as engine:
        with pytest.raises(EngineError, match="sglang\\+http://"):
            await engine.describe()
        with pytest.raises(EngineUnreachableError):
            await answer(engine, request())
        assert not server.requests


async def test_an_engine_that_calls_itself_stuck_is_asked_with_a_probe():
    async with StrictSglangEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        await server.set_serving(False)
        assert await engine.healthy()
        assert (await answer(engine, request()))[-1].finish_reason == "stop"
        server.well = False
        assert not await engine.healthy()
        with pytest.raises(EngineUnavailableError, match="not ready"):
            await engine.describe()


async def test_closing_the_iterator_aborts_the_request():
    async with StrictSglangEngine(FACTS, reply_ids=REPLY * 50, delay=0.05) as server, client(server.url) as engine:
        async with aclosing(engine.generate(request(PICTURES))) as deltas:
            await anext(deltas)
        await until(lambda: not server.running)
        assert server.cancelled == ["r-1"]
        assert server.aborted == ["r-1"]


async def test_a_refusal_is_told_in_our_words_and_logged_in_the_engines(caplog):
    bad = request(PICTURES)
    bad = replace(bad, token_ids=(*bad.token_ids[:-1], 900))
    async with StrictSglangEngine(FACTS) as server, client(server.url) as engine:
        with pytest.raises(RequestError) as caught:
            await answer(engine, bad)
    assert "ranges" not in str(caught.value)
    assert "the ranges are not where the placeholders are" in caplog.text


@pytest.mark.parametrize(
    ("status", "trailer", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, (), RequestError),
        (grpc.StatusCode.FAILED_PRECONDITION, (("smg-constraint-failed", "engine"),), RequestError),
        (grpc.StatusCode.FAILED_PRECONDITION, (), EngineError),
        (grpc.StatusCode.UNAVAILABLE, (), EngineUnavailableError),
        (grpc.StatusCode.INTERNAL, (), EngineError),
    ],
)
async def test_every_status_has_its_error(status, trailer, expected, caplog):
    chunk = {"chunk": pb.GenerateStreamChunk(token_ids=[1])}
    async with scripted([chunk], status, trailer) as (engine, servicer):
        with pytest.raises(expected) as caught:
            await answer(engine, request())
    assert type(caught.value) is expected
    assert "secret" not in str(caught.value)
    assert "secret words" in caplog.text
    assert servicer.calls == 1


async def test_a_full_engine_has_turned_the_request_away():
    async with scripted([], grpc.StatusCode.UNAVAILABLE) as (engine, _):
        with pytest.raises(EngineDeclinedError):
            await answer(engine, request())


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "before it was complete"),
        ([{"complete": pb.GenerateComplete(output_ids=[1])}], "with an error"),
        ([{"chunk": pb.GenerateStreamChunk(token_ids=[1], index=7)}], "cannot be understood"),
        ([{"request_id": "empty"}], "cannot be understood"),
    ],
)
async def test_garbage_is_an_error(messages, complaint):
    async with scripted(messages) as (engine, _):
        with pytest.raises(EngineError, match=complaint):
            await answer(engine, request())


async def test_a_message_above_the_engines_limit_is_too_large(monkeypatch):
    monkeypatch.setattr(StrictSglangEngine, "max_message_bytes", 1 << 10)
    async with StrictSglangEngine(FACTS) as server, client(server.url) as engine:
        with pytest.raises(TooLargeError, match="fewer or smaller pictures"):
            await answer(engine, request(((4, 4),)))


async def test_an_engine_that_is_too_slow_misses_the_deadline():
    async with StrictSglangEngine(FACTS, delay=5) as server, client(server.url, generate_timeout=0.2) as engine:
        with pytest.raises(EngineTimeoutError):
            await answer(engine, request())
        await until(lambda: server.cancelled == ["r-1"])


async def test_an_engine_that_is_killed_in_the_middle_was_reached_and_no_other_gets_the_request(subprocess_engine):
    process, url = subprocess_engine
    async with StrictSglangEngine(FACTS, reply_ids=REPLY) as other:
        fleet = Fleet([SglangGrpcEngine(url), SglangGrpcEngine(other.url)], balance="round-robin")
        await fleet.connect()
        fleet._turn = 1
        deltas = fleet.generate(request(PICTURES))
        assert (await anext(deltas)).token_ids == (ord("x"),)
        process.kill()
        with pytest.raises(EngineUnavailableError) as caught:
            await anext(deltas)
        assert type(caught.value) is EngineUnavailableError
        assert not other.requests
        assert (await answer(fleet, request(PICTURES, request_id="r-2")))[-1].finish_reason == "stop"
        assert len(other.requests) == 1
        await fleet.close()


async def test_an_engine_that_was_restarted_is_asked_anew():
    port = free_port()
    async with client(f"sglang+grpc://127.0.0.1:{port}") as engine:
        async with StrictSglangEngine(FACTS, reply_ids=REPLY, port=port):
            await answer(engine, request(PICTURES))
        with pytest.raises(EngineUnreachableError):
            await answer(engine, request(PICTURES))
        async with StrictSglangEngine(replace(FACTS, max_images=1), port=port) as server:
            await until(engine.healthy)
            with pytest.raises(EngineUnreachableError, match="at most 1 pictures"):
                await answer(engine, request(PICTURES))
            assert not server.requests
        for change in ({"model_type": "llava_next"}, {"model_type": "qwen2_vl"}):
            async with StrictSglangEngine(replace(FACTS, **change), port=port) as server:
                await until(engine.healthy)
                with pytest.raises(EngineUnreachableError):
                    await answer(engine, request())
                assert not server.requests
        async with StrictSglangEngine(FACTS, reply_ids=REPLY, port=port):
            await until(engine.healthy)
            assert (await answer(engine, request(PICTURES)))[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "url", ["sglang+grpc://host", "sglang+grpc://h:1/p", "sglang+grpc://u@h:1", "sglang+grpc://h:x"]
)
def test_malformed_addresses(url):
    with pytest.raises(ConfigError, match="sglang\\+grpc://host:port"):
        connect.engine(url)


async def test_aborting_from_elsewhere_leaves_the_call_open():
    async with (
        StrictSglangEngine(FACTS, reply_ids=REPLY, delay=0.05) as server,
        client(server.url, generate_timeout=0.5) as engine,
    ):
        task = asyncio.create_task(answer(engine, request()))
        await until(lambda: server.running)
        connection = await engine._connected()
        await connection.stub.Abort(pb.AbortRequest(request_id="r-1"))
        with pytest.raises(EngineTimeoutError):
            await task
