"""Any server with OpenAI's chat API: llama.cpp, Ollama, SGLang, TensorRT-LLM, vLLM, hosted services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, cast

import msgspec

from pixelgate.engines import sse
from pixelgate.engines.chat_engine import ChatCall, ChatObject
from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.http_client import HttpClient, base_url, chosen, decoded, read
from pixelgate.errors import EngineError, EngineUnreachableError, PixelgateError

SCHEMES = ("openai+http", "openai+https")

_ENCODE_IN_THREAD_FROM = 1 << 20
# What a refusal may blame. The gateway has checked their form, so it is their value.
_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "n", "logprobs"),
    *("top_logprobs", "logit_bias", "response_format", "tools", "tool_choice", "messages"),
)


class OpenAIEngine:
    """One server at ``openai+http(s)://host[:port][/path]``, of which the path is ``/v1`` if it has none.

    Fulfils ``ChatEngine``; arguments are those of ``VllmHttpEngine``. A server that lists no models is asked for
    ``model``, or ``name``. Raises ConfigError for a malformed URL.
    """

    schemes: ClassVar[tuple[str, str]] = SCHEMES
    path: ClassVar[str] = "/v1"
    """The path of a URL that has none."""
    api: ClassVar[str] = ""
    """What lies between a URL's path and the API's own."""

    def __init__(self, url: str, *, model: str = "", name: str = "", **client: Any) -> None:
        scheme = self.schemes[url.startswith(f"{self.schemes[1]}:")]
        self._url = url
        self._client = HttpClient(base_url(url, scheme, self.path), fields=_FIELDS, **client)
        self._wanted, self._name = model, name
        self._model = ""

    @property
    def url(self) -> str:
        """The address as configured; for the operator only, never for a client."""
        return self._url

    async def describe(self) -> EngineFacts:
        """Ask the server for its models. Raises EngineUnavailableError when it is down."""
        status, body = await self._client.ask(f"{self.api}/models")
        context = None
        if status in (404, 405) and (self._wanted or self._name):
            self._model = self._wanted or self._name
        else:
            card = chosen(self._client.cards(status, body), self._wanted, self._name)
            self._model, context = card.id, card.max_model_len
        # of its own it takes pictures with 8 bits a sample, in files
        return EngineFacts(self._model, "", "uint8", max_context=context)

    async def healthy(self) -> bool:
        """Whether the server answers. Never raises."""
        try:
            return await self._client.status(f"{self.api}/models") in (200, 404, 405)
        except PixelgateError:
            return False

    async def generate(self, request: ChatCall) -> AsyncGenerator[ChatObject, None]:
        """Send one request and yield its answer: one object, or its chunks. Closing the iterator aborts the request.

        Raises EngineUnreachableError when the request was certainly not sent, and other errors of
        ``pixelgate.errors`` when it may have been.
        """
        if not self._model:
            try:
                await self.describe()
            except EngineError as error:
                raise EngineUnreachableError(error.message) from None
        box = [await self._encoded(request)]
        async with self._client.post(f"{self.api}/chat/completions", box, request.traceparent) as response:
            if not request.stream:
                yield self._checked(await read(response))
                return
            over = False
            async with aclosing(cast("AsyncGenerator[bytes, None]", sse.payloads(response.content.iter_any()))) as data:
                async for payload in data:
                    if payload == sse.DONE:
                        over = True
                        break
                    yield self._checked(payload)
            if not over:
                raise EngineError("The engine ended its answer before it was complete.")

    async def close(self) -> None:
        """Give the connections back; requests under way end with EngineUnavailableError."""
        await self._client.close()

    async def _encoded(self, request: ChatCall) -> bytes:
        body = self.written({"model": self._model, **request.body})
        if request.nbytes >= _ENCODE_IN_THREAD_FROM:
            return await asyncio.to_thread(msgspec.json.encode, body)
        return msgspec.json.encode(body)

    def written(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's body as the server wants it. Raises NotCarriedError for what it would pass over in silence."""
        return body

    def _checked(self, data: bytes) -> ChatObject:
        """An object of the answer that is one; errors come in the middle of a stream, too."""
        found = cast("dict[str, Any]", decoded(data, dict))
        if error := found.get("error"):
            code = error.get("code") if isinstance(error, dict) else None
            raise self._client.failure(code if isinstance(code, int) else 500, data)
        choices = found.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise EngineError("The engine answered with something that is no chat completion.")
        return found
