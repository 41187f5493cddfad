"""GenerateRequest as bytes, for vLLM's gRPC servicer.

Everything but the pixels is built and serialised with the official stubs; how these follow is in grpc_wire.py. Where
engine and gateway share memory the message has only the names of files.
"""

from __future__ import annotations

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.engine import Constraint, EngineRequest, Images, Sampling
from pixelgate.engines.grpc_wire import MAX_TENSOR_BYTES, in_place, payload_prefix, raw
from pixelgate.engines.shm import MIN_BYTES, Segments
from pixelgate.engines.vllm_sampling import refuse_impossible, top_p
from pixelgate.errors import EngineError, RequestError, TooLargeError
from pixelgate.pixels.tensor import Tensor

# where the pixels go, innermost first
_TO_PAYLOAD = ((pb.TensorData, "inline"), (pb.MultimodalInputs, "pixel_values"), (pb.GenerateRequest, "mm_inputs"))
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
    "logprobs",
)


def encode(request: EngineRequest, segments: Segments | None = None) -> bytes:
    """The serialised GenerateRequest of ``request``; with ``segments`` its large tensors are in these.

    Raises RequestError for a sampling value that the protocol cannot carry, TooLargeError above protobuf's 2 GiB,
    OSError where a segment cannot be written.
    """
    message = pb.GenerateRequest(
        request_id=request.request_id,
        tokenized=pb.TokenizedInput(input_ids=request.token_ids),
        sampling_params=_sampling(request.sampling),
        stream=request.stream,
    )
    if request.images is None:
        return bytes(message.SerializeToString())
    pixels = request.images.tensors[0]
    if sum(tensor.nbytes for tensor in request.images.tensors) > MAX_TENSOR_BYTES:
        raise TooLargeError(
            "The pictures of this request together make more than 2 GiB of tensors: send fewer or smaller ones."
        )
    message.mm_inputs.CopyFrom(_images(request.images, segments))
    head = bytes(message.SerializeToString())
    if message.mm_inputs.pixel_values.HasField("shm"):
        return head
    front = head + payload_prefix(_TO_PAYLOAD, pixels.nbytes)
    return in_place(front, pixels.parts, pb.GenerateRequest) or b"".join([front, *map(raw, pixels.parts)])


def _sampling(sampling: Sampling) -> pb.SamplingParams:
    refuse_impossible(sampling)
    # Unset is not neutral for these: temperature would be 1.0 and special tokens would be kept.
    message = pb.SamplingParams(
        skip_special_tokens=sampling.skip_special_tokens,
        ignore_eos=sampling.ignore_eos,
        stop=sampling.stop,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        n=sampling.n if sampling.n > 1 else 0,
    )
    values = {name: getattr(sampling, name) for name in ("temperature", *_OPTIONAL_SAMPLING)}
    values["top_p"] = top_p(sampling)
    # Clients and checkpoints write -1 for "all tokens"; the field is unsigned and has 0 for it.
    if values["top_k"] == -1:
        values["top_k"] = 0
    name = "stop_token_ids"
    try:
        message.stop_token_ids.extend(sampling.stop_token_ids)
        for name, value in values.items():
            if value is not None:
                setattr(message, name, value)
        name = "logit_bias"
        message.logit_bias.update(sampling.logit_bias)
    except ValueError:
        raise RequestError(f"{name} is outside the range that the engine takes.", param=name) from None
    if sampling.constraint is not None:
        _constrain(message, sampling.constraint)
    return message


def _constrain(message: pb.SamplingParams, constraint: Constraint) -> None:
    match constraint.kind:
        case "json_object":
            message.json_object = True
        case "choice":
            message.choice.choices.extend(constraint.value)
        case text:
            setattr(message, text, constraint.value)


def _images(images: Images, segments: Segments | None) -> pb.MultimodalInputs:
    """All of mm_inputs, but of a pixel tensor that is in no segment the payload."""
    pixels, *others = images.tensors
    data = {tensor.name: _tensor(tensor, segments) for tensor in images.tensors}
    for tensor in others:
        if not data[tensor.name].HasField("shm"):
            data[tensor.name].inline = tensor.joined().tobytes()
    message = pb.MultimodalInputs(
        pixel_values=data.pop(pixels.name),
        model_specific_tensors=data,
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


def _tensor(tensor: Tensor, segments: Segments | None) -> pb.TensorData:
    """A tensor, with a payload if it is large enough for a segment."""
    message = pb.TensorData(shape=tensor.shape, dtype=tensor.dtype)
    if segments is not None and tensor.nbytes >= MIN_BYTES:
        name = segments.write(tensor.parts)
        message.shm.CopyFrom(common_pb2.ShmHandle(name=name, nbytes=tensor.nbytes, owner_id="pixelgate"))
    return message


def _sizes(tensor: Tensor) -> str:
    if tensor.sizes is None:
        raise EngineError(f"The flat tensor {tensor.name} does not name the tensor that holds its sizes.")
    return tensor.sizes
