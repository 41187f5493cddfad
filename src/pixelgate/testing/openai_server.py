"""A server with OpenAI's chat API for tests: it answers a text, and refuses pictures that it would have to fetch.

In a test::

    async with OpenAIServer(reply="Hello.") as server:
        ...  # server.url is the address; server.requests holds what arrived
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import msgspec
import pybase64
from aiohttp import web

_MAX_BODY = 1 << 28


class OpenAIServer:
    """An HTTP server on ``host``:``port`` (0: any free one) that serves ``models``.

    The answer is ``reply``, a word at a time with ``delay`` seconds before each. With an ``api_key`` it wants that;
    with ``lists=False`` it does not list its models. The last ``keep`` bodies are in ``requests``, the pictures of the
    last in ``pictures``; ``cancelled`` counts the requests whose client hung up.
    """

    def __init__(
        self,
        models: Sequence[str] = ("test",),
        *,
        reply: str = "The picture arrived as a file.",
        delay: float = 0.0,
        api_key: str = "",
        lists: bool = True,
        max_model_len: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        keep: int = 8,
    ) -> None:
        self.models, self.reply, self.delay = tuple(models), reply, delay
        self.api_key, self.lists, self.max_model_len = api_key, lists, max_model_len
        self.requests: deque[dict[str, Any]] = deque(maxlen=keep)
        self.pictures: list[bytes] = []
        self.cancelled = 0
        self._host, self._port = host, port
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The address in pixelgate's notation; the port is known once the server runs."""
        return f"openai+http://{self._host}:{self._port}/v1"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._add_routes(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]
        return self

    def _add_routes(self, app: web.Application) -> None:
        """Further routes of a kind of server."""

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End at once, in the middle of whatever is being answered."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if not self.lists:
            return _error(404, "nothing is here")
        cards = [{"id": name, "object": "model", "max_model_len": self.max_model_len} for name in self.models]
        return web.json_response({"object": "list", "data": cards})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, "the key is wrong")
        body = msgspec.json.decode(await request.read())
        self.requests.append(body)
        if not self._takes(body):
            return _error(400, "this is not for me")
        if body["model"] not in self.models:
            return _error(404, f"there is no {body['model']}")
        try:
            self.pictures = _pictures(body["messages"])
        except ValueError as why:
            return _error(400, str(why))
        try:
            return await (self._stream(request, body) if body.get("stream") else self._whole(body))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    def _takes(self, body: dict[str, Any]) -> bool:
        """Whether all of a request means something to this kind of server."""
        return True

    async def _whole(self, body: dict[str, Any]) -> web.Response:
        text = "".join([word async for word in self._words()])
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        answer = {"id": "theirs", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response({**answer, "choices": [choice], "usage": self._usage(), "private": "words"})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(choices: list[dict[str, Any]], **more: Any) -> None:
            chunk = {"id": "theirs", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
            await response.write(b"data: " + msgspec.json.encode({**chunk, "choices": choices, **more}) + b"\n\n")

        async for word in self._words():
            await send([{"index": 0, "delta": {"content": word}, "finish_reason": None}])
        await send([{"index": 0, "delta": {}, "finish_reason": "stop"}])
        if (body.get("stream_options") or {}).get("include_usage"):
            await send([], usage=self._usage())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _words(self) -> AsyncIterator[str]:
        for word in self.reply.split():
            await asyncio.sleep(self.delay)
            yield f"{word} "

    def _usage(self) -> dict[str, int]:
        words = len(self.reply.split())
        return {"prompt_tokens": 7, "completion_tokens": words, "total_tokens": 7 + words}


def _pictures(messages: list[dict[str, Any]]) -> list[bytes]:
    """The files of a request's pictures. Raises ValueError for anything but text and data URLs."""
    pictures = []
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] == "text":
                continue
            header, _, data = part["image_url"]["url"].partition(",") if part["type"] == "image_url" else ("", "", "")
            if not header.startswith("data:image/") or not header.endswith(";base64"):
                raise ValueError("this is no picture in a data URL")
            pictures.append(pybase64.b64decode(data, validate=True))
    return pictures


def _error(status: int, words: str) -> web.Response:
    error = {"message": words, "type": "Error", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
