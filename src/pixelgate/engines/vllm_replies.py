"""What a vLLM's messages mean: what it says of itself, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.engine import Delta, EngineFacts, FinishReason, TokenLogprob
from pixelgate.engines.vllm_wire import MAX_TENSOR_BYTES
from pixelgate.errors import EngineError

_FLOATS = ("float32", "bfloat16", "float16")


def told(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> EngineFacts:
    """An engine's facts. Raises EngineError for what cannot be understood."""
    dtype = (server.multimodal_encoder_dtype or server.model_dtype).removeprefix("torch.")
    if server.mm_device_do_normalize:
        dtype = "uint8"
    elif dtype not in _FLOATS:
        raise EngineError(f"The engine wants pictures as {dtype or 'nothing'}, which is none of {', '.join(_FLOATS)}.")
    return EngineFacts(
        model_name=model.served_model_name,
        model_type=model.model_type,
        pixel_dtype=cast(Any, dtype),
        max_context=model.max_context_length or None,
        max_images=_max_images(server.mm_item_limits),
        max_embeddings_per_image=server.mm_encoder_budget or None,
        max_tensor_bytes=MAX_TENSOR_BYTES,
        takes_mixed_shapes=False,
        eos_token_ids=tuple(model.eos_token_ids),
        checkpoint=model.model_path,
        vocab_size=model.vocab_size or None,
        shared_memory=server.shm_namespace_id,
    )


def _max_images(limits: str) -> int | None:
    """Images per prompt of a label such as ``image=8,video=2``; a modality that it leaves out has a limit of 0."""
    if not limits:
        return None
    try:
        return int(dict(pair.split("=") for pair in limits.split(",")).get("image", 0))
    except ValueError:
        raise EngineError(f"The engine's limits for pictures cannot be read: {limits!r}.") from None


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

    def push(self, response: pb.GenerateResponse) -> Delta | None:
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

    def _end(self, complete: pb.GenerateComplete, new: tuple[tuple[int, ...], tuple[TokenLogprob, ...]]) -> Delta:
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

    def _new(
        self, ids: Sequence[int], told: pb.OutputLogProbs, known: int
    ) -> tuple[tuple[int, ...], tuple[TokenLogprob, ...]]:
        """The tokens after the first ``known``, and their log-probabilities."""
        new = tuple(ids[known:])
        if not self._logprobs or not new:
            return new, ()
        tops = told.top_logprobs or [pb.TopLogProbs()] * len(ids)
        if not len(ids) == len(told.token_logprobs) == len(tops):
            raise EngineError("The engine left out log-probabilities.")
        entries = zip(new, told.token_logprobs[known:], tops[known:], strict=True)
        return new, tuple(
            TokenLogprob(token, logprob, tuple(zip(top.token_ids, top.values, strict=True)))
            for token, logprob, top in entries
        )
