"""vLLM over HTTP: ``POST /inference/v1/generate`` of a stock ``vllm serve --enable-scale-out``."""

from __future__ import annotations

import asyncio
import io
import logging
import time
from base64 import b64encode
from collections import OrderedDict
from collections.abc import AsyncGenerator, Collection, Iterable, Mapping
from contextlib import aclosing
from dataclasses import fields, replace
from typing import Any, cast

import msgspec
from PIL import Image

from pixelgate.engines import sse
from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest, Sampling, misfit
from pixelgate.engines.http_client import (
    FailedInsideError,
    HttpClient,
    base_url,
    chosen,
    decoded,
    read,
)
from pixelgate.engines.render import rendered
from pixelgate.engines.same_model import SameModel
from pixelgate.engines.vllm_http_replies import Answers, Reply, Usage
from pixelgate.engines.vllm_http_wire import encode, refuse_masks
from pixelgate.errors import EngineError, EngineUnavailableError, EngineUnreachableError, PixelgateError

SCHEMES = ("vllm+http", "vllm+https")

_PIXELS = ("uint8", "float32", "bfloat16", "float16")
_SAMPLING = tuple(field.name for field in fields(Sampling))
_INCOMPLETE = "The engine ended its answer before it was complete."
_MODELS, _RENDER, _GENERATE = "/v1/models", "/v1/chat/completions/render", "/inference/v1/generate"
_ENCODE_IN_THREAD_FROM = 1 << 20  # bytes; below, the copy is quicker than the way to a thread
# An engine takes longer than this to start, so one that has answered since is the same one.
_FACTS_LAST = 15.0
_REMEMBERED = 4096  # hashes; what an engine has forgotten of them costs it one short answer

log = logging.getLogger(__name__)


