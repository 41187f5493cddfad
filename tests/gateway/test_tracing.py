"""Traces: what a collector gets of requests, and what engines get of traces."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from running import PATH, gateway, image, picture, strict_engine, text

from pixelgate.gateway import tracing
from pixelgate.gateway.settings import ModelSettings
from pixelgate.testing import strict_engine as strict
from pixelgate.testing.openai_server import OpenAIServer

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NOT_SAMPLED = PARENT[:-1] + "0"
TRACE = int(PARENT[3:35], 16)


@pytest.fixture
def spans(monkeypatch):
    """The spans that were exported; complete once the gateway is closed."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "exporter", lambda endpoint: memory)
    return memory.get_finished_spans


@asynccontextmanager
async def traced(engines, **settings):
    async with gateway(engines, trace_endpoint="http://127.0.0.1:4318", **settings) as running:
        yield running


@pytest.fixture
def metadata(monkeypatch):
    """The metadata of the calls that engines get."""
    seen, answer = [], strict._Servicer._answer

    async def noting(self, request, context, abort):
        seen.append(dict(context.invocation_metadata()))
        await answer(self, request, context, abort)

    monkeypatch.setattr(strict._Servicer, "_answer", noting)
    return seen


def by_name(spans, name):
    return [span for span in spans() if span.name == name]


async def test_a_request_is_a_span_with_its_phases_and_pictures_below(spans):
    async with strict_engine() as engine, traced(engine.url) as running:
        content = [image(picture(56, 84)), image(picture(56, 56, form="WEBP")), text("secret-words")]
        answer = await running.ask(content, headers={"x-request-id": "mine", "traceparent": PARENT})
        assert answer.status_code == 200
        prompt_tokens = answer.json()["usage"]["prompt_tokens"]
    [request] = by_name(spans, f"POST {PATH}")
    assert request.kind is SpanKind.SERVER
    assert request.context.trace_id == TRACE
    assert request.parent.span_id == int(PARENT[36:52], 16)
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.route": PATH,
        "http.response.status_code": 200,
        "pixelgate.request_id": "mine",
        "pixelgate.model": "demo",
        "pixelgate.pictures": 2,
        "pixelgate.image_tokens": 10,
        "pixelgate.prompt_tokens": prompt_tokens,
        "pixelgate.completion_tokens": len(engine.reply_ids),
        "pixelgate.engine": "vllm+grpc-0",
    }
    below = [span for span in spans() if span is not request]
    assert {span.parent.span_id for span in below} == {request.context.span_id}
    once = ["parse", "fetch", "render", "preprocess", "first_token", "engine"]
    assert sorted(span.name for span in below) == sorted([*once, *["picture", "decode", "execute"] * 2])
    for span in below:
        assert request.start_time - 1e6 <= span.start_time <= span.end_time <= request.end_time + 1e6, span.name
    decoded = {span.attributes["pixelgate.picture"]: span.attributes for span in by_name(spans, "decode")}
    assert set(decoded) == {f"messages[0].content[{i}].image_url" for i in (0, 1)}
    assert decoded["messages[0].content[0].image_url"]["pixelgate.width"] == 84
    assert decoded["messages[0].content[0].image_url"]["pixelgate.bytes"] == len(picture(56, 84))
    assert sorted(span.attributes["pixelgate.tokens"] for span in by_name(spans, "execute")) == [4, 6]
    [engine_span] = by_name(spans, "engine")
    assert engine_span.attributes["pixelgate.outcome"] == "answered"
    assert "secret" not in "".join(span.to_json() for span in spans())


async def test_the_engine_continues_the_trace(spans, metadata):
    async with strict_engine() as engine, traced(engine.url) as running:
        assert (await running.ask(headers={"traceparent": PARENT, "tracestate": "a=b"})).status_code == 200
        assert (await running.ask()).status_code == 200
    [first, second] = by_name(spans, f"POST {PATH}")
    assert metadata[0]["traceparent"] == f"00-{TRACE:032x}-{first.context.span_id:016x}-01"
    assert "tracestate" not in metadata[0]
    assert second.context.trace_id != TRACE
    assert metadata[1]["traceparent"].split("-")[1] == f"{second.context.trace_id:032x}"


