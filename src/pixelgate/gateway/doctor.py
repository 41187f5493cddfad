"""`pixelgate doctor`: what engines say of themselves, whether they fit, and one picture the whole way to each."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing

import numpy as np
from PIL import Image

from pixelgate.engines import connect
from pixelgate.engines.chat_engine import ChatObject
from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest
from pixelgate.engines.shm import namespace
from pixelgate.errors import EngineError, PixelgateError
from pixelgate.fairness import Owner
from pixelgate.gateway import passthrough, received, wire
from pixelgate.gateway.chat import Chat, prepare
from pixelgate.gateway.passthrough import Passage, PassThrough, open_both
from pixelgate.gateway.phases import Phases
from pixelgate.gateway.served import ServedModel
from pixelgate.gateway.services import Services
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

_SIDE = 224
_QUESTION = "What is this?"
_PASSES = "the engine prepares pictures itself; they are fetched, checked and bounded here"

Tell = Callable[[str, str], None]


def run(models: Sequence[ModelSettings]) -> int:
    """Print the findings on the one engine of each of ``models``; 1 if any is not as it must be, else 0."""
    failed = 0
    for number, model in enumerate(models):
        if number:
            print()
        try:
            examine(model, lambda name, words: print(f"{name:11}{words}", flush=True))
        except PixelgateError as error:
            print(f"pixelgate: {error.message}", file=sys.stderr, flush=True)
            failed = 1
    return failed


def examine(model: ModelSettings, tell: Tell) -> None:
    """Tell each finding on the one engine of ``model`` as a name and words, with its checkpoint or the engine's files.

    Raises PixelgateError, whose message is the reason, for the first thing that is not as it must be.
    """
    (url,) = model.engines
    tell("engine", url)
    embedded = connect.embedded(url)
    if not embedded:  # before anything is fitted against it
        _tell_facts(asyncio.run(_facts(model)), tell, passes=connect.takes_chat(url))
    with received.complete(model, 0.0) as complete:
        settings = GatewaySettings(models=(complete,), engine_wait=0.0)
        (opened,) = open_both(complete, settings)
    if isinstance(opened, PassThrough):
        tell("checkpoint", model.checkpoint or "none: pictures are not planned")
        asyncio.run(_pass(opened, settings, tell))
        return
    tell("checkpoint", model.checkpoint or "the engine's own files")
    asyncio.run(_probe(opened, settings, tell, embedded=embedded))


async def _facts(model: ModelSettings) -> EngineFacts:
    (url,) = model.engines
    connected = connect.chat_engine if connect.takes_chat(url) else connect.engine
    engine = connected(url, model=model.engine_model, name=model.name, headers=model.headers(url))
    try:
        return await engine.describe()
    finally:
        await engine.close()


def _tell_facts(facts: EngineFacts, tell: Tell, *, passes: bool = False) -> None:
    tell("model", f"{facts.model_name or 'without a name'}, {facts.model_type or 'of a type that it does not say'}")
    tell("weights", facts.checkpoint or "not said")
    tell("pixels", _PASSES if passes else _pixels(facts))
    tell("limits", _limits(facts))
    if not passes:
        tell("memory", _memory(facts))


def _memory(facts: EngineFacts) -> str:
    return "shared with this host" if facts.shared_memory and facts.shared_memory == namespace() else "its own"


def _pixels(facts: EngineFacts) -> str:
    who = "the engine normalises them" if facts.pixel_dtype == "uint8" else "normalised here"
    return f"{facts.pixel_dtype}, {who}"


def _limits(facts: EngineFacts) -> str:
    limits = {
        "tokens of a prompt": facts.max_context,
        "pictures": facts.max_images,
        "tokens of a picture": facts.max_embeddings_per_image,
        "bytes of pixels": facts.max_pixel_bytes,
        "tokens in the vocabulary": facts.vocab_size,
    }
    return ", ".join(f"{number} {words}" for words, number in limits.items() if number is not None) or "not said"


async def _probe(served: ServedModel, settings: GatewaySettings, tell: Tell, *, embedded: bool) -> None:
    """Send one picture for one token. Raises EngineError unless the engine counts the prompt's tokens as we do."""
    try:
        facts = await served.connect(settings.engine_wait)
        if embedded:
            _tell_facts(facts, tell)
        services = Services.of(settings)
        async with services.running():
            phases = Phases(services.metrics)
            with services.holding(Owner("doctor"), phases) as held:
                question = wire.parse_chat(_question(served.name))
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


async def _pass(model: PassThrough, settings: GatewaySettings, tell: Tell) -> None:
    """Hand on one picture for one token."""
    try:
        await model.connect(settings.engine_wait)
        services = Services.of(settings)
        async with services.running():
            phases = Phases(services.metrics)
            with services.holding(Owner("doctor"), phases) as held:
                question = wire.parse_chat(_question(model.name))
                passage = Passage("pixelgate-doctor", question, model, phases, held)
                call = await passthrough.prepare(passage, services)
        start = time.perf_counter()
        async with aclosing(passthrough.answer(passage, call)) as objects:
            answer = await anext(objects)
        took = time.perf_counter() - start
    finally:
        await model.fleet.close()
    tell("probe", f"a picture of {_SIDE}x{_SIDE}, answered in {took:.2f} s")
    tell("tokens", f"{_counted(answer)} at the engine, by its own count")


def _counted(answer: ChatObject) -> str:
    usage = answer.get("usage")
    return str(usage.get("prompt_tokens", "not said")) if isinstance(usage, dict) else "not said"


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
