"""The strict engine behind vLLM's HTTP endpoints, as ``vllm serve --enable-scale-out`` has them.

In a test::

    async with StrictHttpEngine(checkpoint, device_normalize=True) as engine:
        ...  # engine.url is the address; engine.requests holds what arrived, in the form of the gRPC service

As a command: ``python -m pixelgate.testing.strict_http --checkpoint DIR``.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

import msgspec
import pybase64
from aiohttp import web
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.testing.strict_engine import StrictEngine, logprobs, main, set_within
from pixelgate.testing.strict_http_rules import RAW, Item, UnknownItemError, message
from pixelgate.testing.strict_layouts import Refused
from pixelgate.testing.strict_rules import StrictFacts, check

_MAX_BODY = 1 << 30


class StrictHttpEngine(StrictEngine):
    """`StrictEngine` as an HTTP server; its arguments and attributes are the same.

    With ``scale_out=False`` it has no endpoints for prepared pictures, with an ``api_key`` it wants that. ``nulls``
    counts the items that were to be taken from its cache, ``items``.
    """

    def __init__(self, *arguments: Any, scale_out: bool = True, api_key: str = "", **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.scale_out, self.api_key = scale_out, api_key
        self.items: dict[str, Item] = {}
        self.nulls = 0
        self.serving = True
        self._runner: web.AppRunner | None = None
        self._ended = asyncio.Event()

    @property
    def url(self) -> str:
        """The address in pixelgate's notation; the port is known once the server runs."""
        return f"vllm+http://{self._host}:{self._port}"

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guard])
        app.router.add_get("/health", self._healthy)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        """End at once, in the middle of whatever is being answered."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._ended.set()

    async def wait(self) -> None:
        """Wait until the server has ended."""
        await self._ended.wait()

    async def set_serving(self, serving: bool) -> None:
        """What /health answers from now on."""
        self.serving = serving

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, "no key")
        if not self.scale_out and request.method == "POST":
            return _error(403, "start with --enable-scale-out to enable them")
        return await handler(request)  # type: ignore[no-any-return]

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.serving else 503)

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "strict"})

    async def _models(self, request: web.Request) -> web.Response:
        root = str(self.checkpoint) if self.checkpoint else None
        length = self.facts.max_context
        card = {"id": self._name, "object": "model", "root": root, "parent": None, "max_model_len": length}
        return web.json_response({"object": "list", "data": [card]})

    @property
    def _name(self) -> str:
        return self.checkpoint.name if self.checkpoint else self.facts.model_type

    async def _render(self, request: web.Request) -> web.Response:
        """What a picture of the smallest size becomes, whatever was sent."""
        item = pybase64.b64encode_as_string(msgspec.msgpack.encode(_smallest(self.facts)))
        features = {"mm_placeholders": {"image": [{"offset": 0, "length": 1}]}, "kwargs_data": {"image": [item]}}
        return web.json_response({"token_ids": [self.facts.image_token_id], "features": features})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = msgspec.json.decode(await request.read())
        if body.get("model") != self._name:
            return _error(404, f"the model is {self._name}")
        try:
            received, items = message(body, self.items, self.facts)
            self.nulls += _nulls(body)
            self.requests.append(received)
            check(received, self.facts)
            self.identities.remember(received, self.facts.layout)
            name = received.request_id
            if name in self.running:
                raise Refused(f"the request id {name} is in use")
        except Refused as why:
            return _error(400, str(why))
        except UnknownItemError:
            self.nulls += _nulls(body)
            if not body.get("stream"):
                return _error(500, "Internal server error")
            return await _events(request, _one(_object(500, "Internal server error")))
        self.items |= items
        abort = self.running[name] = asyncio.Event()
        try:
            if received.stream:
                return await _events(request, self._answer(received, abort))
            objects = [part async for part in self._answer(received, abort)]
            choices = [choice for part in objects for choice in part["choices"]]
            answers = range(max(received.sampling_params.n, 1))
            wholes = [_whole([choice for choice in choices if choice["index"] == index]) for index in answers]
            return web.json_response({**objects[-1], "choices": wholes})
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            del self.running[name]

    async def _answer(self, request: pb.GenerateRequest, abort: asyncio.Event) -> AsyncIterator[dict[str, Any]]:
        """The same reply for each of the answers asked for, a token of each at a time."""
        sampling, count, finish, matched = request.sampling_params, 0, None, None
        answers = max(sampling.n, 1)
        for token in self.reply_ids:
            ids: list[int] = []
            if await set_within(abort, self.delay):
                finish = "abort"
            else:
                ids, count = [token], count + 1
                if token in sampling.stop_token_ids:
                    finish, matched = "stop", token
                elif sampling.HasField("max_tokens") and count == sampling.max_tokens:
                    finish = "length"
                elif count == len(self.reply_ids):
                    finish = "stop"
            choice = {
                "token_ids": ids,
                "finish_reason": finish,
                "stop_reason": matched,
                "logprobs": _told(ids, sampling),
            }
            for index in range(answers):
                yield {"request_id": request.request_id, "choices": [{"index": index, **choice}], "usage": None}
            if finish:
                break
        tokens, made = len(request.tokenized.input_ids), count * answers
        usage = {"prompt_tokens": tokens, "completion_tokens": made, "total_tokens": tokens + made}
        yield {"request_id": request.request_id, "choices": [], "usage": usage}


def _told(ids: Sequence[int], sampling: pb.SamplingParams) -> dict[str, Any] | None:
    """Log-probabilities in vLLM's form over HTTP, which of alternatives has one also where none is asked for."""
    if (told := logprobs(ids, sampling)) is None:
        return None
    content = [
        {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": [{"token_id": token, "logprob": logprob}]}
        for token, logprob in zip(told.token_ids, told.token_logprobs, strict=True)
    ]
    for entry, top in zip(content, told.top_logprobs, strict=False):
        pairs = zip(top.token_ids, top.values, strict=True)
        entry["top_logprobs"] = [{"token_id": token, "logprob": logprob} for token, logprob in pairs]
    return {"content": content}


def _whole(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The pieces of one answer as one."""
    content = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    ids = [id_ for choice in choices for id_ in choice["token_ids"]]
    return {**choices[-1], "token_ids": ids, "logprobs": {"content": content} if content else None}


def _nulls(body: dict[str, Any]) -> int:
    return sum(text is None for text in body["features"]["kwargs_data"]["image"]) if "features" in body else 0


async def _one(found: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield found


async def _events(request: web.Request, objects: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    async for found in objects:
        await response.write(b"data: " + msgspec.json.encode(found) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    return response


def _smallest(facts: StrictFacts) -> dict[str, Any]:
    """An item of the dtype that the engine wants, with as few pixels as there can be."""
    shape = [side or 1 for side in facts.layout.pixels]
    nbytes = math.prod(shape) * {"uint8": 1, "float32": 4}.get(facts.pixel_dtype, 2)
    data = [facts.pixel_dtype, shape, msgspec.msgpack.Ext(RAW, bytes(nbytes))]
    return {facts.layout.key: {"data": data, "field": ["batched", {"keep_on_cpu": False}]}}


def _object(code: int, words: str) -> dict[str, Any]:
    return {"error": {"message": words, "type": "Error", "param": None, "code": code}}


def _error(code: int, words: str) -> web.Response:
    return web.json_response(_object(code, words), status=code)


if __name__ == "__main__":
    sys.exit(main(StrictHttpEngine, "strict_http"))
