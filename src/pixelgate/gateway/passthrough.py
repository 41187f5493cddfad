"""The pipeline for engines that prepare pictures themselves: a chat request in, the same with safe pictures out.

    fetch -> header -> plan, where there is a checkpoint -> files that every decoder reads alike -> engine

No engine opens a connection for a client: pictures go on as data URLs, fetched, checked and bounded by the gateway's
own policy. The answer is the engine's, token counts too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray

from pixelgate.engines.chat_engine import ChatCall, ChatEngine, ChatObject
from pixelgate.engines.connect import chat_engine, takes_chat
from pixelgate.engines.discovery import Discovery
from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.fleet import ChatFleet
from pixelgate.errors import OptionError, RequestError
from pixelgate.gateway.messages import Reference, references
from pixelgate.gateway.phases import Phases
from pixelgate.gateway.served import ServedModel, check_model, open_model
from pixelgate.gateway.services import Held, Services, naming, together
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.gateway.waiting import until_available
from pixelgate.gateway.wire import ChatRequest, ImagePart, ImageUrl, Message
from pixelgate.media import decode
from pixelgate.media.decode import Header
from pixelgate.media.handing import handed_on, png
from pixelgate.pixels import kernels
from pixelgate.pixels.plan import ImagePlan, View
from pixelgate.processor import Processor, load
from pixelgate.prompt.template import NOT_THE_CLIENTS

_LOOK_INTERVAL = 30.0  # seconds; hosted services count questions, too
_ANSWER = ("service_tier", "system_fingerprint", "choices", "usage")


@dataclass(frozen=True)
class PassThrough:
    """A model whose engines prepare pictures themselves. Without a ``processor`` pictures are not planned.

    ``options`` are the processor's for every request; with ``resize`` a picture is sent in the size that is used.
    """

    name: str
    fleet: ChatFleet
    processor: Processor | None
    options: dict[str, Any]
    resize: bool

    @property
    def facts(self) -> EngineFacts:
        """What the engines say of themselves now."""
        return self.fleet.facts

    async def connect(self, wait: float) -> EngineFacts:
        """The engines' facts, waiting up to ``wait`` seconds for them to answer."""
        facts = await until_available(self.fleet.connect, wait, f"engine of model {self.name!r}")
        if self.processor is not None:
            check_model(self.name, facts, self.processor.checkpoint)
        return facts


@dataclass(frozen=True)
class Passage:
    """One request on its way through."""

    id: str
    request: ChatRequest
    model: PassThrough
    phases: Phases
    held: Held


@dataclass(frozen=True)
class Picture:
    """A picture of the request: its encoded bytes and what is known from its header."""

    param: str
    data: bytes
    pixels: int
    isolated: bool
    plan: ImagePlan | None


def open_both(settings: ModelSettings, gateway: GatewaySettings) -> list[ServedModel | PassThrough]:
    """What serves a model: its engines that take tensors, those that prepare pictures themselves, or one of each.

    Of both kinds the second serves what the first has no way to express. Nothing is connected. Raises CheckpointError
    or ConfigError.
    """
    chat_urls = tuple(url for url in settings.engines if takes_chat(url))
    found: list[ServedModel | PassThrough] = []
    processor = None
    if len(chat_urls) < len(settings.engines):
        model = open_model(settings, gateway)
        found.append(model)
        processor = model.processor
    elif settings.checkpoint:
        processor = load(
            settings.checkpoint,
            revision=settings.revision,
            backend=settings.backend,
            rgb=gateway.media.rgb,
            policy=gateway.media,
        ).with_options(**settings.mm_processor_kwargs)
    if chat_urls:
        found.append(
            PassThrough(settings.name, chat_fleet(settings), processor, settings.mm_processor_kwargs, settings.resize)
        )
    return found


def chat_fleet(settings: ModelSettings) -> ChatFleet:
    """A model's engines that prepare pictures themselves; nothing is connected. Raises ConfigError."""

    def build(url: str) -> ChatEngine:
        return chat_engine(url, model=settings.engine_model, name=settings.name, headers=settings.headers(url))

    discovery = Discovery([entry for entry in settings.engines if takes_chat(entry)], build)
    find = None if discovery.fixed else discovery.look
    return ChatFleet(discovery.engines, find=find, balance=settings.balance, look_interval=_LOOK_INTERVAL)


async def prepare(passage: Passage, services: Services) -> ChatCall:
    """Everything before the engine: the request's pictures to files that can be handed on."""
    request, model = passage.request, passage.model
    wanted = list(references(request.messages))
    limit = services.settings.media.max_images
    if len(wanted) > limit:
        raise RequestError(f"the request has {len(wanted)} pictures; at most {limit} are allowed", param="messages")
    own = request.mm_processor_kwargs or {}
    if own and not services.settings.trust_request_mm_kwargs:
        raise OptionError(
            "mm_processor_kwargs are not taken from requests unless the gateway runs with --trust-request-mm-kwargs",
            param="mm_processor_kwargs",
        )
    if taken := set(NOT_THE_CLIENTS) & (request.chat_template_kwargs or {}).keys():
        raise RequestError(
            f"the chat template argument '{min(taken)}' cannot be set by a request", param="chat_template_kwargs"
        )
    processor = model.processor and model.processor.with_options(**own)
    with passage.phases.measure("fetch"):
        pictures = await together(obtain(passage, services, processor, each) for each in wanted)
    with (
        passage.phases.measure("preprocess"),
        services.pixels.share(passage.held.owner, passage.phases.waiting("pixels")) as pixels,
        naming("messages"),
    ):
        await pixels.take(sum(picture.pixels for picture in pictures))
        urls = await together(_data_url(passage, services, processor, picture) for picture in pictures)
        await passage.held.encoded.take(sum(map(len, urls)))
    passage.phases.note(pictures=len(pictures))
    left = iter(urls)
    body = {name: value for name, value in _fields(request).items() if value is not None}
    body["messages"] = [_message(message, left) for message in request.messages]
    if options := {**model.options, **own}:
        body["mm_processor_kwargs"] = options
    first = await services.errands.run(passage.held.owner, _digest, pictures[0].data) if pictures else ""
    return ChatCall(body, nbytes=sum(map(len, urls)), picture=first, traceparent=passage.phases.traceparent)


