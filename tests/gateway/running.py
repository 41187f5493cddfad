"""A gateway as it runs in production: the real application under a real HTTP server, on loopback."""

from __future__ import annotations

import asyncio
import base64
import inspect
import io
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from pixelgate.demo import CHECKPOINT
from pixelgate.gateway.app import create_app
from pixelgate.gateway.listening import Listeners
from pixelgate.gateway.passthrough import open_both
from pixelgate.gateway.serve import Server, admin_listener
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.media.policy import MediaPolicy
from pixelgate.testing.strict_engine import StrictEngine

PATH = "/v1/chat/completions"
REPLY = "The picture arrived in order."
ENDLESS = "And so on. " * 1000
PAD, IM_START, IM_END, EOS = 151655, 151644, 151645, 151645


@dataclass
class Gateway:
    app: Starlette
    port: int
    client: httpx.AsyncClient
    admin_port: int | None = None

    async def ask(self, content="Hello", *, model="demo", headers=None, **fields):
        body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
        return await self.client.post(PATH, json=body, headers=headers)

    async def metric(self, name, **labels):
        """The sum of the samples of /metrics with these labels; 0 when there are none."""
        found = 0
        text = (await self.client.get("/metrics")).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    found += sample.value
        return found


def strict_engine(**settings):
    return StrictEngine(CHECKPOINT, **{"reply": REPLY, "eos_token_ids": (EOS,), "device_normalize": True, **settings})


@asynccontextmanager
async def gateway(engines, checkpoint=CHECKPOINT, bos="engine", **settings):
    """``engines``: one engine's URL, or several in a tuple, for a model named demo; or these for each model's name.

    A list holds settings of models instead.
    """
    if not isinstance(engines, list):
        engines = engines if isinstance(engines, dict) else {"demo": engines}
        engines = {name: (urls,) if isinstance(urls, str) else urls for name, urls in engines.items()}
        engines = [ModelSettings(str(checkpoint), urls, name, bos=bos) for name, urls in engines.items()]
    models = tuple(engines)
    media = MediaPolicy(isolate=())  # no decoder process is started for a test that is not about them
    settings = GatewaySettings(
        models=models, **{"port": 0, "threads": 2, "engine_wait": 5.0, "media": media, **settings}
    )
    admin = Listeners(*settings.admin_address, what="admin_host") if settings.admin_address else None
    app = create_app(settings, [opened for model in models for opened in open_both(model, settings)])
    server = Server(app, settings)
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    scheme = "https" if settings.tls_cert else "http"
    try:
        async with (
            admin_listener(app.state.admin, settings, admin.of(0, 1) if admin else ()),
            httpx.AsyncClient(base_url=f"{scheme}://127.0.0.1:{port}", timeout=20, verify=False) as client,
        ):
            yield Gateway(app, port, client, admin and admin.port)
    finally:
        server.should_exit = True
        await task


def picture(height, width, seed=0, form="PNG"):
    """An encoded picture of noise, which no two seeds have in common."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def image(data):
    """The content part of a picture: of bytes as a data URL, or of a URL."""
    url = data if isinstance(data, str) else "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def events(body):
    """The data of server-sent events; the last is the text [DONE] where the stream ended well."""
    found = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        data = block.removeprefix("event: error\n").removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def error_of(response):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def tasks():
    """All tasks but the test's own and those in which a gRPC server waits for its next calls."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return {task for task in others if not task.get_coro().__qualname__.startswith("AioServer.")}


async def until(condition):
    """Wait for a condition, a function that may be a coroutine's, for at most about five seconds."""
    for _ in range(1000):
        met = condition()
        if await met if inspect.isawaitable(met) else met:
            return
        await asyncio.sleep(0.005)
    raise AssertionError("the condition was not met in time")
