"""The vLLM client over HTTP against a strict engine in the same process: answers, facts, the cache by hash, aborts."""

from __future__ import annotations

import asyncio
import json
import warnings
from contextlib import aclosing
from dataclasses import replace

import httpx
import msgspec
import numpy as np
import pytest
from engine_requests import BFLOAT16, FACTS, answer, request, until
from scripted_http import closing, scripted

from pixelgate.engines import vllm_http
from pixelgate.engines.connect import engine as connect
from pixelgate.engines.engine import Delta, EngineFacts, TokenLogprob
from pixelgate.engines.vllm_http import VllmHttpEngine
from pixelgate.errors import (
    ConfigError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnreachableError,
    NotCarriedError,
)
from pixelgate.testing.strict_http import StrictHttpEngine

REPLY = (10, 11, 12, 999)


async def rendering(server):
    """What the server makes of a picture."""
    async with httpx.AsyncClient(base_url=server.url.removeprefix("vllm+")) as asking:
        return (await asking.post("/v1/chat/completions/render", json={})).json()


async def test_the_trace_of_a_request_goes_with_it():
    sent = []

    async def generate(asked):
        sent.append(asked.headers.get("traceparent"))
        return 503, b""

    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server:
        render = await rendering(server)
    answers = {vllm_http._RENDER: json.dumps(render).encode(), vllm_http._GENERATE: generate}
    async with scripted(answers) as script, closing(VllmHttpEngine(f"vllm+http://127.0.0.1:{script.port}")) as engine:
        for traceparent in ("00-1-2-01", ""):
            with pytest.raises(EngineUnavailableError):
                await answer(engine, replace(request(), traceparent=traceparent))
    assert sent == ["00-1-2-01", None]


def client(server, **options):
    return closing(VllmHttpEngine(server.url, **options))


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [(FACTS, "uint8"), (BFLOAT16, "bfloat16"), (replace(BFLOAT16, encoder_dtype="float32"), "float32")],
)
async def test_pictures_arrive_as_they_were_sent(facts, dtype):
    sent = request(dtype)
    async with StrictHttpEngine(facts, reply_ids=REPLY) as server, client(server) as engine:
        deltas = await answer(engine, sent)
    assert deltas == [
        Delta((10,), prompt_tokens=14, completion_tokens=1),
        Delta((11,), prompt_tokens=14, completion_tokens=2),
        Delta((12,), prompt_tokens=14, completion_tokens=3),
        Delta((999,), "stop", prompt_tokens=14, completion_tokens=4),
    ]
    (got,) = server.requests
    assert got.mm_inputs.pixel_values.inline == np.concatenate(sent.images.tensors[0].parts).tobytes()
    assert tuple(got.tokenized.input_ids) == sent.token_ids
    assert not server.cancelled


