"""SGLang's own HTTP: it renders, tokenises and prepares pictures itself, rightly for every model that it serves."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec

from pixelgate.engines.chat_engine import ChatCall, ChatObject
from pixelgate.engines.constraints import any_of
from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.http_client import decoded
from pixelgate.engines.openai_http import OpenAIEngine
from pixelgate.engines.same_model import SameModel
from pixelgate.errors import (
    EngineError,
    EngineUnavailableError,
    EngineUnreachableError,
    NotCarriedError,
    PixelgateError,
)

SCHEMES = ("sglang+http", "sglang+https")

_FACTS_LAST = 15.0  # seconds without an answer, after which another engine may have the address
# What SGLang ignores, with the values that change nothing.
_PASSED_OVER: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "logprob_token_ids", "prompt_logprobs"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "thinking_token_budget", "mm_processor_kwargs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    model_type: str | None = None


class SglangHttpEngine(OpenAIEngine):
    """One SGLang at ``sglang+http(s)://host[:port][/path]``. Fulfils ``ChatEngine``; arguments are its parent's."""

    schemes = SCHEMES
    path = ""
    api = "/v1"

    def __init__(self, url: str, **arguments: Any) -> None:
        super().__init__(url, **arguments)
        self._same = SameModel(url)
        self._answered = float("-inf")  # when it answered last, and so was the engine that was asked for its facts

    async def describe(self) -> EngineFacts:
        """Ask the engine for its facts.

        Raises EngineUnavailableError when it is down or not ready, EngineError when it came back with another model
        than it had when it was asked first.
        """
        if await self._client.status("/health") != 200:
            raise EngineUnavailableError("The engine is not ready to take requests.")
        facts = await super().describe()
        status, body = await self._client.ask("/model_info")
        if status != 200:
            raise self._client.unanswered(status, body)
        info = decoded(body, _ModelInfo)
        facts = replace(facts, model_type=info.model_type or "", checkpoint=info.model_path)
        self._same.check(facts)
        self._answered = time.monotonic()
        return facts

    async def healthy(self) -> bool:
        """Whether the engine takes requests now: it makes a token if it is idle. Never raises."""
        try:
            return await self._client.status("/health") == 200
        except PixelgateError:
            return False

    async def generate(self, request: ChatCall) -> AsyncGenerator[ChatObject, None]:
        """Send one request and yield its answer: one object, or its chunks. Closing the iterator aborts the request.

        Raises NotCarriedError before anything is sent, EngineUnreachableError when the request was certainly not sent,
        and other errors of ``pixelgate.errors`` when it may have been.
        """
        if time.monotonic() - self._answered > _FACTS_LAST:
            try:
                await self.describe()
            except EngineError as error:
                raise EngineUnreachableError(error.message) from None
        try:
            async with aclosing(super().generate(request)) as objects:
                async for found in objects:
                    self._answered = time.monotonic()
                    yield found
        except EngineError:
            self._answered = float("-inf")
            raise

    def written(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request's body in SGLang's words. Raises NotCarriedError for what it would pass over in silence."""
        own = dict(body)
        for name, harmless in _PASSED_OVER.items():
            if own.pop(name, None) not in (None, {}, *harmless):
                raise NotCarriedError(f"SGLang has no way to do what {name} asks for.", param=name)
        if own.pop("include_stop_str_in_output", None):
            own["no_stop_trim"] = True
        constrained = _constrained(own.pop("structured_outputs", None) or {})
        return own | constrained


def _constrained(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's structured_outputs as SGLang has them."""
    match [(name, value) for name, value in outputs.items() if value is not None and value is not False]:
        case []:
            return {}
        case [("regex", str(regex))]:
            return {"regex": regex}
        case [("grammar", str(grammar))]:
            return {"ebnf": grammar}
        case [("choice", [*choices])] if choices and all(isinstance(choice, str) for choice in choices):
            return {"regex": any_of(choices)}
        case [("json_object", True)]:
            return {"response_format": {"type": "json_object"}}
        case [("json", dict(schema))]:
            return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}
    raise NotCarriedError(
        "SGLang cannot do what structured_outputs asks for; "
        "it takes one of json (an object), json_object, regex, choice and grammar.",
        param="structured_outputs",
    )
