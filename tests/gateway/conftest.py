from __future__ import annotations

import gc
import re
import weakref
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from aiohttp import web
from running import gateway, picture, strict_engine

from pixelgate.demo import CHECKPOINT
from pixelgate.media.policy import MediaPolicy
from pixelgate.pixels.outgoing import memory_of, outgoing
from pixelgate.processor import load
from pixelgate.prompt.tokenizer_json import JsonTokenizer

MODELS = {
    "demo": {"device_normalize": True},
    "bfloat16": {"device_normalize": False, "encoder_dtype": "bfloat16"},
    "float32": {"device_normalize": False, "encoder_dtype": "float32"},
    "tight": {"max_images": 2, "max_context": 300, "max_embeddings_per_image": 150},
}


class House:
    """A gateway that lives as long as a module, with a model for each kind of engine."""

    def __init__(self, running, engines):
        self.running = running
        self.engines = engines
        self.ask, self.metric, self.client = running.ask, running.metric, running.client

    def received(self, model="demo"):
        """The message that arrived last at a model's engine."""
        return self.engines[model].requests[-1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house():
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(strict_engine(keep=64, **settings))
            for name, settings in MODELS.items()
        }
        running = await stack.enter_async_context(
            gateway(
                {name: engine.url for name, engine in engines.items()},
                media=MediaPolicy(max_images=4, allow_private=("127.0.0.1",), max_bytes=4 << 20),
                max_body_bytes=8 << 20,
                max_tensor_bytes=20 << 20,
                trust_request_mm_kwargs=True,
            )
        )
        yield House(running, engines)


@pytest.fixture
def tensors_made(monkeypatch):
    """A weak reference to the memory of every tensor that a gateway makes; nothing waits for the garbage collector."""
    made = []

    def noted(*arguments):
        array = outgoing(*arguments)
        made.append(weakref.ref(memory_of(array)))
        return array

    monkeypatch.setattr("pixelgate.gateway.pictures.outgoing", noted)
    gc.disable()
    yield made
    gc.enable()


@pytest.fixture(scope="session")
def processor():
    return load(CHECKPOINT)


@pytest.fixture(scope="session")
def tokenizer():
    return JsonTokenizer.from_file(CHECKPOINT / "tokenizer.json")


@pytest_asyncio.fixture(loop_scope="module")
async def host():
    """A picture host on loopback, as (URL, paths asked for): /HEIGHTxWIDTH is a picture, all else is missing."""
    asked = []

    async def answer(request):
        asked.append(request.path)
        if size := re.fullmatch(r"/(\d+)x(\d+)", request.path):
            return web.Response(body=picture(int(size[1]), int(size[2])))
        raise web.HTTPNotFound

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    await runner.cleanup()
