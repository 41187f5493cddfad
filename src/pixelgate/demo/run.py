"""`pixelgate demo`: a picture goes the whole way, over HTTP, through a gateway with the reader behind it."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from pixelgate.demo import CHECKPOINT, PICTURE
from pixelgate.errors import ConfigError, PixelgateError
from pixelgate.gateway.app import create_app
from pixelgate.gateway.serve import server_config
from pixelgate.gateway.served import open_model
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.processor import Processor, load

MODEL = "demo"
QUESTION = "What does it say here?"
SHOWS = """\
What this shows: the picture entered over HTTP, was decoded and preprocessed as Qwen2.5-VL's own processor does it,
and its placeholder was expanded in the prompt. The engine never saw the file: what it reads, it reads out of the very
tensor that would go to a GPU, and could not if the preprocessing were wrong.
What it does not show: a language model. The engine is a text recogniser and ignores the question; point
`pixelgate serve CHECKPOINT --engine vllm+grpc://HOST:PORT` at a real one."""


def run(picture: str | None) -> None:
    """Print one streamed answer, and what became of the picture on the way. Raises PixelgateError."""
    path = Path(picture or str(PICTURE))
    processor = load(str(CHECKPOINT))
    data = path.read_bytes() if picture is None else _read(path, processor)
    print("pixelgate demo: starting a gateway on a free port, with an engine that reads text ...", flush=True)
    with _gateway() as port:
        _describe(path.name, data, processor)
        _ask(port, data)
    print(f"\n{SHOWS}")


def _read(path: Path, processor: Processor) -> bytes:
    processor.header(path)  # refuses what is no picture, in words
    return path.read_bytes()


@contextmanager
def _gateway() -> Iterator[int]:
    """A gateway on loopback, in a thread of its own; yields its port."""
    model = ModelSettings(str(CHECKPOINT), ("local:reader",), MODEL)
    settings = GatewaySettings(models=(model,), port=0)
    app = create_app(settings, [open_model(model, settings)])
    server = uvicorn.Server(server_config(app, settings))
    thread = threading.Thread(target=server.run, name="pixelgate-demo")
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise ConfigError("the demo's gateway did not start; the messages above say why")
            time.sleep(0.02)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def _describe(name: str, data: bytes, processor: Processor) -> None:
    header = processor.header(data)
    plan = processor.plan(height=header.height, width=header.width)
    height, width = plan.views[0].resize
    print(f"\n  picture  {name}: {header.format}, {header.width}x{header.height}, {len(data) / 1000:.0f} kB")
    print(f"  resized  {width}x{height}")
    print(f"  tensor   {processor.family.pixels_name} {plan.dtype}{list(plan.shape)}, {plan.nbytes / 1e6:.1f} MB")
    print(f"  tokens   {plan.tokens} for the picture\n")


def _ask(port: int, data: bytes) -> None:
    url = "data:image/*;base64," + base64.b64encode(data).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {
        "model": MODEL,
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": content}],
    }
    start = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise PixelgateError(json.load(response)["error"]["message"])
        usage: dict[str, Any] = {}
        for event in _events(response):
            if "error" in event:
                raise PixelgateError(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                print(choice["delta"].get("content", ""), end="", flush=True)
    finally:
        connection.close()
    total = (time.perf_counter() - start) * 1000
    phases = [phase.split(";dur=") for phase in response.headers["server-timing"].split(", ")]
    timings = ", ".join(f"{name.replace('_', ' ')} {milliseconds} ms" for name, milliseconds in phases)
    images = usage["prompt_tokens_details"]["image_tokens"]
    print(f"\n\n  usage    {usage['prompt_tokens']} prompt tokens, {images} of them for the picture; ", end="")
    print(f"{usage['completion_tokens']} tokens of answer")
    print(f"  time     {timings}; all of it {total:.0f} ms")


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Server-sent events as they arrive."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])
