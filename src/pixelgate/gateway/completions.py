"""POST /v1/chat/completions: one JSON object or a stream of events."""

from __future__ import annotations

import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import msgspec

from pixelgate.gateway import wire
from pixelgate.gateway.budget import Share
from pixelgate.gateway.chat import Chat, answer, prepare
from pixelgate.gateway.endpoint import Endpoint, Exchange
from pixelgate.gateway.replies import as_json, error_object, noted


class ChatCompletions(Endpoint):
    """The route that does the work."""

    path = "/v1/chat/completions"

    def begin(self, exchange: Exchange, body: bytes, encoded: Share) -> Coroutine[Any, Any, int]:
        """Read the body, and stream or complete."""
        chat = self.open_chat(exchange, body, encoded)
        return self._stream(chat, exchange) if chat.request.stream else self._complete(chat, exchange)

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
        """Server-sent events. After the first one an error is an event, and the stream ends without [DONE]."""
        request = await prepare(chat, self.services)
        created = int(time.time())

        async def event(delta: dict[str, Any] | None, finish_reason: str | None = None, **more: Any) -> None:
            chunk = wire.chunk(chat.id, created, chat.model.name, delta, finish_reason)
            await exchange.write(_event({**chunk, **more}))

        async with aclosing(answer(chat, request, self.services)) as pieces:
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


def _counts(chat: Chat) -> tuple[int, int, int]:
    return chat.prompt_tokens, chat.completion_tokens, chat.image_tokens


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
