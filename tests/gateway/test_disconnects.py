"""Clients that hang up, in every phase of a request (D65): nothing goes on for them, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from aiohttp import web
from running import ENDLESS, PATH, gateway, image, picture, strict_engine, tasks, text, until

from pixelgate.gateway import pictures
from pixelgate.media.policy import MediaPolicy


def body(content="Hello", **fields):
    return json.dumps({"model": "demo", "messages": [{"role": "user", "content": content}], **fields}).encode()


async def post(port, sent, announced=None):
    """A request on a connection of its own, as (reader, writer)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {announced or len(sent)}\r\n\r\n"
    writer.write(head.encode() + sent)
    await writer.drain()
    return reader, writer


async def everything_is_over(running, engine, before):
    """No request is under way anywhere, and no task is left that was not there ``before``."""
    await until(lambda: not engine.running)
    await until(lambda: tasks() <= before)
    assert await running.metric("pixelgate_requests_in_flight") == 0


async def gone(running):
    return await running.metric("pixelgate_requests_total", path=PATH, status="499")


@pytest.fixture
async def slow():
    """(gateway, engine, tasks before any request); the engine takes its time over each token, and has no end."""
    async with (
        strict_engine(delay=0.05, reply=ENDLESS) as engine,
        gateway(engine.url, media=MediaPolicy(allow_private=("127.0.0.1",))) as running,
    ):
        assert (await running.ask(max_tokens=1)).status_code == 200
        assert await running.metric("pixelgate_requests_in_flight") == 0
        yield running, engine, tasks()


@pytest.mark.parametrize("content", ["Hello", [image(picture(224, 280)), text("And?")]])
async def test_in_the_middle_of_a_stream(slow, content):
    running, engine, before = slow
    reader, writer = await post(running.port, body(content, stream=True))
    assert b'"role":"assistant"' in await reader.readuntil(b"}\n\n")
    [name] = engine.running
    writer.close()
    await until(lambda: engine.cancelled == [name])
    await everything_is_over(running, engine, before)
    assert engine.aborted == [name]
    assert await gone(running) == 1


@pytest.mark.parametrize("content", ["Hello", [image(picture(224, 280)), text("And?")]])
@pytest.mark.parametrize("stream", [False, True])
async def test_while_waiting_for_the_answer(slow, content, stream):
    running, engine, before = slow
    engine.delay = 30
    _, writer = await post(running.port, body(content, stream=stream))
    await until(lambda: engine.running)
    [name] = engine.running
    writer.close()
    await until(lambda: engine.cancelled == [name])
    await everything_is_over(running, engine, before)
    assert engine.aborted == [name]
    assert await gone(running) == 1
    assert await running.metric("pixelgate_requests_total", path=PATH, status="200") == 1


async def test_before_the_body_is_complete(slow):
    running, engine, before = slow
    _, writer = await post(running.port, b'{"model":', announced=1000)
    await until(lambda: len(tasks()) > len(before))
    writer.close()
    await everything_is_over(running, engine, before)
    assert await gone(running) == 1
    assert len(engine.requests) == 1


async def test_while_a_picture_is_fetched(slow):
    running, engine, before = slow
    dropped = asyncio.Event()

    async def never(request):
        try:
            await asyncio.sleep(30)
        finally:
            dropped.set()

    app = web.Application()
    app.router.add_get("/slow", never)
    host = web.AppRunner(app, handler_cancellation=True)
    await host.setup()
    await web.TCPSite(host, "127.0.0.1", 0).start()
    with_host = tasks()
    url = f"http://127.0.0.1:{host.addresses[0][1]}/slow"
    _, writer = await post(running.port, body([image(picture(56, 56)), image(url)]))
    await until(lambda: len(tasks()) > len(with_host) + 3)
    writer.close()
    await asyncio.wait_for(dropped.wait(), 5)
    await host.cleanup()
    await everything_is_over(running, engine, before)
    assert await gone(running) == 1
    assert len(engine.requests) == 1


async def test_while_pictures_are_preprocessed(slow, monkeypatch, processor):
    """The worker's thread cannot be stopped; its array must be nobody else's as long as it writes."""
    running, engine, before = slow
    begun, go, written = threading.Event(), threading.Event(), []

    def held(plan, picture, out, **options):
        begun.set()
        assert go.wait(10)
        written.append(out)
        return execute(plan, picture, out, **options)

    execute = pictures.execute
    monkeypatch.setattr(pictures, "execute", held)
    _, writer = await post(running.port, body([image(picture(224, 280, 1)), image(picture(224, 280, 2))]))
    await until(begun.is_set)
    writer.close()
    await until(lambda: tasks() <= before)
    assert await gone(running) == 1
    monkeypatch.setattr(pictures, "execute", execute)

    asked = asyncio.create_task(running.ask([image(picture(224, 280, 3))], max_tokens=1))
    await asyncio.sleep(0.02)
    go.set()
    assert (await asked).status_code == 200
    assert len(engine.requests) == 2
    pixels = engine.requests[-1].mm_inputs.pixel_values.inline
    assert pixels == processor(picture(224, 280, 3), dtype="uint8")["pixel_values"].tobytes()
    await everything_is_over(running, engine, before)


@pytest.mark.parametrize("after", ["the head", "the first text", "the body"])
async def test_at_an_unlucky_moment(slow, after):
    """Straight to the application: the client is gone before a message has reached it."""
    running, engine, before = slow
    sent, gone_now = [], asyncio.Event()
    pending = [{"type": "http.request", "body": body(stream=True), "more_body": False}]

    async def receive():
        if pending:
            if after == "the body":
                gone_now.set()
            return pending.pop()
        await gone_now.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message["type"])
        if after == "the head" or len(sent) == 2:
            gone_now.set()
            await asyncio.sleep(30)  # its buffers are full

    scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
    await running.app(scope, receive, send)
    assert len(sent) <= 3
    # by now, and not when the garbage collector comes; a short request may be on its way before the client is missed
    sent_on = [request.request_id for request in engine.requests if request.stream]
    assert engine.aborted == sent_on or after == "the body"
    assert {*sent_on} <= {*engine.aborted}
    assert sent_on or after == "the body"
    await everything_is_over(running, engine, before)
    assert await gone(running) == 1


async def test_many_at_once(slow):
    running, engine, before = slow
    connections = []
    for number in range(12):
        content = [image(picture(112, 112, number))]
        connections.append(await post(running.port, body(content, stream=number % 2 == 0)))
    await until(lambda: len(engine.running) == 12)
    for _, writer in connections:
        writer.close()
    await everything_is_over(running, engine, before)
    assert len(engine.cancelled) == 12
    assert await gone(running) == 12
    assert (await running.ask(max_tokens=1)).status_code == 200


async def test_a_connection_is_kept_for_the_next_request(slow):
    running, engine, before = slow
    reader, writer = await post(running.port, body(max_tokens=1, stream=True))
    assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
    second = body(max_tokens=1)
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(second)}\r\n\r\n".encode() + second)
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await everything_is_over(running, engine, before)
    assert await gone(running) == 0
    assert engine.cancelled == engine.aborted == []
