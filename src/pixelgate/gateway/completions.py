"""POST /v1/chat/completions: one JSON object or a stream of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from pixelgate.engines.chat_engine import ChatObject
from pixelgate.engines.engine import EngineRequest
from pixelgate.errors import NotCarriedError
from pixelgate.gateway import passthrough, wire
from pixelgate.gateway.answers import Piece
from pixelgate.gateway.chat import Chat, answer, prepare
from pixelgate.gateway.endpoint import Endpoint, Exchange
from pixelgate.gateway.passthrough import Passage
from pixelgate.gateway.replies import as_json, error_object
from pixelgate.gateway.services import Held


class ChatCompletions(Endpoint):
    """The route that does the work."""

    path = "/v1/chat/completions"

    def begin(self, exchange: Exchange, body: bytes, held: Held) -> Coroutine[Any, Any, int]:
        """Read the body, and stream, complete or hand on."""
        with exchange.phases.measure("parse"):
            parsed = wire.parse_chat(body)
        passing = self.passing.get(parsed.model)
        if passing:
            exchange.phases.note(model=parsed.model)
        passage = Passage(exchange.own_id, parsed, passing, exchange.phases, held) if passing else None
        if passage and parsed.model not in self.models:
            return self._hand_on(passage, exchange)
        chat = self.chat(exchange, parsed, held)
        chat.may_be_handed_on = passage is not None
        return self._tensors(chat, passage, exchange)

    async def _tensors(self, chat: Chat, passage: Passage | None, exchange: Exchange) -> int:
        """Answer through an engine that takes tensors, or, where it cannot take these, through the other kind."""
        try:
            return await (self._stream(chat, exchange) if chat.request.stream else self._complete(chat, exchange))
        except NotCarriedError:
            if passage is None:
                raise
        # Not inside: the failure holds the request, of which only its messages are handed on.
        return await self._hand_on(passage, exchange)

    async def _complete(self, chat: Chat, exchange: Exchange) -> int:
        request = await prepare(chat, self.services)
        answers = [_Whole() for _ in range(request.sampling.n)]
        async with aclosing(answer(chat, request)) as pieces:
            async for piece in pieces:
                answers[piece.index].add(piece)
        choices = [
            wire.choice(i, "".join(a.text), a.finish_reason, a.logprobs if chat.request.logprobs else None)
            for i, a in enumerate(answers)
        ]
        completion = wire.completion(chat.id, int(time.time()), chat.model.name, choices, wire.usage(*_counts(chat)))
        await exchange.reply(as_json(completion))
        return 200

    async def _stream(self, chat: Chat, exchange: Exchange) -> int:
        request = await prepare(chat, self.services)
        async with aclosing(_chunks(chat, request)) as chunks:
            return await _send_events(exchange, chunks)

    async def _hand_on(self, passage: Passage, exchange: Exchange) -> int:
        """Answer through an engine that prepares pictures itself."""
        exchange = replace(exchange, passed_on=True)
        call = await passthrough.prepare(passage, self.services)
        async with aclosing(passthrough.answer(passage, call)) as objects:
            if call.stream:
                return await _send_events(exchange, objects)
            await exchange.reply(as_json(await anext(objects)))
            return 200


async def _chunks(chat: Chat, request: EngineRequest) -> AsyncGenerator[ChatObject, None]:
    """The chunks of a streamed answer."""
    created = int(time.time())
    begun: set[int] = set()

    def chunk(*choices: dict[str, Any]) -> dict[str, Any]:
        return wire.chunk(chat.id, created, chat.model.name, list(choices))

    async with aclosing(answer(chat, request)) as pieces:
        async for piece in pieces:
            role = {} if piece.index in begun else {"role": "assistant"}
            begun.add(piece.index)
            if role or piece.text or piece.logprobs:
                content = {**role, "content": piece.text}
                yield chunk(wire.delta(piece.index, content, logprobs=list(piece.logprobs)))
            if piece.finish_reason:
                yield chunk(wire.delta(piece.index, {}, piece.finish_reason))
    if chat.request.stream_options and chat.request.stream_options.include_usage:
        yield {**chunk(), "usage": wire.usage(*_counts(chat))}


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
        error = exchange.failed(failure)
        await exchange.write(b"event: error\n" + _event(error_object(error)), last=True)
        return error.status


@dataclass
class _Whole:
    """An answer that is put together before it is sent."""

    text: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.logprobs += piece.logprobs
        self.finish_reason = piece.finish_reason


def _counts(chat: Chat) -> tuple[int, int, int]:
    return chat.prompt_tokens, chat.completion_tokens, chat.image_tokens


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
