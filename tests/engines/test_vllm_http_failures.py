"""A vLLM over HTTP that is gone, slow, full, broken or talks nonsense; no word of it reaches a client."""

from __future__ import annotations

import asyncio
import base64
import json
import logging

import msgspec
import pytest
from engine_requests import FACTS, answer, free_port, request, until
from scripted_http import closing, error, events, scripted

from pixelgate.engines.vllm_http import VllmHttpEngine
from pixelgate.errors import (
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnreachableError,
    RequestError,
    TooLargeError,
)
from pixelgate.testing.strict_http import StrictHttpEngine, _smallest

GENERATE, RENDER = "/inference/v1/generate", "/v1/chat/completions/render"


def rendered(elements):
    item = base64.b64encode(msgspec.msgpack.encode(elements)).decode()
    span = {"offset": 0, "length": 1}
    features = {"mm_placeholders": {"image": [span]}, "kwargs_data": {"image": [item]}}
    return json.dumps({"token_ids": [1], "features": features}).encode()


READY = {RENDER: rendered(_smallest(FACTS))}


def client(script, **options):
    return closing(VllmHttpEngine(f"vllm+http://127.0.0.1:{script.port}", **options))


async def failure(answers, sent=None, **options):
    """What a request ends with, and how many of them arrived."""
    async with scripted({**READY, **answers}) as script, client(script, **options) as engine:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            await answer(engine, sent or request())
    assert "secret" not in str(caught.value)
    return caught.value, script.asked.count(GENERATE)


