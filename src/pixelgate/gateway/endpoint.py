"""A request as HTTP sees it: a body in, one reply or a stream of events out, and a client that may hang up."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from pixelgate.budget import Share
from pixelgate.engines.engine import EngineFacts
from pixelgate.errors import ClosingError, ModelNotFoundError, PixelgateError, SlowRequestError, TooLargeError
from pixelgate.fairness import Owner
from pixelgate.gateway import logs, wire
from pixelgate.gateway.chat import Chat, configured
from pixelgate.gateway.messages import check_texts
from pixelgate.gateway.metrics import Metrics
from pixelgate.gateway.passthrough import PassThrough
from pixelgate.gateway.phases import Phases
from pixelgate.gateway.replies import error_response, noted
from pixelgate.gateway.served import ServedModel
from pixelgate.gateway.services import Held, Services
from pixelgate.gateway.settings import GatewaySettings

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_CLIENT_GONE = 499  # nginx's code for a client that did not wait; seen in metrics only
_PIECE = 256 << 10
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True)
class Exchange:
    """A request, and the way back to its client. ``id`` is the client's name for it in headers and in the log.

    Engines get ``own_id``: two requests may come with the same name, and the end of one would abort both.
    """

    request: Request
    send: Send
    id: str
    own_id: str
    phases: Phases
    metrics: Metrics
    passed_on: bool = False
    """Whether it goes to an engine that prepares pictures itself."""

    @property
    def owner(self) -> Owner:
        """Whose it is: the client by the digest of its key, or its address."""
        return Owner(self.request.state.client, self.own_id)

    @property
    def headers(self) -> dict[str, str]:
        """What the head of every reply has."""
        timing = self.phases.server_timing()
        return {
            "x-request-id": self.id,
            **({"server-timing": timing} if timing else {}),
            **({"x-pixelgate-preprocessing": "engine"} if self.passed_on else {}),
        }

    async def reply(self, response: Response) -> None:
        """Send a whole response, piece by piece, so that what the client does not read yet stays ours to count."""
        response.headers.update(self.headers)
        await self.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        body = memoryview(response.body)
        for start in range(0, len(body), _PIECE):
            await self.write(bytes(body[start : start + _PIECE]))
        await self.write(b"", last=True)

    async def start_stream(self) -> None:
        """Send the head of a stream of events."""
        head = Headers({**_STREAM_HEADERS, **self.headers}).raw
        await self.send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece of the stream."""
        start = time.perf_counter()
        try:
            await self.send({"type": "http.response.body", "body": data, "more_body": not last})
        finally:
            self.phases.count("send", time.perf_counter() - start)

    def failed(self, failure: Exception) -> PixelgateError:
        """The error of ours that the client is told of ``failure``, logged and counted."""
        error = noted(failure)
        self.metrics.refused(error)
        self.phases.note(error=error.code or error.type)
        return error


