"""One of the answers to a request as it arrives: tokens to text, and log-probabilities in OpenAI's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pixelgate.engines.engine import Delta, Sampling, TokenLogprob
from pixelgate.prompt.stops import StopStrings
from pixelgate.prompt.tokens import Detokenizer, Tokenizer

_LOWEST = -9999.0  # instead of minus infinity, which JSON does not have; vLLM's number


@dataclass(frozen=True)
class Piece:
    """New text of answer ``index``, or none yet. An answer's last piece, and only it, has a ``finish_reason``.

    ``logprobs`` are those of the tokens since the last piece, which may have their text in a later one.
    """

    index: int
    text: str
    logprobs: tuple[dict[str, Any], ...] = ()
    finish_reason: str | None = None


class Answer:
    """Answer ``index``; ``stop_ids`` are the tokens that end it."""

    def __init__(self, index: int, tokenizer: Tokenizer, sampling: Sampling, stop_ids: tuple[int, ...]) -> None:
        # Like vLLM: what ended an answer is no part of it, unless it is asked for.
        stop_ids = () if sampling.include_stop_str_in_output else stop_ids
        self.tokens = 0
        self.finished = False
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, stop_ids=stop_ids)
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)

    def push(self, delta: Delta) -> Piece | None:
        """What ``delta`` adds. Nothing follows a stop string."""
        if self.finished:
            return None
        self.tokens = delta.completion_tokens
        text = self._detokenizer.push(delta.token_ids)
        if delta.finish_reason:
            text += self._detokenizer.flush()
        text, stopped = self._stops.push(text)
        if delta.finish_reason and not stopped:
            text += self._stops.flush()
        reason = "stop" if stopped else delta.finish_reason
        self.finished = reason is not None
        logprobs = tuple(self._logprob(entry) for entry in delta.logprobs)
        return Piece(self._index, text, logprobs, reason) if text or logprobs or reason else None

    def _logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        return {
            **self._one(entry.token_id, entry.logprob),
            "top_logprobs": [self._one(token, logprob) for token, logprob in entry.top],
        }

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": max(logprob, _LOWEST), "bytes": list(self._tokenizer.token_bytes(token))}