async def test_pictures_large_enough_for_a_thread_arrive_without_a_warning():
    sent = request("uint8", grids=((160, 300),))  # 48 000 rows of 24 bytes: above 1 MiB
    facts = replace(FACTS, max_context=1 << 16, max_embeddings_per_image=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with StrictHttpEngine(facts, reply_ids=REPLY) as server, client(server) as engine:
            assert (await answer(engine, sent))[-1].finish_reason == "stop"
    assert server.requests[0].mm_inputs.pixel_values.inline == sent.images.tensors[0].parts[0].tobytes()


async def test_without_stream_there_is_one_delta():
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        deltas = await answer(engine, request("uint8", stream=False))
    assert deltas == [Delta(REPLY, "stop", prompt_tokens=14, completion_tokens=4)]


@pytest.mark.parametrize("stream", [True, False])
async def test_how_answers_end(stream):
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        by_length = await answer(engine, request(max_tokens=2, stream=stream))
        by_token = await answer(engine, request(stop_token_ids=(11,), stream=stream))
    assert [token for delta in by_length for token in delta.token_ids] == [10, 11]
    assert [(d.finish_reason, d.matched_stop) for d in (by_length[-1], by_token[-1])] == [
        ("length", None),
        ("stop", 11),
    ]
    assert by_length[-1].completion_tokens == by_token[-1].completion_tokens == 2


@pytest.mark.parametrize("stream", [True, False])
async def test_a_picture_that_the_engine_has_is_not_sent_again(stream):
    sent = request("uint8", stream=stream)
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        first = await answer(engine, sent)
        assert server.nulls == 0
        assert await answer(engine, replace(sent, request_id="r-2")) == first
        assert server.nulls == 2
        assert server.requests[0].mm_inputs == server.requests[1].mm_inputs


@pytest.mark.parametrize("stream", [True, False])
async def test_a_picture_that_the_engine_has_forgotten_is_sent_again_once(stream):
    sent = request("uint8", stream=stream)
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        first = await answer(engine, sent)
        server.items.clear()
        assert await answer(engine, replace(sent, request_id="r-2")) == first
        assert server.nulls == 2
        assert await answer(engine, replace(sent, request_id="r-3")) == first
        assert server.nulls == 4


async def test_what_an_engine_is_known_to_have_is_bounded(monkeypatch):
    monkeypatch.setattr(vllm_http, "_REMEMBERED", 2)
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        for grids in (((4, 4), (2, 6)), ((2, 2),)):
            await answer(engine, request("uint8", grids=grids))
        await answer(engine, request("uint8"))  # the first of its pictures went out for the third
    assert server.nulls == 1


async def test_an_engine_that_is_not_well_is_not_sent_the_pictures_again():
    sent = request("uint8")
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        await answer(engine, sent)
        server.items.clear()
        await server.set_serving(False)
        with pytest.raises(EngineError, match="The engine failed"):
            await answer(engine, replace(sent, request_id="r-2"))
    assert len(server.requests) == 1


async def test_the_facts_of_an_engine():
    async with StrictHttpEngine(FACTS) as server, client(server) as engine:
        assert await engine.describe() == EngineFacts("qwen2_5_vl", "", "uint8", max_context=512)
        assert await engine.healthy()
        assert engine.url == server.url
        await server.set_serving(False)
        assert not await engine.healthy()
        with pytest.raises(EngineUnavailableError, match="not ready"):
            await engine.describe()


async def test_an_engine_without_the_endpoints_names_the_flag():
    async with StrictHttpEngine(FACTS, scale_out=False) as server, client(server) as engine:
        with pytest.raises(EngineError, match="--enable-scale-out"):
            await engine.describe()


async def test_the_key_of_an_engine():
    async with StrictHttpEngine(FACTS, reply_ids=REPLY, api_key="k") as server:
        async with client(server, headers={"authorization": "Bearer k"}) as engine:
            assert (await answer(engine, request()))[-1].finish_reason == "stop"
        async with client(server, headers={"authorization": "Bearer x"}) as engine:
            with pytest.raises(EngineError):
                await engine.describe()


async def test_an_engine_that_came_back_with_other_settings_is_not_sent_what_it_would_misread(monkeypatch):
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        await answer(engine, request("uint8"))
        server.facts = BFLOAT16
        monkeypatch.setattr(vllm_http, "_FACTS_LAST", 0.0)
        with pytest.raises(EngineUnreachableError, match="another form"):
            await answer(engine, request("uint8", request_id="r-2"))
        assert (await answer(engine, request("bfloat16", request_id="r-3")))[-1].finish_reason == "stop"
    assert len(server.requests) == 2


async def test_pictures_that_the_protocol_cannot_carry_are_not_sent():
    sent = request("uint8")
    ids = tuple(903 if i == sent.images.spans[0].offset else id_ for i, id_ in enumerate(sent.token_ids))
    async with StrictHttpEngine(FACTS) as server, client(server) as engine:
        with pytest.raises(NotCarriedError):
            await answer(engine, replace(sent, token_ids=ids))
    assert not server.requests


async def test_closing_the_iterator_ends_the_request_on_the_engine():
    async with StrictHttpEngine(FACTS, reply_ids=range(100), delay=0.01) as server, client(server) as engine:
        async with aclosing(engine.generate(request("uint8"))) as deltas:
            assert (await anext(deltas)).token_ids == (0,)
        await until(lambda: server.cancelled == ["r-1"])
        assert not server.running
        assert (await answer(engine, request(max_tokens=1)))[-1].finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
async def test_cancelling_the_task_ends_the_request_on_the_engine(stream):
    async with StrictHttpEngine(FACTS, delay=5) as server, client(server) as engine:
        task = asyncio.create_task(answer(engine, request("uint8", stream=stream)))
        await until(lambda: server.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.cancelled == ["r-1"])


async def test_an_abort_from_elsewhere_is_a_finish_reason():
    async with StrictHttpEngine(FACTS, delay=5) as server, client(server) as engine:
        task = asyncio.create_task(answer(engine, request()))
        await until(lambda: server.running)
        server.running["r-1"].set()
        assert await task == [Delta((), "abort", prompt_tokens=3)]


@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_with_their_log_probabilities(stream):
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        deltas = await answer(engine, request(n=2, temperature=1.0, logprobs=2, stream=stream))
    for index in range(2):
        own = [delta for delta in deltas if delta.index == index]
        assert tuple(token for delta in own for token in delta.token_ids) == REPLY
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["stop"]
        assert own[-1].completion_tokens == len(REPLY)
        assert tuple(entry for delta in own for entry in delta.logprobs) == tuple(
            TokenLogprob(token, -0.5, ((token, -0.5), (token + 1, -1.5))) for token in REPLY
        )
    assert deltas[-1].prompt_tokens == len(request().token_ids)


async def test_of_log_probabilities_without_alternatives_there_are_none():
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        deltas = await answer(engine, request(logprobs=0))
    assert [delta.logprobs for delta in deltas] == [(TokenLogprob(token, -0.5),) for token in REPLY]


async def test_an_engine_that_came_back_with_another_model_is_not_sent_anything(caplog):
    cards = {"data": [{"id": "m", "max_model_len": 512, "root": "/models/first"}]}
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server:
        smallest = msgspec.json.encode(await rendering(server))

        def models(root):
            return json.dumps({"data": [{**cards["data"][0], "root": root}]}).encode()

        path = "/v1/chat/completions/render"
        async with (
            scripted({"/v1/models": models("/models/first"), path: smallest}) as script,
            closing(VllmHttpEngine(f"vllm+http://127.0.0.1:{script.port}")) as engine,
        ):
            assert (await engine.describe()).checkpoint == "/models/first"
            script.answers["/v1/models"] = models("/models/second")
            with pytest.raises(EngineError, match="another model"):
                await engine.describe()
            with pytest.raises(EngineUnreachableError, match="another model"):
                await answer(engine, request())
            assert caplog.text.count("checkpoint is /models/second, not /models/first") == 1
            script.answers["/v1/models"] = models("/models/first")
            assert await engine.describe()
        assert "/inference/v1/generate" not in script.asked


async def test_a_request_above_what_the_engine_takes_now_is_not_sent():
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        server.facts = replace(FACTS, max_context=5)
        with pytest.raises(EngineUnreachableError, match="fewer than 5 tokens"):
            await answer(engine, request("uint8"))
    assert not server.requests


async def test_a_client_that_was_closed_opens_again():
    async with StrictHttpEngine(FACTS, reply_ids=REPLY) as server, client(server) as engine:
        await answer(engine, request())
        await engine.close()
        await engine.close()
        assert (await answer(engine, request(request_id="r-2")))[-1].finish_reason == "stop"


async def test_connect_hands_over_what_the_engine_is_built_with():
    async with StrictHttpEngine(FACTS, delay=5) as server:
        engine = connect(server.url, generate_timeout=0.1, model="qwen2_5_vl", something_for_others=1)
        with pytest.raises(EngineTimeoutError):
            await answer(engine, request())
        await engine.close()


@pytest.mark.parametrize(
    "rest",
    [
        "//",
        "//:80",
        "//host:0",
        "//host:99999",
        "//host:port",
        "//user@host:1",
        "//host:1/path",
        "//host:1?x=1",
        "//host#x",
        "host:1",
        "//[::1:80",
    ],
)
@pytest.mark.parametrize("scheme", ["vllm+http", "vllm+https"])
def test_a_malformed_address_is_a_configuration_error(scheme, rest):
    with pytest.raises(ConfigError, match=f"must look like {scheme}://host:port".replace("+", r"\+")):
        connect(f"{scheme}:{rest}")


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("vllm+http://host:8000", "http://host:8000"),
        ("vllm+http://host", "http://host:80"),
        ("vllm+https://host/", "https://host:443"),
        ("vllm+http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses(url, base):
    engine = connect(url)
    assert engine.url == url
    assert engine._client._base == base
