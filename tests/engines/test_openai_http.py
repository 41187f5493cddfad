"""A server with OpenAI's chat API, as an engine that takes chat requests."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from engine_requests import free_port, until
from scripted_http import closing, error, events, scripted

from pixelgate.engines import openai_http
from pixelgate.engines.chat_engine import ChatCall
from pixelgate.engines.connect import chat_engine, engine, takes_chat
from pixelgate.engines.openai_http import OpenAIEngine
from pixelgate.errors import ConfigError, EngineError, EngineUnavailableError, EngineUnreachableError, RequestError
from pixelgate.testing.openai_server import OpenAIServer

MESSAGES = [{"role": "user", "content": "Hello"}]


def call(**fields):
    return ChatCall({"messages": MESSAGES, **fields})


def client(server, **options):
    return closing(OpenAIEngine(server.url, **options))


async def answer(engine, sent):
    return [found async for found in engine.generate(sent)]


def text(objects):
    return "".join(c["delta"].get("content", "") for o in objects for c in o["choices"])


async def test_a_whole_answer():
    async with OpenAIServer(reply="Two words") as server, client(server) as engine:
        (found,) = await answer(engine, call(temperature=0.5))
    assert found["choices"][0]["message"]["content"] == "Two words "
    assert found["usage"]["completion_tokens"] == 2
    assert server.requests[0] == {"model": "test", "messages": MESSAGES, "temperature": 0.5}


async def test_a_streamed_answer():
    async with OpenAIServer(reply="Two words") as server, client(server) as engine:
        chunks = await answer(engine, call(stream=True, stream_options={"include_usage": True}))
    assert text(chunks) == "Two words "
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 0]
    assert chunks[-1]["usage"]["completion_tokens"] == 2


async def test_a_large_body_goes_out_from_a_thread(monkeypatch):
    monkeypatch.setattr(openai_http, "_ENCODE_IN_THREAD_FROM", 10)
    async with OpenAIServer() as server, client(server) as engine:
        await answer(engine, ChatCall({"messages": MESSAGES}, nbytes=10))
    assert server.requests[0]["messages"] == MESSAGES


@pytest.mark.parametrize("stream", [True, False])
async def test_giving_up_ends_the_request_on_the_server(stream):
    async with OpenAIServer(delay=0.2) as server, client(server) as engine:
        task = asyncio.create_task(answer(engine, call(stream=stream)))
        await until(lambda: server.requests)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.cancelled == 1)


async def test_closing_the_iterator_ends_the_request_on_the_server():
    async with OpenAIServer(reply="word " * 100, delay=0.02) as server, client(server) as engine:
        async with aclosing(engine.generate(call(stream=True))) as chunks:
            await anext(chunks)
        await until(lambda: server.cancelled == 1)


async def test_the_facts_are_those_of_the_model_that_is_asked_for():
    async with OpenAIServer(("a", "b"), max_model_len=99) as server:
        async with client(server, name="b") as engine:
            facts = await engine.describe()
            assert (facts.model_name, facts.max_context) == ("b", 99)
            assert await engine.healthy()
        async with client(server) as engine:
            with pytest.raises(EngineError, match="say which"):
                await engine.describe()
            with pytest.raises(EngineUnreachableError):
                await answer(engine, call())


@pytest.mark.parametrize("options", [{"model": "test"}, {"name": "test"}])
async def test_a_server_that_lists_no_models_is_asked_for_the_configured_one(options):
    async with OpenAIServer(lists=False) as server, client(server, **options) as engine:
        assert (await engine.describe()).model_name == "test"
        assert await engine.healthy()
        assert len(await answer(engine, call())) == 1


async def test_a_server_that_lists_no_models_leaves_an_unnamed_one_unknown():
    async with OpenAIServer(lists=False) as server, client(server) as engine:
        with pytest.raises(EngineError):
            await engine.describe()


async def test_the_key_and_the_path():
    async with OpenAIServer(api_key="k") as server:
        async with client(server, headers={"authorization": "Bearer k"}) as engine:
            assert len(await answer(engine, call())) == 1
        async with client(server) as engine:
            with pytest.raises(EngineError, match="does not let the gateway in"):
                await answer(engine, call())


async def test_nothing_listens():
    async with closing(OpenAIEngine(f"openai+http://127.0.0.1:{free_port()}", model="m")) as engine:
        assert not await engine.healthy()
        for work in (engine.describe(), answer(engine, call())):
            with pytest.raises(EngineUnreachableError):
                await work


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"no json", EngineError),
        (b"[]", EngineError),
        (b'{"choices": 3}', EngineError),
        (b'{"choices": ["x"]}', EngineError),
        (json.dumps(error(503)).encode(), EngineUnavailableError),
        (json.dumps(error("context_length_exceeded")).encode(), EngineError),
        ((400, json.dumps(error("invalid", "temperature")).encode()), RequestError),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_nonsense_and_errors_become_our_own(body, kind, stream):
    if stream and isinstance(body, bytes):
        body = [b"data: " + body + b"\n\n"]
    answers = {"/v1/models": b'{"data": [{"id": "m"}]}', "/v1/chat/completions": body}
    async with scripted(answers) as script, closing(OpenAIEngine(f"openai+http://127.0.0.1:{script.port}")) as engine:
        with pytest.raises(kind) as caught:
            await answer(engine, call(stream=stream))
    assert "secret" not in caught.value.message


async def test_a_stream_that_just_ends_is_an_error():
    chunk = {"choices": [{"index": 0, "delta": {"content": "x"}}]}
    answers = {"/v1/models": b'{"data": [{"id": "m"}]}', "/v1/chat/completions": events(chunk, done=False)}
    async with scripted(answers) as script, closing(OpenAIEngine(f"openai+http://127.0.0.1:{script.port}")) as engine:
        chunks = engine.generate(call(stream=True))
        assert await anext(chunks) == chunk
        with pytest.raises(EngineError, match="before it was complete"):
            await anext(chunks)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("openai+http://host", "http://host:80/v1"),
        ("openai+https://host/", "https://host:443/v1"),
        ("openai+https://host/api/v1/", "https://host:443/api/v1"),
        ("openai+http://host:1/v1", "http://host:1/v1"),
    ],
)
def test_addresses(url, base):
    assert takes_chat(url)
    made = chat_engine(url)
    assert made.url == url
    assert made._client._base == base


@pytest.mark.parametrize("url", ["openai+http://", "openai+http://user:key@host/v1", "openai+http://host/v1?key=1"])
def test_a_malformed_address_is_a_configuration_error(url):
    with pytest.raises(ConfigError, match=r"must look like openai\+http://host:port/path"):
        chat_engine(url)


def test_which_engines_take_chat_requests():
    assert not takes_chat("vllm+http://host:1")
    assert not takes_chat("local:reader")
    with pytest.raises(ConfigError, match=r"openai\+https:"):
        takes_chat("http://host")
    assert engine("vllm+http://host:1").url == "vllm+http://host:1"
