"""Answers out of the messages of smg-grpc-servicer, which have the same fields for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

from pixelgate.engines.engine import Delta, FinishReason, TokenLogprob
from pixelgate.errors import EngineError


def item_limits(label: str) -> dict[str, int]:
    """How many items of each modality a prompt may have, of a label such as ``image=8,video=2``. Raises EngineError."""
    try:
        return {name: int(count) for name, count in (pair.split("=") for pair in label.split(",") if label)}
    except ValueError:
        raise EngineError(f"The engine's limits for pictures cannot be read: {label!r}.") from None


class Answers:
    """The ``n`` answers to one request, put together from an engine's messages, with ``logprobs`` if asked for."""

    def __init__(self, n: int, logprobs: bool) -> None:
        self._counts = [0] * n
        self._ended = [False] * n
        self._logprobs = logprobs

    @property
    def complete(self) -> bool:
        """Whether every answer has its end."""
        return all(self._ended)

    def push(self, response: Any) -> Delta | None:
        """What a message adds to an answer. Raises EngineError for what cannot be understood."""
        kind = response.WhichOneof("response")
        if kind is None or (part := getattr(response, kind)).index >= len(self._ended) or self._ended[part.index]:
            raise EngineError("The engine answered something that cannot be understood.")
        if kind == "complete":
            # After chunks some servicers repeat all ids here and some the last chunk's; new is in both what is beyond.
            return self._end(part, self._new(part.output_ids, part.output_logprobs, self._counts[part.index]))
        if not part.token_ids:
            return None
        ids, logprobs = self._new(part.token_ids, part.output_logprobs, 0)
        self._counts[part.index] += len(ids)
        return Delta(
            ids,
            prompt_tokens=part.prompt_tokens,
            completion_tokens=self._counts[part.index],
            index=part.index,
            logprobs=logprobs,
        )

    def _end(self, complete: Any, new: tuple[tuple[int, ...], tuple[TokenLogprob, ...]]) -> Delta:
        if complete.finish_reason not in get_args(FinishReason):
            raise EngineError("The engine ended its answer with an error.")
        ids, logprobs = new
        index, stop = complete.index, complete.WhichOneof("matched_stop")
        self._ended[index] = True
        return Delta(
            ids,
            cast(FinishReason, complete.finish_reason),
            complete.prompt_tokens,
            self._counts[index] + len(ids),
            getattr(complete, stop) if stop else None,
            index,
            logprobs,
        )

    def _new(self, ids: Sequence[int], told: Any, known: int) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """The tokens after the first ``known``, and their log-probabilities."""
        new = tuple(ids[known:])
        if not self._logprobs or not new:
            return new, ()
        tops = [tuple(zip(top.token_ids, top.values, strict=True)) for top in told.top_logprobs] or [()] * len(ids)
        if not len(ids) == len(told.token_logprobs) == len(tops):
            raise EngineError("The engine left out log-probabilities.")
        entries = zip(new, told.token_logprobs[known:], tops[known:], strict=True)
        return new, tuple(TokenLogprob(*entry) for entry in entries)