def choice(*ids, finish=None):
    return {"choices": [{"token_ids": list(ids), "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (400, RequestError, "refused the request"),
        (404, RequestError, "refused the request"),
        (401, EngineError, "does not let the gateway in"),
        (403, EngineError, "does not let the gateway in"),
        (413, TooLargeError, "larger than the engine takes"),
        (429, EngineUnavailableError, "full"),
        (500, EngineError, "failed"),
        (502, EngineUnavailableError, "not available"),
        (503, EngineUnavailableError, "not available"),
        (504, EngineTimeoutError, "in time"),
        (302, EngineError, "failed"),
        (418, EngineError, "failed"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_becomes_of_a_status(status, kind, words, streamed, caplog):
    body = json.dumps(error(status)).encode()
    answer_ = [*events(error(status))] if streamed else (status, body)
    caught, sent = await failure({GENERATE: answer_})
    assert type(caught) is kind or (isinstance(caught, kind) and kind is EngineError)
    assert words in caught.message
    assert sent == 1
    assert "secret words of the engine" in caplog.text  # the operator sees them


@pytest.mark.parametrize(("param", "named"), [("temperature", "temperature"), ("prompt", None), (7, None)])
async def test_a_refused_parameter_is_named_if_it_is_one(param, named):
    caught, _ = await failure({GENERATE: (400, json.dumps(error(400, param)).encode())})
    assert caught.param == named


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"detail": "no"}', b'{"error": "words"}', b"\xff", b"[" * 100_000])
async def test_a_refusal_in_any_form(body):
    caught, _ = await failure({GENERATE: (400, body)})
    assert type(caught) is RequestError


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no json",
        b"{}",
        b"[]",
        b'{"choices": [{"token_ids": "x"}]}',
        json.dumps(choice(1, finish="exploded")).encode(),
        json.dumps(choice(1)).encode(),
    ],
)
async def test_nonsense_is_an_engine_error(body):
    caught, _ = await failure({GENERATE: body}, request(stream=False))
    assert type(caught) is EngineError


@pytest.mark.parametrize(
    "body",
    [
        [b"data: no json\n\n"],
        events(choice(1)),
        events(choice(1), done=False),
        events(),
        events(choice(1), choice(2, finish="exploded")),
        [b"data: " + b"x" * 100],
    ],
)
async def test_a_stream_of_nonsense_is_an_engine_error(body):
    caught, _ = await failure({GENERATE: body})
    assert type(caught) is EngineError


async def test_an_error_in_mid_stream_ends_the_answer():
    answers = {**READY, GENERATE: events(choice(1), error(500), choice(2, finish="stop"))}
    async with scripted(answers) as script, client(script) as engine:
        deltas = engine.generate(request())
        assert (await anext(deltas)).token_ids == (1,)
        with pytest.raises(EngineError, match="failed"):
            await anext(deltas)


@pytest.mark.parametrize("pieces", [[None], [*events(choice(1), done=False), None]])
async def test_a_connection_that_breaks_is_not_tried_again(pieces):
    caught, sent = await failure({GENERATE: pieces})
    assert type(caught) is EngineUnavailableError
    assert sent == 1


async def test_an_engine_that_hangs_up_at_once_is_not_tried_again():
    async def hang_up(request):
        request.transport.abort()
        await asyncio.sleep(1)

    caught, sent = await failure({GENERATE: hang_up})
    assert type(caught) is EngineUnavailableError
    assert sent == 1


async def test_an_engine_that_is_too_slow():
    async def sleep(request):
        await asyncio.sleep(60)

    caught, _ = await failure({GENERATE: sleep}, generate_timeout=0.2)
    assert type(caught) is EngineTimeoutError


async def test_an_answer_without_end_is_cut_off(monkeypatch):
    monkeypatch.setattr("pixelgate.engines.http_client._MAX_REPLY_BYTES", 1000)
    caught, _ = await failure({GENERATE: [b"x" * 600] * 3}, request(stream=False))
    assert "too long" in caught.message


async def test_nothing_listens():
    async with closing(VllmHttpEngine(f"vllm+http://127.0.0.1:{free_port()}")) as engine:
        assert not await engine.healthy()
        for work in (engine.describe(), answer(engine, request())):
            with pytest.raises(EngineUnreachableError, match="cannot be reached"):
                await work


async def test_an_engine_that_went_away_was_not_sent_the_next_request_and_is_asked_for_its_facts_anew():
    async with StrictHttpEngine(FACTS, reply_ids=(10, 999)) as server:
        engine = VllmHttpEngine(server.url)
        await answer(engine, request("uint8"))
        port = server._port
    async with closing(engine):
        with pytest.raises(EngineUnreachableError):
            await answer(engine, request("uint8", request_id="r-2"))
        async with StrictHttpEngine(FACTS, reply_ids=(10, 999), port=port) as server:
            assert (await answer(engine, request("uint8", request_id="r-3")))[-1].finish_reason == "stop"
            assert server.nulls == 2  # it has none of them, and said so


async def test_an_engine_that_ends_in_mid_answer():
    server = await StrictHttpEngine(FACTS, reply_ids=range(100), delay=0.05).__aenter__()
    async with closing(VllmHttpEngine(server.url)) as engine:
        deltas = engine.generate(request("uint8"))
        await anext(deltas)
        await server.stop()
        with pytest.raises(EngineUnavailableError, match="broke"):
            [delta async for delta in deltas]


async def test_closing_the_client_ends_its_requests():
    async with StrictHttpEngine(FACTS, delay=5) as server:
        engine = VllmHttpEngine(server.url)
        task = asyncio.create_task(answer(engine, request()))
        await until(lambda: server.running)
        await engine.close()
        with pytest.raises(EngineUnavailableError):
            await task


async def slow(request):
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("answers", "kind", "words"),
    [
        ({"/health": (503, b"")}, EngineUnavailableError, "not ready"),
        ({"/health": slow}, EngineUnavailableError, "in time"),
        ({"/v1/models": (503, b"")}, EngineUnavailableError, "not available"),
        ({"/v1/models": (400, b"")}, EngineError, "cannot be understood"),
        ({"/v1/models": b'{"data": []}'}, EngineError, "its models are none"),
        ({"/v1/models": b'{"data": 3}'}, EngineError, "cannot be understood"),
        ({"/v1/models": b'{"data": [{"id": "a"}, {"id": "b"}]}'}, EngineError, "say which with engine_model"),
        ({RENDER: (403, b"")}, EngineError, "--enable-scale-out"),
        ({RENDER: (404, b"")}, EngineError, "--enable-scale-out"),
        ({RENDER: (400, b"")}, EngineError, "does its model take any"),
        ({RENDER: (503, b"")}, EngineUnavailableError, "not available"),
        ({RENDER: b"{}"}, EngineError, "something else than a picture"),
        ({RENDER: b"x"}, EngineError, "something else than a picture"),
        ({RENDER: rendered({})}, EngineError, "something else than a picture"),
        (
            {RENDER: rendered({"a": {"data": ["int32", [1], msgspec.msgpack.Ext(3, bytes(4))]}})},
            EngineError,
            "as int32",
        ),
    ],
)
async def test_facts_that_cannot_be_had(answers, kind, words):
    async with scripted({**READY, **answers}) as script, client(script, call_timeout=0.5) as engine:
        with pytest.raises(EngineError) as caught:
            await engine.describe()
        assert words in caught.value.message
        assert type(caught.value) is kind
        with pytest.raises(EngineUnreachableError):  # and nothing is sent without
            await answer(engine, request())
    assert GENERATE not in script.asked


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"model": "b"}, "b"), ({"name": "b"}, "b"), ({"model": "lora", "name": "b"}, "lora")],
)
async def test_which_of_several_models_is_asked_for(options, expected):
    models = b'{"data": [{"id": "a"}, {"id": "b", "max_model_len": 9}, {"id": "lora", "parent": "a"}]}'
    async with scripted({**READY, "/v1/models": models}) as script, client(script, **options) as engine:
        assert (await engine.describe()).model_name == expected


async def test_an_adapter_beside_the_only_model_leaves_no_doubt():
    models = b'{"data": [{"id": "lora", "parent": "a"}, {"id": "a"}]}'
    async with scripted({**READY, "/v1/models": models}) as script, client(script) as engine:
        assert (await engine.describe()).model_name == "a"


async def test_a_model_that_is_not_there_is_named():
    async with scripted(READY) as script, client(script, model="x") as engine:
        with pytest.raises(EngineError, match="does not serve 'x'; its models are m"):
            await engine.describe()


async def test_no_version_is_no_failure(caplog):
    with caplog.at_level(logging.INFO):
        async with scripted({**READY, "/version": (404, b"")}) as script, client(script) as engine:
            assert (await engine.describe()).pixel_dtype == "uint8"
    assert "of unknown version" in caplog.text


async def test_proxies_of_the_environment_are_not_used(monkeypatch):
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    async with scripted(READY) as script, client(script) as engine:
        assert await engine.healthy()
