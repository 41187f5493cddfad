"""`pixelgate doctor`: what an engine says of itself, whether it fits the checkpoint, and one picture the whole way."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Callable
from contextlib import aclosing

import numpy as np
from PIL import Image

from pixelgate.engines import connect
from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest
from pixelgate.engines.shm import namespace
from pixelgate.errors import EngineError
from pixelgate.gateway import received, wire
from pixelgate.gateway.chat import Chat, prepare
from pixelgate.gateway.fairness import Owner
from pixelgate.gateway.metrics import Phases
from pixelgate.gateway.served import ServedModel, open_model
from pixelgate.gateway.services import Services
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

_SIDE = 224
_QUESTION = "What is this?"

Tell = Callable[[str, str], None]


def run(model: ModelSettings) -> None:
    """Print the findings on the one engine of ``model``, with its checkpoint or else the engine's own files.

    Raises PixelgateError, whose message is the reason, for the first thing that is not as it must be.
    """
    examine(model, lambda name, words: print(f"{name:11}{words}", flush=True))


def examine(model: ModelSettings, tell: Tell) -> None:
    """The same, telling each finding as a name and words."""
    (url,) = model.engines
    tell("engine", url)
    for name, words in asyncio.run(_facts(model)):
        tell(name, words)
    with received.complete(model, 0.0) as complete:
        settings = GatewaySettings(models=(complete,), engine_wait=0.0)
        served = open_model(complete, settings)
    tell("checkpoint", model.checkpoint or "the engine's own files")
    asyncio.run(_probe(served, settings, tell))


async def _facts(model: ModelSettings) -> list[tuple[str, str]]:
    (url,) = model.engines
    engine = connect.engine(url, model=model.engine_model, name=model.name, headers=model.headers(url))
    try:
        facts = await engine.describe()
    finally:
        await engine.close()
    return [
        ("model", f"{facts.model_name or 'without a name'}, {facts.model_type or 'of a type that it does not say'}"),
        ("weights", facts.checkpoint or "not said"),
        ("pixels", _pixels(facts)),
        ("limits", _limits(facts)),
        (
            "memory",
            "shared with this host" if facts.shared_memory and facts.shared_memory == namespace() else "its own",
        ),
    ]


def _pixels(facts: EngineFacts) -> str:
    who = "the engine normalises them" if facts.pixel_dtype == "uint8" else "normalised here"
    return f"{facts.pixel_dtype}, {who}"


def _limits(facts: EngineFacts) -> str:
    limits = {
        "tokens of a prompt": facts.max_context,
        "pictures": facts.max_images,
        "tokens of a picture": facts.max_embeddings_per_image,
        "tokens in the vocabulary": facts.vocab_size,
    }
    return ", ".join(f"{number} {words}" for words, number in limits.items() if number is not None) or "not said"


async def _probe(served: ServedModel, settings: GatewaySettings, tell: Tell) -> None:
    """Send one picture for one token. Raises EngineError unless the engine counts the prompt's tokens as we do."""
    try:
        facts = await served.connect(settings.engine_wait)
        services = Services.of(settings)
        async with services.running():
            with services.holding(Owner("doctor")) as held:
                question, phases = wire.parse_chat(_question(served.name)), Phases(services.metrics)
                chat = Chat("pixelgate-doctor", question, served, facts, phases, served.processor, held)
                request = await prepare(chat, services)
        start = time.perf_counter()
        counted = (await _last(served, request)).prompt_tokens
        took = time.perf_counter() - start
    finally:
        await served.fleet.close()
    sent = len(request.token_ids)
    tell("probe", f"a picture of {_SIDE}x{_SIDE}, {chat.image_tokens} tokens of {sent}, answered in {took:.2f} s")
    if counted != sent:
        raise EngineError(f"the prompt has {sent} tokens here, and {counted} at the engine")
    tell("tokens", f"{sent} here, {counted} at the engine: equal")


async def _last(served: ServedModel, request: EngineRequest) -> Delta:
    async with aclosing(served.fleet.generate(request)) as deltas:
        async for delta in deltas:
            if delta.finish_reason:
                return delta
    raise EngineError("the engine ended its answer before it was complete")


def _question(model: str) -> bytes:
    ramp = np.arange(_SIDE, dtype=np.uint8)
    pixels = np.stack(np.broadcast_arrays(ramp[:, None], ramp, np.uint8(128)), axis=-1)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": _QUESTION}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1, "temperature": 0}
    return json.dumps(body).encode()
