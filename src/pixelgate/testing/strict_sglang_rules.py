"""What a GenerateRequest must be for an SGLang, which would otherwise die of its pictures or answer nonsense."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.testing.strict_layouts import AnyRes, Rows, Runs, need
from pixelgate.testing.strict_rules import StrictFacts

_ITEMSIZE = {"float32": 4, "int64": 8}


def check(request: pb.GenerateRequest, facts: StrictFacts) -> None:
    """Raise Refused unless ``request`` keeps every rule."""
    need(request.request_id, "request_id is empty")
    for name in ("disaggregated_params", "data_parallel_rank", "timestamp"):
        need(not request.HasField(name), f"{name} is set")
    ids = np.array(request.tokenized.input_ids, np.int64)
    need(ids.size, "there are no input_ids")
    need(ids.size < facts.max_context, f"{ids.size} input_ids leave no room in a context of {facts.max_context}")
    need(ids.max() < facts.vocab_size, f"input id {ids.max()} is not below the vocabulary size {facts.vocab_size}")
    need(request.logprob_start_len == -1, "logprob_start_len asks for the prompt's log-probabilities")
    need(request.stream or request.sampling_params.n <= 1, "several answers without a stream all have index 0")
    _check_sampling(request.sampling_params, facts)
    if request.HasField("mm_inputs"):
        _check_images(request.mm_inputs, ids, facts)
    else:
        need(facts.image_token_id not in ids, "the prompt has placeholders, but mm_inputs is missing")


def _check_sampling(sampling: pb.SamplingParams, facts: StrictFacts) -> None:
    """Of what is 0 nobody can tell whether it is meant, and the engine takes it for what is neutral."""
    need(0 <= sampling.temperature < math.inf, f"temperature {sampling.temperature} is not 0 or more")
    need(0 <= sampling.top_p <= 1, f"top_p {sampling.top_p} is not between 0 and 1")
    need(sampling.top_k >= -1, f"top_k {sampling.top_k} is below -1")
    need(0 <= sampling.min_p <= 1, f"min_p {sampling.min_p} is not between 0 and 1")
    need(-2 <= sampling.presence_penalty <= 2, "presence_penalty is not between -2 and 2")
    need(-2 <= sampling.frequency_penalty <= 2, "frequency_penalty is not between -2 and 2")
    need(0 <= sampling.repetition_penalty <= 2, "repetition_penalty is not between 0 and 2")
    need(sampling.n >= 1, "n is unset")
    need(
        all(key.isdigit() and int(key) < facts.vocab_size for key in sampling.logit_bias), "logit_bias has a wrong key"
    )
    kind = sampling.WhichOneof("constraint")
    need(kind is None or getattr(sampling, kind), f"the constraint {kind} is empty")
    need(all(sampling.stop), "a stop string is empty")
    if sampling.HasField("max_new_tokens"):
        need(sampling.max_new_tokens >= 1, "max_new_tokens is not 1 or more")
        need(sampling.min_new_tokens <= sampling.max_new_tokens, "min_new_tokens is greater than max_new_tokens")


def _check_images(mm: pb.MultimodalInputs, ids: NDArray[np.int64], facts: StrictFacts) -> None:
    layout = facts.layout
    need(isinstance(layout, (AnyRes, Rows)), f"pictures of a {facts.model_type} are not understood right")
    need(list(mm.modalities) == ["image"], f"modalities are {list(mm.modalities)}")
    for name in ("image_urls", "video_urls", "audio_urls", "image_data", "video_data", "audio_data"):
        need(not getattr(mm, name), f"{name} is set")
    need(mm.HasField("im_token_id") and mm.im_token_id == facts.image_token_id, f"im_token_id is {mm.im_token_id}")
    names = sorted(mm.model_specific_tensors)
    need(names == ["image_sizes"], f"model_specific_tensors are {', '.join(names) or 'missing'}")
    sizes = _values("image_sizes", mm.model_specific_tensors["image_sizes"], "int64")
    images = len(sizes)
    need(sizes.shape == (images, 2), f"image_sizes has shape {sizes.shape}")
    need(images <= facts.max_images, f"{images} images are more than {facts.max_images}")
    pixels = _values("pixel_values", mm.pixel_values, "float32")
    if isinstance(layout, Rows):
        need(pixels.ndim == 4 and pixels.shape[:2] == (images, 3), f"pixel_values has shape {pixels.shape}")
        runs = [_own(layout, picture, size) for picture, size in zip(pixels, sizes.tolist(), strict=True)]
    else:
        shape = (images, *pixels.shape[1:2], *layout.pixels[1:])
        need(pixels.shape == shape, f"pixel_values has shape {pixels.shape}, not {shape}")
        runs = layout.runs(pixels.shape, {"image_sizes": sizes})
    _check_placeholders(mm, ids, runs, facts.image_token_id)


def _own(layout: Rows, picture: NDArray[np.float32], size: list[int]) -> Runs:
    """A picture's span, by its own size; what is around it must be nothing."""
    height, width = size
    need(0 < height <= picture.shape[1] and 0 < width <= picture.shape[2], f"image_sizes has {height}x{width}")
    need(not picture[:, height:].any() and not picture[:, :, width:].any(), "a smaller picture is not filled up with 0")
    return layout.runs((1, 3, height, width), {})[0]


def _check_placeholders(mm: pb.MultimodalInputs, ids: NDArray[np.int64], runs: list[Runs], token: int) -> None:
    """Their ranges are those of ids in a row, without the tokens between the rows of a picture."""
    places = [(place.offset, place.length) for place in mm.mm_placeholders]
    embedded = np.zeros(len(ids), bool)
    end = 0
    for offset, length in places:
        need(length and end <= offset and offset + length <= len(ids), f"the range at {offset} is out of place")
        end = offset + length
        embedded[offset:end] = True
    need(np.array_equal(embedded, ids == token), "the ranges are not where the placeholders are")
    own = [count for picture in runs for inside, count in picture if inside]
    lengths = [length for _, length in places]
    need(lengths == own, f"the ranges are {lengths} long, the pictures' rows {own}")


def _values(name: str, tensor: pb.TensorData, dtype: str) -> NDArray[np.float32] | NDArray[np.int64]:
    need(tensor.dtype == dtype, f"{name} has dtype {tensor.dtype!r}, not {dtype!r}")
    nbytes = math.prod(tensor.shape) * _ITEMSIZE[dtype]
    need(len(tensor.data) == nbytes, f"{name} has {len(tensor.data)} bytes where its shape needs {nbytes}")
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
