"""A request as the body of vLLM's ``POST /inference/v1/generate``: JSON, with each picture as base64 of msgpack.

Pixels are encoded to base64 once and copied once, into the body.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import msgspec
import pybase64

from pixelgate.engines.engine import EngineRequest, Images, Sampling
from pixelgate.engines.vllm_item import parted
from pixelgate.engines.vllm_sampling import refuse_impossible, top_p
from pixelgate.errors import NotCarriedError, TooLargeError

MAX_PICTURE_BYTES = (1 << 32) - 1  # msgpack's own limit

_END = b"]}}}"
_OPTIONAL_SAMPLING = (
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "seed",
    "logprobs",
)
_STRUCTURED = {"json_schema": "json"}  # where vLLM's name of a constraint is another than ours


def refuse_masks(request: EngineRequest) -> None:
    """Raise NotCarriedError for pictures with tokens among their own that get no embedding: it would end the engine."""
    images = request.images
    for span in images.spans if images else ():
        inside = request.token_ids[span.offset : span.offset + span.length]
        if inside.count(images.placeholder_id) != span.length:  # type: ignore[union-attr]
            raise NotCarriedError(
                "Pictures of this model have line or tile tokens among their own, and the protocol of its engine, "
                "vLLM over HTTP, cannot tell them apart.",
                param="messages",
            )


def encode(request: EngineRequest, model: str, known: Collection[str] = ()) -> bytes:
    """The body of ``request``; the engine itself has the pictures whose hashes are in ``known``.

    Raises RequestError for a sampling value that the protocol cannot carry, TooLargeError for a picture above 4 GiB.
    """
    body: dict[str, Any] = {
        "model": model,
        "request_id": request.request_id,
        "token_ids": request.token_ids,
        "sampling_params": _sampling(request.sampling),
        "stream": request.stream,
    }
    if request.stream:
        body["stream_options"] = {"include_usage": True}
    images = request.images
    if images is None:
        return msgspec.json.encode(body)
    body["features"] = {
        "mm_hashes": {"image": images.hashes},
        "mm_placeholders": {"image": [{"offset": span.offset, "length": span.length} for span in images.spans]},
        "kwargs_data": {"image": []},
    }
    head = msgspec.json.encode(body).removesuffix(_END)
    return b"".join([head, *_items(images, known), _END])


def _items(images: Images, known: Collection[str]) -> Iterator[bytes]:
    for number, name in enumerate(images.hashes):
        if number:
            yield b","
        if name in known:
            yield b"null"
        else:
            yield b'"'
            yield from _item(images, number)
            yield b'"'


def _item(images: Images, number: int) -> Iterator[bytes]:
    """A picture's tensors in base64, by pieces."""
    if images.tensors[0].parts[number].nbytes > MAX_PICTURE_BYTES:
        raise TooLargeError("A picture of this request makes more than 4 GiB of tensors: send a smaller one.")
    head, pixels = parted(images.tensors, number)
    missing = -len(head) % 3  # base64 of pieces is base64 of the whole where the pieces have whole groups of 3 bytes
    yield pybase64.b64encode(head + pixels[:missing])
    yield pybase64.b64encode(pixels[missing:])


def _sampling(sampling: Sampling) -> dict[str, Any]:
    refuse_impossible(sampling)
    values: dict[str, Any] = {
        "temperature": sampling.temperature,
        "skip_special_tokens": sampling.skip_special_tokens,
        "ignore_eos": sampling.ignore_eos,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
        "detokenize": bool(sampling.stop),  # the gateway writes the text; the engine needs it to find stop strings
    }
    if sampling.n > 1:
        values["n"] = sampling.n
    if sampling.top_p is not None:
        values["top_p"] = top_p(sampling)
    if sampling.logit_bias:
        values["logit_bias"] = dict(sampling.logit_bias)
    if (constraint := sampling.constraint) is not None:
        kind = _STRUCTURED.get(constraint.kind, constraint.kind)
        values["structured_outputs"] = {kind: True if kind == "json_object" else constraint.value}
    return values | {name: v for name in _OPTIONAL_SAMPLING if (v := getattr(sampling, name)) is not None}