class VllmHttpEngine:
    """One vLLM engine at ``vllm+http(s)://host:port``. Fulfils ``Engine``; timeouts are in seconds.

    ``model`` is the name of the model there, by default that of its only one; ``name`` that of the gateway's model,
    which decides between several. ``headers`` go with every request. ``generate_timeout`` is the deadline of a whole
    answer, ``call_timeout`` of every other call. Raises ConfigError for a malformed URL.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        name: str = "",
        headers: Mapping[str, str] | None = None,
        connect_timeout: float = 5.0,
        call_timeout: float = 10.0,
        generate_timeout: float | None = 600.0,
    ) -> None:
        scheme = SCHEMES[url.startswith(f"{SCHEMES[1]}:")]
        self._url = url
        self._client = HttpClient(
            base_url(url, scheme),
            headers=headers,
            fields=_SAMPLING,
            connect_timeout=connect_timeout,
            call_timeout=call_timeout,
            generate_timeout=generate_timeout,
        )
        self._model, self._name = model, name
        self._facts: EngineFacts | None = None
        self._same = SameModel(url)
        self._answered = 0.0  # when it answered last, and so was the engine of these facts
        self._sent: OrderedDict[str, None] = OrderedDict()  # hashes of pictures that it has seen, oldest first

    @property
    def url(self) -> str:
        """The address as configured; for the operator only, never for a client."""
        return self._url

    async def describe(self) -> EngineFacts:
        """Ask the engine for its facts: of its model, and by a tiny picture how it wants pixels.

        Raises EngineUnavailableError when it is down or not ready, EngineError when it came back with another model
        than it had when it was asked first.
        """
        self._facts = None
        if await self._client.status("/health") != 200:
            raise EngineUnavailableError("The engine is not ready to take requests.")
        card = chosen(self._client.cards(*await self._client.ask(_MODELS)), self._model, self._name)
        dtype = await self._pixel_dtype(card.id)
        if not self._same.known:
            log.info("%s is vLLM %s", self._url, await self._version())
        # /v1/models says nothing of the model's kind
        facts = EngineFacts(card.id, "", cast(Any, dtype), max_context=card.max_model_len, checkpoint=card.root or "")
        self._same.check(facts)
        self._facts, self._answered = facts, time.monotonic()
        return facts

    async def healthy(self) -> bool:
        """Whether the engine takes requests now. Never raises."""
        try:
            return await self._client.status("/health") == 200
        except PixelgateError:
            return False

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Send one request and yield its deltas; closing the iterator aborts the request on the engine.

        Pictures that this engine has seen are left out and taken from its cache. If it has forgotten one, all are sent
        once, to no other engine and only if this one is well. Raises NotCarriedError before anything is sent,
        EngineUnreachableError when the request was certainly not sent, and other errors of ``pixelgate.errors`` when
        it may have been.
        """
        refuse_masks(request)
        facts = await self._ready_for(request)
        hashes = request.images.hashes if request.images else ()
        known = self._sent.keys() & set(hashes)
        started = False
        while True:
            box = [await _encoded(request, facts.model_name, known)]
            try:
                async with aclosing(self._answer(request, box)) as deltas:
                    async for delta in deltas:
                        if not started:
                            started = True
                            self._answered = time.monotonic()
                            self._remember(hashes)
                        yield delta
                return
            except FailedInsideError:
                self._forget(known)
                if started or not known or not await self.healthy():
                    self._facts = None  # whatever answers next may be another engine
                    raise
                known = set()
            except EngineError:
                self._facts = None
                raise

    async def close(self) -> None:
        """Give the connections back; requests under way end with EngineUnavailableError."""
        await self._client.close()

    async def _answer(self, request: EngineRequest, box: list[bytes]) -> AsyncGenerator[Delta, None]:
        async with self._client.post(_GENERATE, box, request.traceparent) as response:
            answers, last, usage = Answers(request), None, None
            if not request.stream:
                reply = self._checked(await read(response))
                deltas = [delta for choice in reply.choices if (delta := answers.push(choice)) is not None]
                if not answers.complete:
                    raise EngineError(_INCOMPLETE)
                for delta in deltas:
                    yield _counted(delta, reply.usage)
                return
            async with aclosing(cast("AsyncGenerator[bytes, None]", sse.payloads(response.content.iter_any()))) as data:
                async for payload in data:
                    if payload == sse.DONE:
                        break
                    reply = self._checked(payload)
                    usage = reply.usage or usage
                    for delta in map(answers.push, reply.choices):
                        if answers.complete:
                            last = delta
                        elif delta is not None:
                            yield delta
            if last is None:
                raise EngineError(_INCOMPLETE)
            yield _counted(last, usage)

    def _checked(self, data: bytes) -> Reply:
        """A reply that is one; errors come in the middle of a stream, too."""
        reply = cast(Reply, decoded(data, Reply))
        if reply.error is not None:
            code = reply.error.code
            raise self._client.failure(code if isinstance(code, int) else 500, data)
        return reply

    async def _ready_for(self, request: EngineRequest) -> EngineFacts:
        """The engine's facts, which ``request`` fits. Only after this can a request have reached the engine."""
        facts = self._facts
        if facts is None or time.monotonic() - self._answered > _FACTS_LAST:
            # It may have been started again with other settings, and one that wants other pixels would accept these
            # and answer nonsense.
            try:
                facts = await self.describe()
            except EngineError as error:
                raise EngineUnreachableError(error.message) from None
        if reason := misfit(request, facts):
            raise EngineUnreachableError(reason)
        return facts

    async def _pixel_dtype(self, model: str) -> str:
        """The dtype of pixels in what the engine itself makes of a picture."""
        content = [{"type": "image_url", "image_url": {"url": _probe()}}, {"type": "text", "text": "."}]
        body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
        status, answer = await self._client.ask(_RENDER, body)
        if status in (403, 404):
            raise EngineError("The engine does not take prepared pictures: it must run with --enable-scale-out.")
        if status != 200:
            error = self._client.unanswered(status, answer)
            if isinstance(error, EngineUnavailableError):
                raise error
            raise EngineError("The engine cannot say how it wants pictures; does its model take any?")
        try:
            arrays = rendered(msgspec.json.decode(answer)).arrays
            dtype = max(arrays.values(), key=lambda array: array.nbytes).dtype.name
        except (LookupError, TypeError, ValueError, msgspec.DecodeError):
            raise EngineError("The engine rendered something else than a picture.") from None
        if dtype not in _PIXELS:
            raise EngineError(f"The engine wants pictures as {dtype}, which is none of {', '.join(_PIXELS)}.")
        return str(dtype)

    async def _version(self) -> str:
        status, body = await self._client.ask("/version")
        return str(decoded(body, dict).get("version")) if status == 200 else "of unknown version"

    def _remember(self, hashes: Iterable[str]) -> None:
        for name in hashes:
            self._sent[name] = None
            self._sent.move_to_end(name)
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)

    def _forget(self, hashes: Iterable[str]) -> None:
        for name in hashes:
            self._sent.pop(name, None)


async def _encoded(request: EngineRequest, model: str, known: Collection[str]) -> bytes:
    if request.images is not None and request.images.tensors[0].nbytes >= _ENCODE_IN_THREAD_FROM:
        return await asyncio.to_thread(encode, request, model, known)
    return encode(request, model, known)


def _counted(delta: Delta, usage: Usage | None) -> Delta:
    """The end of an answer, with the prompt as the engine counts it."""
    return replace(delta, prompt_tokens=usage.prompt_tokens if usage else 0)


def _probe() -> str:
    """A tiny picture as a data URL."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (90, 120, 150)).save(file, "PNG")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
