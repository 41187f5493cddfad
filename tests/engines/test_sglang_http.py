"""SGLang's own HTTP, as an engine that takes chat requests: its facts, its health, and what it would pass over."""

from __future__ import annotations

import pytest
from aiohttp import web
from engine_requests import free_port
from scripted_http import closing

from pixelgate.engines import sglang_http
from pixelgate.engines.chat_engine import ChatCall
from pixelgate.engines.connect import chat_engine, engine, takes_chat
from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.sglang_http import SglangHttpEngine
from pixelgate.errors import ConfigError, EngineError, EngineUnavailableError, EngineUnreachableError, NotCarriedError
from pixelgate.testing.sglang_server import SglangServer

MESSAGES = [{"role": "user", "content": "Hello"}]


def call(**fields):
    return ChatCall({"messages": MESSAGES, **fields})


def client(server, **options):
    return closing(SglangHttpEngine(server.url, **options))


async def answer(engine, sent):
    return [found async for found in engine.generate(sent)]


async def test_the_facts_of_an_engine():
    async with (
        SglangServer(model_type="qwen2_vl", model_path="/m", max_model_len=77) as server,
        client(server) as engine,
    ):
        assert await engine.describe() == EngineFacts("test", "qwen2_vl", "uint8", max_context=77, checkpoint="/m")
        assert await engine.healthy()
        server.well = False
        assert not await engine.healthy()
        with pytest.raises(EngineUnavailableError, match="not ready"):
            await engine.describe()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_comes_back(stream):
    async with SglangServer(reply="Two words") as server, client(server) as engine:
        objects = await answer(engine, call(stream=stream))
        assert await answer(engine, call(stream=stream))
        assert server.asked == 1
    choices = [choice for found in objects for choice in found["choices"]]
    said = "".join(choice.get("delta", choice.get("message")).get("content", "") for choice in choices)
    assert said == "Two words "
    assert server.requests[0] == {"model": "test", "messages": MESSAGES, "stream": stream}


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ({"include_stop_str_in_output": True}, {"no_stop_trim": True}),
        ({"include_stop_str_in_output": False}, {}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": "root ::= 'a'"}}, {"ebnf": "root ::= 'a'"}),
        ({"structured_outputs": {"choice": ["a.", "b"]}}, {"regex": r"(a\.|b)"}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        (
            {"structured_outputs": {"json": {"type": "string"}, "regex": None}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": {"type": "string"}},
                }
            },
        ),
        ({"structured_outputs": {}}, {}),
        ({"seed": 7, "top_k": -1, "min_tokens": 1, "logit_bias": {"1": 2.0}}, {}),
        ({"best_of": 1, "echo": False, "mm_processor_kwargs": {}, "add_generation_prompt": True}, {}),
    ],
)
async def test_what_sglang_calls_otherwise(sent, arrives):
    kept = {name: value for name, value in sent.items() if name in ("seed", "top_k", "min_tokens", "logit_bias")}
    async with SglangServer() as server, client(server) as engine:
        await answer(engine, call(**sent))
    assert server.requests[0] == {"model": "test", "messages": MESSAGES, **kept, **arrives}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("use_beam_search", True),
        ("prompt_logprobs", 1),
        ("guided_json", {"type": "string"}),
        ("guided_regex", "a"),
        ("allowed_token_ids", [1]),
        ("add_generation_prompt", False),
        ("mm_processor_kwargs", {"max_pixels": 5}),
        ("structured_outputs", {"structural_tag": "{}"}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {"choice": []}),
        ("structured_outputs", {"choice": [1]}),
    ],
)
async def test_what_sglang_would_pass_over_is_refused(name, value):
    async with SglangServer() as server, client(server) as engine:
        with pytest.raises(NotCarriedError) as caught:
            await answer(engine, call(**{name: value}))
        assert caught.value.param == name
        assert not server.requests


async def test_an_engine_that_has_been_silent_is_asked_again(monkeypatch):
    monkeypatch.setattr(sglang_http, "_FACTS_LAST", 0.0)
    async with SglangServer(model_type="a") as server, client(server) as engine:
        await answer(engine, call())
        server.model_type = "b"
        with pytest.raises(EngineUnreachableError, match="another model"):
            await answer(engine, call())
        with pytest.raises(EngineError, match="another model"):
            await engine.describe()
        assert len(server.requests) == 1


async def test_an_engine_that_failed_is_asked_again():
    port = free_port()
    async with SglangServer(delay=5, port=port) as server, client(server, generate_timeout=0.1) as engine:
        with pytest.raises(EngineError):
            await answer(engine, call())
        with pytest.raises(EngineError):
            await answer(engine, call())
        assert server.asked == 2
        await server.stop()
        with pytest.raises(EngineUnreachableError):
            await answer(engine, call())
        assert not await engine.healthy()


async def test_a_server_without_a_model_info(monkeypatch):
    async def missing(self, request):
        raise web.HTTPNotFound

    monkeypatch.setattr(SglangServer, "_model_info", missing)
    async with SglangServer() as server, client(server) as engine:
        with pytest.raises(EngineError):
            await engine.describe()


def test_addresses():
    assert takes_chat("sglang+http://h:1")
    assert takes_chat("dns+sglang+http://h:1")
    assert isinstance(chat_engine("sglang+https://h/prefix"), SglangHttpEngine)
    for url in ("sglang+http://u@h", "sglang+http://h?q", "sglang+http://"):
        with pytest.raises(ConfigError, match="sglang\\+http://host:port"):
            chat_engine(url)
    with pytest.raises(ConfigError, match="prepares pictures itself"):
        engine("sglang+http://h:1")
