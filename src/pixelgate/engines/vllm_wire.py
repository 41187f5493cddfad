"""GenerateRequest as bytes, for vLLM's gRPC servicer.

Everything but the pixels is built and serialised with the official stubs. The pixels never enter a message object:
protobuf merges repeated occurrences of an embedded message, so ``mm_inputs { pixel_values { inline } }`` appended to
the serialised rest is the same message, and one ``join`` is the only copy that is made of them.
"""

from __future__ import annotations

import numpy as np
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.engine import EngineRequest, Images, Sampling
from pixelgate.errors import EngineError, RequestError, TooLargeError
from pixelgate.pixels.tensor import Tensor

MAX_MESSAGE_BYTES = (1 << 31) - 1  # protobuf's own limit
_OPTIONAL_SAMPLING = (
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "max_tokens",
    "min_tokens",
    "seed",
)
_SMALLEST_TOP_P = 1e-6


def encode(request: EngineRequest) -> bytes:
    """The serialised GenerateRequest of ``request``.

    Raises RequestError for a sampling value that the protocol cannot carry, TooLargeError above protobuf's 2 GiB.
    """
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=request.token_ids),
        sampling_params=_sampling(request.sampling),
        stream=request.stream,
    )
    if request.images is None:
        return bytes(message.SerializeToString())
    message.mm_inputs.CopyFrom(_images(request.images))
    head = message.SerializeToString()
    pixels = request.images.tensors[0]
    prefix = _payload_prefix(pixels.nbytes)
    if len(head) + len(prefix) + pixels.nbytes > MAX_MESSAGE_BYTES:
        raise TooLargeError(
            "The pictures of this request together make more than 2 GiB of tensors: send fewer or smaller ones."
        )
    # as uint8, because bfloat16 has no buffer format
    return b"".join([head, prefix, *(part.reshape(-1).view(np.uint8).data for part in pixels.parts)])


def _sampling(sampling: Sampling) -> pb.SamplingParams:
    # Unset is not neutral for these: temperature would be 1.0 and special tokens would be kept.
    message = pb.SamplingParams(
        skip_special_tokens=sampling.skip_special_tokens, ignore_eos=sampling.ignore_eos, stop=sampling.stop
    )
    values = {name: getattr(sampling, name) for name in ("temperature", *_OPTIONAL_SAMPLING)}
    # 0 reads as unset on the engine's side, which would mean the opposite of what was asked for.
    if values["top_p"] is not None:
        values["top_p"] = max(values["top_p"], _SMALLEST_TOP_P)
    # Clients and checkpoints write -1 for "all tokens"; the field is unsigned and has 0 for it.
    if values["top_k"] == -1:
        values["top_k"] = 0
    if values["repetition_penalty"] == 0:
        raise RequestError("repetition_penalty must be greater than 0.", param="repetition_penalty")
    name = "stop_token_ids"
    try:
        message.stop_token_ids.extend(sampling.stop_token_ids)
        for name, value in values.items():
            if value is not None:
                setattr(message, name, value)
    except ValueError:
        raise RequestError(f"{name} is outside the range that the engine takes.", param=name) from None
    return message


def _images(images: Images) -> pb.MultimodalInputs:
    """All of mm_inputs but the pixel tensor's payload."""
    pixels, *small = images.tensors
    message = pb.MultimodalInputs(
        pixel_values=pb.TensorData(shape=pixels.shape, dtype=pixels.dtype),
        model_specific_tensors={
            tensor.name: pb.TensorData(shape=tensor.shape, dtype=tensor.dtype, inline=tensor.joined().tobytes())
            for tensor in small
        },
        im_token_id=images.placeholder_id,
        mm_placeholders=[pb.PlaceholderRange(offset=span.offset, length=span.length) for span in images.spans],
        mm_hashes=images.hashes,
        batched_keys=[tensor.name for tensor in images.tensors if tensor.field == "batched"],
        flat_keys={tensor.name: _sizes(tensor) for tensor in images.tensors if tensor.field == "flat"},
        keep_on_cpu_keys=[tensor.name for tensor in images.tensors if tensor.keep_on_cpu],
        modality=common_pb2.IMAGE,
    )
    if pixels.name != "pixel_values":
        message.encoder_input_key = pixels.name
    return message


def _sizes(tensor: Tensor) -> str:
    if tensor.sizes is None:
        raise EngineError(f"The flat tensor {tensor.name} does not name the tensor that holds its sizes.")
    return tensor.sizes


def _payload_prefix(nbytes: int) -> bytes:
    """What comes before ``nbytes`` of payload: the headers of mm_inputs, pixel_values and inline, outermost first."""
    prefix = b""
    for message, field in (
        (pb.TensorData, "inline"),
        (pb.MultimodalInputs, "pixel_values"),
        (pb.GenerateRequest, "mm_inputs"),
    ):
        number = message.DESCRIPTOR.fields_by_name[field].number
        prefix = _varint(number << 3 | 2) + _varint(len(prefix) + nbytes) + prefix
    return prefix


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
