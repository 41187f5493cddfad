"""Many at once: what is legal alone must not be too much together, and the event loop is nobody's to keep."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import threading
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path

import grpc
import httpx
import pytest
from PIL import Image
from running import PATH, error_of, gateway, image, picture, strict_engine, until
from test_serve import process

from pixelgate.fairness import NOBODY
from pixelgate.gateway import chat, pictures, services
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.media.policy import MediaPolicy
from pixelgate.processor import Processor


def bilevel(side, seed=0):
    """A large picture in a small file."""
    made = Image.new("1", (side, side), 1)
    made.paste(0, (seed, 0, seed + 1, side))
    file = io.BytesIO()
    made.save(file, "PNG")
    return file.getvalue()


async def test_many_large_pictures_are_decoded_a_few_at_a_time(monkeypatch):
    """D29: each is legal, and 16 of them are not in memory at once; who sends none does not wait."""
    side, most = 400, 400_000
    lock, go = threading.Lock(), threading.Event()
    pixels = peak = 0
    execute = pictures.execute

    def counted(plan, *arguments, **options):
        nonlocal pixels, peak
        with lock:
            pixels += plan.height * plan.width
            peak = max(peak, pixels)
        assert go.wait(30)
        try:
            return execute(plan, *arguments, **options)
        finally:
            with lock:
                pixels -= plan.height * plan.width

    monkeypatch.setattr(pictures, "execute", counted)
    limits = {"max_pixels_in_flight": most, "budget_wait": 30.0, "threads": 8}
    async with strict_engine() as engine, gateway(engine.url, **limits) as running:
        large = [asyncio.create_task(running.ask([image(bilevel(side, seed))], max_tokens=1)) for seed in range(16)]
        await until(lambda: pixels == 2 * side * side)
        assert {(await running.ask(max_tokens=1)).status_code for _ in range(5)} == {200}
        assert not any(task.done() for task in large)
        go.set()
        assert {response.status_code for response in await asyncio.gather(*large)} == {200}
        assert peak <= most
        response = await running.ask([image(bilevel(56))] * 64)
        assert response.status_code == 400
        assert error_of(response)["message"] == "the request has 64 pictures; at most 32 are allowed"


async def test_nobody_keeps_the_event_loop(monkeypatch):
    """D59: base64, headers, decoding, resizing and rendering are the workers', but for what takes no time."""
    loop_thread, at_work = threading.get_ident(), set()

    def noted(module, name):
        work = getattr(module, name)

        def instead(*arguments, **options):
            at_work.add((name, threading.get_ident() == loop_thread))
            return work(*arguments, **options)

        monkeypatch.setattr(module, name, instead)

    heavy = [(pictures, "execute"), (chat, "render"), (services.source, "payload")]
    for module, name in [*heavy, (Processor, "rgb"), (Processor, "header")]:
        noted(module, name)
    noise = [image(picture(1536, 1085, seed, "JPEG")) for seed in range(4)]
    async with strict_engine() as engine, gateway(engine.url) as running:
        long = [*noise, {"type": "text", "text": "What is this? " * 200}]
        for response in await asyncio.gather(*(running.ask(long, max_tokens=1) for _ in range(4))):
            assert response.status_code == 200
        assert at_work == {(name, False) for name in ("execute", "render", "payload", "rgb", "header")}
        at_work.clear()
        # what a hostile PNG can do within half a megabyte takes a second
        short = [image(picture(56, 56, 7, "JPEG")), image(picture(56, 56, 8))]
        assert (await running.ask(short, max_tokens=1)).status_code == 200
        assert {on_loop for name, on_loop in at_work if name == "header"} == {True, False}
        assert {("payload", True), ("render", True), ("rgb", False), ("execute", False)} <= at_work
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        at_work.clear()
        assert (await running.ask("x", max_tokens=1, tools=tools)).status_code == 200
        assert at_work == {("render", False)}


def test_a_processor_serves_many_threads_at_once(processor):
    """D61: 64 threads, 20 pictures; every result is the one of a thread alone."""
    data = [picture(56 + 28 * (n % 4), 84, n) for n in range(20)]
    expected = [processor(each)["pixel_values"].tobytes() for each in data]
    wrong = []

    def work(first):
        for step in range(40):
            number = (first + step) % 20
            if processor(data[number])["pixel_values"].tobytes() != expected[number]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


