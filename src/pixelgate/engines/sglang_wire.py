"""GenerateRequest as bytes, for SGLang's gRPC servicer.

All pictures of a request are one item: one float tensor, in which smaller pictures are filled up with 0.0, and what
transformers says of their sizes. How the pixels get into the message is in grpc_wire.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.engines.constraints import any_of
from pixelgate.engines.engine import Constraint, EngineRequest, Images, Sampling
from pixelgate.engines.grpc_wire import in_place, payload_prefix, raw
from pixelgate.engines.vllm_sampling import refuse_impossible, top_p
from pixelgate.errors import NotCarriedError, RequestError, TooLargeError

MAX_MESSAGE_BYTES = 256 << 20  # the servicer's own limit
MAX_PIXEL_BYTES = MAX_MESSAGE_BYTES - (4 << 20)  # less what else is in a message: a million token ids have 3 MiB

# where the pixels go, innermost first
_TO_PAYLOAD = ((pb.TensorData, "data"), (pb.MultimodalInputs, "pixel_values"), (pb.GenerateRequest, "mm_inputs"))
_OPTIONAL_SAMPLING = ("top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_MAX_REPETITION_PENALTY = 2


def encode(request: EngineRequest, most: int | None = None) -> bytes:
    """The serialised GenerateRequest of ``request``, of at most ``most`` bytes: by default what the servicer takes.

    Raises NotCarriedError for what the protocol has no field for, RequestError for a sampling value that the engine
    refuses, TooLargeError.
    """
    sampling = request.sampling
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=request.token_ids),
        sampling_params=_sampling(sampling),
        return_logprob=sampling.logprobs is not None,
        logprob_start_len=-1,  # of the answer's tokens alone
        top_logprobs_num=sampling.logprobs or 0,
        # of several answers that are not streamed nobody could tell which is which
        stream=request.stream or sampling.n > 1,
    )
    if request.images is None:
        return bytes(message.SerializeToString())
    pixels = request.images.tensors[0].parts
    shape = _shape(pixels)
    message.mm_inputs.CopyFrom(_images(request, request.images, shape))
    nbytes = int(np.prod(shape, dtype=np.int64)) * pixels[0].itemsize
    front = bytes(message.SerializeToString()) + payload_prefix(_TO_PAYLOAD, nbytes)
    most = most or MAX_MESSAGE_BYTES
    if len(front) + nbytes > most:
        raise TooLargeError(
            f"The pictures of this request together make more than the {most >> 20} MiB of tensors that the engine "
            "takes: send fewer or smaller ones."
        )
    return in_place(front, pixels, pb.GenerateRequest) or b"".join([front, *_filled(pixels, shape)])


def _sampling(sampling: Sampling) -> pb.SamplingParams:
    refuse_impossible(sampling)
    if sampling.seed is not None:
        raise NotCarriedError("SGLang's gRPC protocol has no way to say a seed.", param="seed")
    if (sampling.repetition_penalty or 0) > _MAX_REPETITION_PENALTY:
        raise RequestError("The engine takes a repetition_penalty of at most 2.", param="repetition_penalty")
    # Unset is not neutral for these: temperature would be 0.
    message = pb.SamplingParams(
        temperature=sampling.temperature,
        stop=sampling.stop,
        ignore_eos=sampling.ignore_eos,
        skip_special_tokens=sampling.skip_special_tokens,
        spaces_between_special_tokens=True,
        no_stop_trim=sampling.include_stop_str_in_output,
        n=sampling.n,
    )
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _OPTIONAL_SAMPLING}
    values |= {theirs: getattr(sampling, ours) for theirs, ours in _RENAMED.items()}
    values["top_p"] = top_p(sampling)
    # Of 0 they make "all tokens", too.
    if values["top_k"] is not None and values["top_k"] < -1:
        raise RequestError("top_k is outside the range that the engine takes.", param="top_k")
    name = "stop_token_ids"
    try:
        message.stop_token_ids.extend(sampling.stop_token_ids)
        for name, value in values.items():
            if value is not None:
                setattr(message, name, value)
    except ValueError:
        ours = _RENAMED.get(name, name)
        raise RequestError(f"{ours} is outside the range that the engine takes.", param=ours) from None
    message.logit_bias.update({str(token): bias for token, bias in sampling.logit_bias})
    if sampling.constraint is not None:
        _constrain(message, sampling.constraint)
    return message


def _constrain(message: pb.SamplingParams, constraint: Constraint) -> None:
    match constraint.kind:
        case "json_object":
            message.json_schema = '{"type": "object"}'
        case "choice":
            message.regex = any_of(constraint.value)
        case "grammar":
            message.ebnf_grammar = constraint.value
        case text:
            setattr(message, text, constraint.value)


def _images(request: EngineRequest, images: Images, shape: Sequence[int]) -> pb.MultimodalInputs:
    """All of mm_inputs but the payload of the pixels."""
    sizes = {name: np.concatenate([plan.aux[name] for plan in images.plans]) for name in images.plans[0].aux}
    return pb.MultimodalInputs(
        pixel_values=pb.TensorData(shape=shape, dtype=images.tensors[0].dtype),
        model_specific_tensors={
            name: pb.TensorData(data=array.tobytes(), shape=array.shape, dtype=array.dtype.name)
            for name, array in sizes.items()
        },
        im_token_id=images.placeholder_id,
        mm_placeholders=[pb.PlaceholderRange(offset=start, length=end - start) for start, end in _runs(request)],
        modalities=["image"],
    )


def _runs(request: EngineRequest) -> Iterator[tuple[int, int]]:
    """Where placeholders stand in a row: what else is in a picture's span must stay outside."""
    assert request.images is not None
    ids = np.array(request.token_ids, np.int64) == request.images.placeholder_id
    for span in request.images.spans:
        inside = ids[span.offset : span.offset + span.length]
        edges = np.flatnonzero(np.diff(inside, prepend=False, append=False)) + span.offset
        yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _shape(parts: Sequence[NDArray[Any]]) -> tuple[int, ...]:
    """The shape of one tensor that holds all pictures, whatever their sizes."""
    return (sum(len(part) for part in parts), *np.max([part.shape[1:] for part in parts], axis=0).tolist())


def _filled(parts: Sequence[NDArray[Any]], shape: Sequence[int]) -> Iterator[memoryview | bytes]:
    """The bytes of that tensor in pieces: the pictures', and 0.0 at the right of and below smaller ones."""
    height, width = shape[-2:]
    for part in parts:
        if part.shape[1:] == tuple(shape[1:]):
            yield raw(part)
            continue
        right = bytes((width - part.shape[-1]) * part.itemsize)
        below = bytes((height - part.shape[-2]) * width * part.itemsize)
        for plane in part.reshape(-1, *part.shape[-2:]):
            for row in plane:
                yield raw(row)
                yield right
            yield below
