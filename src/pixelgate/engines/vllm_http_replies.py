"""What the objects mean in which a vLLM answers over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, get_args

import msgspec

from pixelgate.engines.engine import Delta, EngineRequest, FinishReason, TokenLogprob
from pixelgate.engines.http_client import ErrorBody
from pixelgate.errors import EngineError

_TOKEN = "token_id:"
_GARBLED = "The engine answered with something that cannot be understood."


class _Top(msgspec.Struct):
    """A token and its log-probability; before vLLM 0.32 the id is in a text of OpenAI's form: "token_id:7"."""

    token_id: int | None = None
    token: str = ""
    logprob: float = -9999.0

    @property
    def id(self) -> int:
        """The token's id. Raises EngineError where neither form has it."""
        if self.token_id is not None:
            return self.token_id
        digits = self.token.removeprefix(_TOKEN)
        if digits == self.token or not digits.isdecimal():
            raise EngineError(_GARBLED)
        return int(digits)


class _Told(_Top):
    top_logprobs: list[_Top] = []


class _Logprobs(msgspec.Struct):
    content: list[_Told] = []


class Choice(msgspec.Struct):
    """What an object adds to one of the answers."""

    index: int = 0
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class Usage(msgspec.Struct):
    """How the engine counts."""

    prompt_tokens: int = 0


class Reply(msgspec.Struct):
    """A whole reply, or an event of a streamed one."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


class Answers:
    """The answers to one request, put together from an engine's choices."""

    def __init__(self, request: EngineRequest) -> None:
        self._prompt_tokens = len(request.token_ids)
        self._logprobs = request.sampling.logprobs
        self._counts = [0] * request.sampling.n
        self._ended = [False] * request.sampling.n

    @property
    def complete(self) -> bool:
        """Whether every answer has its end."""
        return all(self._ended)

    def push(self, choice: Choice) -> Delta | None:
        """What a choice adds to its answer. Raises EngineError for what cannot be understood."""
        index, reason, ids = choice.index, choice.finish_reason, tuple(choice.token_ids or ())
        if not 0 <= index < len(self._ended) or self._ended[index]:
            raise EngineError(_GARBLED)
        if reason not in (None, *get_args(FinishReason)):
            raise EngineError("The engine ended its answer with an error.")
        self._ended[index] = reason is not None
        self._counts[index] += len(ids)
        if not ids and reason is None:
            return None
        return Delta(
            ids,
            cast(FinishReason | None, reason),
            self._prompt_tokens,
            self._counts[index],
            choice.stop_reason,
            index,
            self._told(ids, choice.logprobs),
        )

    def _told(self, ids: tuple[int, ...], logprobs: _Logprobs | None) -> tuple[TokenLogprob, ...]:
        if self._logprobs is None or not ids:
            return ()
        content = logprobs.content if logprobs else []
        if len(content) != len(ids):
            raise EngineError("The engine left out log-probabilities.")
        # of none that are asked for it tells the chosen token itself
        most = self._logprobs
        return tuple(TokenLogprob(told.id, told.logprob, _alternatives(told.top_logprobs[:most])) for told in content)


def _alternatives(tops: Sequence[_Top]) -> tuple[tuple[int, float], ...]:
    found = tuple((top.id, top.logprob) for top in tops)
    if len(dict(found)) < len(found):  # the first vLLMs with this endpoint called each by the chosen token's id
        raise EngineError("The engine's vLLM is too old for top_logprobs above 1.")
    return found