async def test_engines_behind_http_continue_it_too(spans, monkeypatch):
    seen, chat = [], OpenAIServer._chat

    async def noting(self, request):
        seen.append(request.headers)
        return await chat(self, request)

    monkeypatch.setattr(OpenAIServer, "_chat", noting)
    async with OpenAIServer() as server:
        models = [ModelSettings(engines=(server.url,), name="demo")]
        async with traced(models) as running:
            assert (await running.ask(headers={"traceparent": PARENT})).status_code == 200
    [request] = by_name(spans, f"POST {PATH}")
    assert seen[-1]["traceparent"] == f"00-{TRACE:032x}-{request.context.span_id:016x}-01"


async def test_a_client_that_does_not_trace_is_not_traced(spans, metadata):
    async with strict_engine() as engine, traced(engine.url) as running:
        assert (await running.ask(headers={"traceparent": NOT_SAMPLED})).status_code == 200
    assert spans() == ()
    assert re.fullmatch(f"00-{TRACE:032x}-[0-9a-f]{{16}}-00", metadata[0]["traceparent"])


@pytest.mark.parametrize("sent", ["", "nonsense", "00-" + "0" * 32 + "-00f067aa0ba902b7-01", "ff" + PARENT[2:]])
async def test_a_wrong_traceparent_begins_a_new_trace(spans, sent):
    async with strict_engine() as engine, traced(engine.url) as running:
        assert (await running.ask(headers={"traceparent": sent})).status_code == 200
    [request] = by_name(spans, f"POST {PATH}")
    assert request.parent is None
    assert request.context.trace_id not in (0, TRACE)


async def test_the_sample_decides_for_clients_that_say_nothing(spans):
    async with strict_engine() as engine, traced(engine.url, trace_sample=0.0) as running:
        assert (await running.ask()).status_code == 200
        assert (await running.ask(headers={"traceparent": PARENT})).status_code == 200
    assert [span.context.trace_id for span in by_name(spans, f"POST {PATH}")] == [TRACE]


async def test_failures_are_seen(spans):
    async with strict_engine() as engine, traced(engine.url) as running:
        url = image("http://127.0.0.1:1/secret?secret")
        assert (await running.ask([url])).status_code == 400
        await engine.stop()
        assert (await running.ask()).status_code == 503
    refused, failed = by_name(spans, f"POST {PATH}")
    assert refused.attributes["pixelgate.error"] == "image_fetch_failed"
    assert refused.status.status_code is StatusCode.UNSET
    assert failed.attributes["http.response.status_code"] == 503
    assert failed.status.status_code is StatusCode.ERROR
    [looked] = by_name(spans, "picture")
    assert looked.attributes["pixelgate.error"] == "FetchError"
    assert "secret" not in "".join(span.to_json() for span in spans())


async def test_a_collector_gets_them_over_http(monkeypatch):
    got = []

    async def collect(request):
        assert request.headers["content-type"] == "application/x-protobuf"
        got.append((request.path, ExportTraceServiceRequest.FromString(await request.read())))
        return web.Response()

    app = web.Application()
    app.router.add_post("/{path:.*}", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    async with strict_engine() as engine:
        for endpoint in (f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/own/path"):
            async with gateway(engine.url, trace_endpoint=endpoint) as running:
                monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # for fetching, if for anything
                monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
                assert (await running.ask()).status_code == 200
            monkeypatch.delenv("HTTP_PROXY")
            monkeypatch.delenv("http_proxy")
    await runner.cleanup()
    assert {path for path, _ in got} == {"/v1/traces", "/own/path"}
    [resource] = got[0][1].resource_spans
    said = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert said["service.name"] == "pixelgate"
    assert said["deployment.environment"] == "test"
    assert f"POST {PATH}" in {span.name for scope in resource.scope_spans for span in scope.spans}