async def answer(passage: Passage, call: ChatCall) -> AsyncGenerator[ChatObject, None]:
    """Yield the answer's objects, under the gateway's own names. Closing it aborts the request."""
    kind = "chat.completion.chunk" if call.stream else "chat.completion"
    head = {"id": passage.id, "object": kind, "created": int(time.time()), "model": passage.model.name}
    sent, first = time.perf_counter(), True
    async with aclosing(passage.model.fleet.generate(call, passage.phases.tried)) as objects:
        async for found in objects:
            passage.phases.note(**_usage(found))
            if first:
                passage.phases.add("first_token", time.perf_counter() - sent)
                first = False
            yield {**head, **{name: found[name] for name in _ANSWER if name in found}}


async def obtain(passage: Passage, services: Services, processor: Processor | None, reference: Reference) -> Picture:
    """Fetch a picture and look at its header; no pixel is decoded."""
    policy, isolation, owner = services.settings.media, services.isolation, passage.held.owner

    def look(data: bytes, isolated: Header | None) -> Picture:
        header = isolated or (processor.header(data) if processor else decode.header(data, policy))
        plan = processor.plan(height=header.height, width=header.width) if processor else None
        return Picture(reference.param, data, header.height * header.width, isolated is not None, plan)

    with naming(reference.param), passage.phases.span("picture", picture=reference.param):
        if reference.url is None:
            raise RequestError("this model's pictures are sent with their image_url every time, not by uuid alone")
        data = await services.file(reference.url, passage.held)
        isolated = None
        if isolation.takes(data):
            isolated = await services.apart(owner, isolation.header, data, _decoding(processor))
        return await services.errands.run(owner, look, data, isolated)


async def _data_url(passage: Passage, services: Services, processor: Processor | None, picture: Picture) -> str:
    policy, data, plan = services.settings.media, picture.data, picture.plan

    def work(rows: NDArray[np.uint8] | None) -> str:
        file, kind = handed_on(data, policy) if rows is None else (png(rows), "image/png")
        if processor and plan and passage.model.resize:
            smaller = resized(processor, plan, data if rows is None else rows)
            file, kind = (smaller, "image/png") if smaller and len(smaller) < len(file) else (file, kind)
        return f"data:{kind};base64,{pybase64.b64encode_as_string(file)}"

    with naming(picture.param):
        rows = None
        if picture.isolated:
            rows = await services.apart(passage.held.owner, services.isolation.rows, data, _decoding(processor))
        url = await services.threads.run(passage.held.owner, work, rows)
    services.metrics.picture(passage.model.name, pixels=picture.pixels, tokens=plan.tokens if plan else None)
    return url


def _usage(found: ChatObject) -> dict[str, int]:
    """The token counts that an object of an answer tells, if it tells any."""
    usage = found.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    return {name: n for name in ("prompt_tokens", "completion_tokens") if type(n := counts.get(name)) is int and n >= 0}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _decoding(processor: Processor | None) -> decode.Backend:
    return processor.decoding if processor else "torchvision"


def resized(processor: Processor, plan: ImagePlan, data: bytes | NDArray[np.uint8]) -> bytes | None:
    """A picture as a PNG in the size that the model will use; None where that is not less, or would not be the same.

    It is the same where the processor leaves the resized picture at its size, and makes everything else of it as well.
    """
    view = plan.views[0]
    if len(plan.views) > 1 or not isinstance(view, View) or view.pre_pad or view.transpose:
        return None
    height, width = view.resize
    if height * width >= plan.height * plan.width:
        return None
    again = processor.plan(height=height, width=width)
    same = replace(again, height=plan.height, width=plan.width) == plan
    if not same or any(not np.array_equal(again.aux[name], array) for name, array in plan.aux.items()):
        return None
    rows = processor.rgb(data) if isinstance(data, bytes) else data
    return png(kernels.resize(rows, view.resize, view.resample))


def _fields(request: ChatRequest) -> dict[str, Any]:
    """The fields of a request as they came, but for those that are written anew."""
    written = ("model", "messages", "mm_processor_kwargs", "documents")
    names = (name for name in request.__struct_fields__ if name not in written)
    return {name: msgspec.to_builtins(getattr(request, name)) for name in names}


def _message(message: Message, urls: Any) -> dict[str, Any]:
    """A message as it came, with the next of ``urls`` in the place of each picture."""
    found: dict[str, Any] = {name: getattr(message, name) for name in message.__struct_fields__}
    if isinstance(message.content, list):
        found["content"] = [
            _picture(part, next(urls)) if isinstance(part, ImagePart) else msgspec.to_builtins(part)
            for part in message.content
        ]
    return {name: value for name, value in found.items() if value is not None}


def _picture(part: ImagePart, url: str) -> dict[str, Any]:
    detail = part.image_url.detail if isinstance(part.image_url, ImageUrl) else None
    return {"type": "image_url", "image_url": {"url": url, **({"detail": detail} if detail else {})}}