async def test_a_noisy_photo_is_below_the_limit_of_bodies():
    """D62: with the defaults a picture of a megapixel that cannot be compressed is taken, and base64 counts."""
    data = picture(1000, 1300, form="PNG")
    assert len(data) > 3_900_000
    async with strict_engine() as engine, gateway(engine.url) as running:
        assert (await running.ask([image(data)], max_tokens=1)).status_code == 200
    defaults = {each.name: each.default for each in fields(GatewaySettings)}
    assert MediaPolicy().max_bytes * 4 / 3 < defaults["max_body_bytes"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_of_megabytes_is_taken_or_too_large(monkeypatch, stream):
    """D63: above gRPC's default of 4 MiB, and above what an engine takes; it is the request's fault, and says so."""
    large = [image(bilevel(1000))]
    async with strict_engine(shm=False) as engine, gateway(engine.url) as running:
        assert (await running.ask(large, max_tokens=1, stream=stream)).status_code == 200
        assert engine.requests[-1].ByteSize() > 4 << 20
    server = grpc.aio.server
    limit = ("grpc.max_receive_message_length", 4 << 20)
    monkeypatch.setattr(grpc.aio, "server", lambda options: server(options=[*dict([*options, limit]).items()]))
    async with strict_engine(shm=False) as engine, gateway(engine.url) as running:
        response = await running.ask(large, stream=stream)
        assert response.status_code == 413
        assert "fewer or smaller pictures" in error_of(response)["message"]
        assert not engine.requests
        assert (await running.ask([image(bilevel(56))], max_tokens=1, stream=stream)).status_code == 200


@asynccontextmanager
async def serving(url, **environment):
    """`pixelgate serve` as (its process id, a client)."""
    async with process(url, **environment) as (running, port, _):
        drained = asyncio.create_task(running.stderr.read())
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            yield running.pid, client
        running.terminate()
        await drained


def tree(pid):
    """A process and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(below for child in children for below in tree(int(child)))]


def shared(pid):
    """Files of a gateway in shared memory."""
    own = [f"-{each}-" for each in tree(pid)]
    return [file for file in Path("/dev/shm").iterdir() if any(part in file.name for part in own)]


def resident(pid):
    """Bytes of a gateway in memory."""
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in tree(pid)]
    return sum(pages) * os.sysconf("SC_PAGESIZE")


async def test_memory_does_not_grow_with_every_picture():
    """D64, the short form: pictures that all differ, half of them broken, a tenth abandoned."""

    async def ask(client, number):
        data = picture(224, 280, number)
        data = data[: len(data) // 2] if number % 2 else data
        url = "data:image/png;base64," + base64.b64encode(data).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "checkpoint", "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        if number % 10 == 2:
            with pytest.raises(httpx.TimeoutException):
                await client.post(PATH, json=body, timeout=0.002)
        else:
            response = await client.post(PATH, json=body)
            assert response.status_code == (400 if number % 2 else 200)

    async def run(client, numbers):
        for start in numbers[::8]:
            await asyncio.gather(*(ask(client, start + n) for n in range(8)))

    small = {f"PIXELGATE_SERVE_{name}_BYTES": "1000000" for name in ("TENSOR_CACHE", "HEADER_CACHE")}
    async with strict_engine() as engine, serving(engine.url, **small) as (pid, client):
        await run(client, range(160))
        before = resident(pid)
        await run(client, range(160, 480))
        assert resident(pid) < before + (16 << 20)  # 50 kB a request; a picture, its tensor or its body is more
        assert not shared(pid)


async def test_short_work_takes_turns_with_the_rest_of_the_loop():
    model = ModelSettings("x", ("local:reader",))
    shared, turns, seen = services.Services.of(GatewaySettings(models=(model,))), 0, []

    async def turn():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await asyncio.gather(*(shared.errand(NOBODY, lambda: seen.append(turns), at_once=True) for _ in range(5)))
    turning.cancel()
    assert len({*seen}) == 5
