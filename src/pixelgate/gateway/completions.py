"""POST /v1/chat/completions as HTTP sees it: a body in, one JSON object or a stream of events out."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pixelgate.engines.engine import EngineFacts
from pixelgate.errors import ModelNotFoundError, SlowRequestError, TooLargeError
from pixelgate.gateway import wire
from pixelgate.gateway.budget import Share
from pixelgate.gateway.chat import Chat, Services, answer, configured, prepare
from pixelgate.gateway.metrics import Phases
from pixelgate.gateway.replies import as_json, error_object, error_response, noted
from pixelgate.gateway.served import ServedModel
from pixelgate.gateway.settings import GatewaySettings

PATH = "/v1/chat/completions"

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_CLIENT_GONE = 499  # nginx's code for a client that did not wait; seen in metrics only
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


@dataclass(frozen=True)
class Exchange:
    """A request, and the way back to its client. ``id`` is the client's name for it in headers and in the log."""

    request: Request
    send: Send
    id: str
    phases: Phases

    @property
    def headers(self) -> dict[str, str]:
        """What the head of every reply has."""
        timing = self.phases.server_timing()
        return {"x-request-id": self.id, **({"server-timing": timing} if timing else {})}

    async def reply(self, response: Response) -> None:
        """Send a whole response."""
        response.headers.update(self.headers)
        await response(self.request.scope, self.request.receive, self.send)

    async def start_stream(self) -> None:
        """Send the head of a stream of events."""
        head = Headers({**_STREAM_HEADERS, **self.headers}).raw
        await self.send({"type": "http.response.start", "status": 200, "headers": head})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a piece of the stream."""
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})


class ChatCompletions:
    """The route, as an ASGI application.

    One coroutine has a request from its first byte to its last and ends when the client hangs up; so the engine's
    request is aborted and the request is counted whatever happens, be it between the first text and its sending.
    """

    def __init__(self, services: Services, models: Mapping[str, ServedModel], facts: Mapping[str, EngineFacts]) -> None:
        self._services = services
        self._models = models
        self._facts = facts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive)
        # Engines get an id of our own: two requests may come with the same one, and the end of one would abort both.
        own_id = f"chatcmpl-{uuid.uuid4().hex}"
        sent_id = request.headers.get("x-request-id", "")
        metrics = self._services.metrics
        exchange = Exchange(request, send, sent_id if _REQUEST_ID.fullmatch(sent_id) else own_id, Phases(metrics))
        status = 500
        metrics.in_flight.inc()
        try:
            status = await self._respond(exchange, own_id)
        except ClientDisconnect:
            status = _CLIENT_GONE
            log.info("%s: the client hung up", exchange.id)
        finally:
            metrics.in_flight.dec()
            metrics.requests.labels(PATH, status).inc()
            exchange.phases.finish()

    async def _respond(self, exchange: Exchange, own_id: str) -> int:
        """Answer, and return the status under which the request counts."""
        try:
            with self._services.encoded.share() as encoded:
                chat = await self._open_chat(exchange, own_id, encoded)
                work = self._stream(chat, exchange) if chat.request.stream else self._complete(chat, exchange)
                return await _unless_gone(exchange.request.receive, work)
        except ClientDisconnect:
            raise
        except Exception as failure:  # of whatever kind: the client gets an error object, and the log the reason
            error = noted(failure, exchange.id)
            await exchange.reply(error_response(error))
            return error.status

    async def _open_chat(self, exchange: Exchange, own_id: str, encoded: Share) -> Chat:
        body = await _body(exchange.request, self._services.settings, encoded)
        with exchange.phases.measure("parse"):
            parsed = wire.parse_chat(body)
        model = self._models.get(parsed.model)
        if model is None:
            known = ", ".join(self._models)
            raise ModelNotFoundError(f"this gateway does not serve that model; it serves {known}", param="model")
        facts = self._facts[model.name]
        trusted = self._services.settings.trust_request_mm_kwargs
        processor = configured(model.processor, parsed, facts, trusted=trusted)
        return Chat(own_id, parsed, model, facts, exchange.phases, processor, encoded, exchange.request.state.client)

    async def _complete(self, chat: Chat, exchange: Exchange) -> int:
        request = await prepare(chat, self._services)
        async with aclosing(answer(chat, request, self._services)) as pieces:
            text = "".join([piece async for piece in pieces])
        completion = wire.completion(
            chat.id, int(time.time()), chat.model.name, text, chat.finish_reason, wire.usage(*_counts(chat))
        )
        await exchange.reply(as_json(completion))
        return 200

    async def _stream(self, chat: Chat, exchange: Exchange) -> int:
        """Server-sent events. After the first one an error is an event, and the stream ends without [DONE]."""
        request = await prepare(chat, self._services)
        created = int(time.time())

        async def event(delta: dict[str, Any] | None, finish_reason: str | None = None, **more: Any) -> None:
            chunk = wire.chunk(chat.id, created, chat.model.name, delta, finish_reason)
            await exchange.write(_event({**chunk, **more}))

        async with aclosing(answer(chat, request, self._services)) as pieces:
            # Wait for the first text, so that an engine's refusal is still answered with its own status.
            first = await anext(pieces, "")
            await exchange.start_stream()
            try:
                await event({"role": "assistant", "content": first})
                async for piece in pieces:
                    await event({"content": piece})
                await event({}, chat.finish_reason)
                if chat.request.stream_options and chat.request.stream_options.include_usage:
                    await event(None, usage=wire.usage(*_counts(chat)))
                await exchange.write(b"data: [DONE]\n\n", last=True)
                return 200
            except Exception as failure:
                error = noted(failure, exchange.id)
                await exchange.write(b"event: error\n" + _event(error_object(error)), last=True)
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


def _counts(chat: Chat) -> tuple[int, int, int]:
    return chat.prompt_tokens, chat.completion_tokens, chat.image_tokens


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