class Endpoint(ABC):
    """A route with a model in its request's body, as an ASGI application.

    ``models`` have engines that take tensors, ``passing`` those that prepare pictures and prompts themselves.

    One coroutine has a request from its first byte to its last and ends when the client hangs up; so the engine's
    request is aborted and the request is counted whatever happens, be it between the first text and its sending.
    """

    path: ClassVar[str]

    def __init__(
        self, services: Services, models: Mapping[str, ServedModel], passing: Mapping[str, PassThrough]
    ) -> None:
        self.services = services
        self.models = models
        self.passing = passing

    @abstractmethod
    def begin(self, exchange: Exchange, body: bytes, held: Held) -> Coroutine[Any, Any, int]:
        """Read the body, and return the work of answering, whose result is the status under which to count it."""

    def open_chat(self, exchange: Exchange, body: bytes, held: Held) -> Chat:
        """A chat request from its body. Raises RequestError."""
        with exchange.phases.measure("parse"):
            parsed = wire.parse_chat(body)
        return self.chat(exchange, parsed, held)

    def chat(self, exchange: Exchange, parsed: wire.ChatRequest, held: Held) -> Chat:
        """A chat request for engines that take tensors. Raises RequestError."""
        model, facts = self.model(exchange, parsed.model)
        wire.refuse_unsupported(parsed)
        check_texts(parsed, self.services.settings.max_text_characters)
        processor = configured(model.processor, parsed, facts, trusted=self.services.settings.trust_request_mm_kwargs)
        return Chat(exchange.own_id, parsed, model, facts, exchange.phases, processor, held)

    def model(self, exchange: Exchange, name: str) -> tuple[ServedModel, EngineFacts]:
        """The model that clients call ``name``, with engines that take tensors. Raises ModelNotFoundError."""
        if name not in self.models:
            known = ", ".join(dict.fromkeys([*self.models, *self.passing]))
            words = f"this gateway does not serve that model; it serves {known}"
            if name in self.passing:
                here = f"; this path serves {', '.join(self.models)}" if self.models else ""
                words = f"the engines of {name} make its prompts themselves, so its tokens are not known here{here}"
            raise ModelNotFoundError(words, param="model")
        exchange.phases.note(model=name)
        model = self.models[name]
        return model, model.facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        own_id = f"chatcmpl-{uuid.uuid4().hex}"
        sent_id = request.headers.get("x-request-id", "")
        metrics = self.services.metrics
        shown_id = sent_id if _REQUEST_ID.fullmatch(sent_id) else own_id
        logs.REQUEST_ID.set(shown_id)  # of this request's task, which ends with it
        tracing = self.services.tracing
        trace = tracing.request(request.method, self.path, request.headers, shown_id) if tracing else None
        phases = Phases(metrics, trace)
        status, begun = 500, False

        async def sending(message: Message) -> None:
            nonlocal begun
            await send(message)  # which waits, if at all, before it sends
            begun = True

        exchange = Exchange(request, sending, shown_id, own_id, phases, metrics)
        metrics.in_flight.inc()
        try:
            with self.services.activity.request():
                status = await self._respond(exchange)
        except ClientDisconnect:
            status = _CLIENT_GONE
            log.info("the client hung up")
        except asyncio.CancelledError:  # only the server does that, when it ends and this has taken too long
            status = ClosingError.status
            closing = ClosingError("the gateway is closing and could not finish this request")
            if begun:
                exchange.failed(closing)
            else:
                await _refuse(exchange, closing)
        finally:
            metrics.in_flight.dec()
            phases.finish(self.path, status)
            if self.services.settings.log_requests:
                logs.access(self.path, status, request.state.client, phases.facts, phases.seconds)

    async def _respond(self, exchange: Exchange) -> int:
        """Answer, and return the status under which the request counts."""
        try:
            with self.services.holding(exchange.owner, exchange.phases) as held:
                work = self.begin(exchange, await _body(exchange.request, self.services.settings, held.encoded), held)
                return await _unless_gone(exchange.request.receive, work)
        except ClientDisconnect:
            raise
        except Exception as failure:  # of whatever kind: the client gets an error object, and the log the reason
            return await _refuse(exchange, failure)


async def _refuse(exchange: Exchange, failure: Exception) -> int:
    """Answer with an error, whose status is returned."""
    error = exchange.failed(failure)
    await exchange.reply(error_response(error))
    return error.status


async def _body(request: Request, settings: GatewaySettings, encoded: Share) -> bytes:
    """The request body, never more than the limit of it in memory, within the time there is for it."""
    limit = settings.max_body_bytes
    too_large = TooLargeError(f"the request body is larger than the limit of {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                await encoded.take(len(chunk))
                chunks.append(chunk)
    except TimeoutError:
        raise SlowRequestError(f"the request body did not arrive within {settings.body_timeout:g} seconds") from None
    return b"".join(chunks)


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Do ``work``. When the client hangs up it is cancelled, and ClientDisconnect is raised."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_hang_up(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for left in (task, gone):
            left.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
