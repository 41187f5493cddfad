"""POST /v1/chat/completions: one JSON object or a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from pixelgate.engines.chat_engine import ChatObject
from pixelgate.engines.engine import EngineFacts, EngineRequest
from pixelgate.errors import ModelNotFoundError, NotCarriedError
from pixelgate.gateway import passthrough, wire
from pixelgate.gateway.budget import Share
from pixelgate.gateway.chat import Chat, Services, answer, prepare
from pixelgate.gateway.endpoint import Endpoint, Exchange
from pixelgate.gateway.passthrough import Passage, PassThrough
from pixelgate.gateway.replies import as_json, error_object, noted
from pixelgate.gateway.served import ServedModel


class ChatCompletions(Endpoint):
    """The route that does the work. ``passing`` are the models with engines that prepare pictures themselves."""

    path = "/v1/chat/completions"

    def __init__(
        self,
        services: Services,
        models: Mapping[str, ServedModel],
        facts: Mapping[str, EngineFacts],
        passing: Mapping[str, PassThrough],
    ) -> None:
        super().__init__(services, models, facts)
        self._names = dict.fromkeys([*models, *passing])
        self._passing = passing

    def begin(self, exchange: Exchange, body: bytes, encoded: Share) -> Coroutine[Any, Any, int]:
        """Read the body, and stream, complete or hand on."""
        with exchange.phases.measure("parse"):
            parsed = wire.parse_chat(body)
        if parsed.model not in self._names:
            known = ", ".join(self._names)
            raise ModelNotFoundError(f"this gateway does not serve that model; it serves {known}", param="model")
        passing = self._passing.get(parsed.model)
        passage = Passage(exchange.own_id, parsed, passing, exchange.phases, encoded) if passing else None
        if passage and parsed.model not in self.models:
            return self._hand_on(passage, exchange)
        return self._tensors(self.chat(exchange, parsed, encoded), passage, exchange)

    async def _tensors(self, chat: Chat, passage: Passage | None, exchange: Exchange) -> int:
        """Answer through an engine that takes tensors, or, where it cannot take these, through the other kind."""
        try:
            return await (self._stream(chat, exchange) if chat.request.stream else self._complete(chat, exchange))
        except NotCarriedError:
            if passage is None:
                raise
            return await self._hand_on(passage, exchange)

    async def _complete(self, chat: Chat, exchange: Exchange) -> int:
        request = await prepare(chat, self.services)
        async with aclosing(answer(chat, request, self.services)) as pieces:
            text = "".join([piece async for piece in pieces])
        completion = wire.completion(
            chat.id, int(time.time()), chat.model.name, text, chat.finish_reason, wire.usage(*_counts(chat))
        )
        await exchange.reply(as_json(completion))
        return 200

    async def _stream(self, chat: Chat, exchange: Exchange) -> int:
        request = await prepare(chat, self.services)
        async with aclosing(_chunks(chat, request, self.services)) as chunks:
            return await _send_events(exchange, chunks)

    async def _hand_on(self, passage: Passage, exchange: Exchange) -> int:
        """Answer through an engine that prepares pictures itself."""
        call = await passthrough.prepare(passage, self.services)
        async with aclosing(passthrough.answer(passage, call)) as objects:
            if call.stream:
                return await _send_events(exchange, objects)
            await exchange.reply(as_json(await anext(objects)))
            return 200


async def _chunks(chat: Chat, request: EngineRequest, services: Services) -> AsyncGenerator[ChatObject, None]:
    """The chunks of a streamed answer."""
    created = int(time.time())

    def chunk(delta: dict[str, Any] | None, finish_reason: str | None = None) -> dict[str, Any]:
        return wire.chunk(chat.id, created, chat.model.name, delta, finish_reason)

    async with aclosing(answer(chat, request, services)) as pieces:
        yield chunk({"role": "assistant", "content": await anext(pieces, "")})
        async for piece in pieces:
            yield chunk({"content": piece})
    yield chunk({}, chat.finish_reason)
    if chat.request.stream_options and chat.request.stream_options.include_usage:
        yield {**chunk(None), "usage": wire.usage(*_counts(chat))}


async def _send_events(exchange: Exchange, chunks: AsyncGenerator[ChatObject, None]) -> int:
    """Server-sent events. After the first one an error is an event, and the stream ends without [DONE]."""
    # Wait for the first, so that an engine's refusal is still answered with its own status.
    first = await anext(chunks, None)
    await exchange.start_stream()
    try:
        if first is not None:
            await exchange.write(_event(first))
        async for chunk in chunks:
            await exchange.write(_event(chunk))
        await exchange.write(b"data: [DONE]\n\n", last=True)
        return 200
    except Exception as failure:
        error = noted(failure, exchange.id)
        await exchange.write(b"event: error\n" + _event(error_object(error)), last=True)
        return error.status


def _counts(chat: Chat) -> tuple[int, int, int]:
    return chat.prompt_tokens, chat.completion_tokens, chat.image_tokens


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
