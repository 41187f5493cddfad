"""What a GenerateRequest for a Qwen vision-language model must be: every rule a vLLM engine relies on.

A real engine checks few of these itself; it crashes, or answers nonsense, where `check` refuses.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.errors import CheckpointError

GRID, SIZES, PIXELS = "image_grid_thw", "patches_per_image", "pixel_values"

_ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
_HASH = re.compile(r"[0-9a-f]{64}")


class Refused(Exception):
    """The request breaks a rule; the message says which."""


@dataclass(frozen=True)
class StrictFacts:
    """What the engine knows of its model. ``device_normalize``: it wants uint8 pixels, else ``encoder_dtype``."""

    model_type: str
    vocab_size: int
    image_token_id: int
    patch_size: int
    merge_size: int = 2
    temporal_patch_size: int = 2
    eos_token_ids: tuple[int, ...] = ()
    device_normalize: bool = False
    encoder_dtype: str = "bfloat16"
    max_context: int = 131_072
    max_images: int = 999
    max_embeddings_per_image: int = 0

    @property
    def pixel_dtype(self) -> str:
        """The dtype in which pixels must come."""
        return "uint8" if self.device_normalize else self.encoder_dtype

    @property
    def columns(self) -> int:
        """Columns of the pixel tensor: the values of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @classmethod
    def from_checkpoint(cls, directory: Path, **settings: Any) -> StrictFacts:
        """The facts of a checkpoint directory; ``settings`` are fields that win over what is read.

        Raises CheckpointError when a file or a fact is missing.
        """
        config, processor = _read(directory, "config.json"), _read(directory, "preprocessor_config.json")
        text = config.get("text_config", {})
        eos = config.get("eos_token_id", text.get("eos_token_id", ()))
        facts: dict[str, Any] = {
            "model_type": config.get("model_type"),
            "vocab_size": config.get("vocab_size", text.get("vocab_size")),
            "image_token_id": config.get("image_token_id"),
            "patch_size": processor.get("patch_size"),
            "merge_size": processor.get("merge_size"),
            "temporal_patch_size": processor.get("temporal_patch_size"),
            "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos or ()),
            **settings,
        }
        missing = [name for name, value in facts.items() if value is None]
        if missing:
            raise CheckpointError(f"{directory} does not say its {', '.join(missing)}.")
        return cls(**facts)


def check(request: pb.GenerateRequest, facts: StrictFacts) -> None:
    """Raise Refused unless ``request`` keeps every rule that can be seen on it alone."""
    _need(request.request_id, "request_id is empty")
    _need(request.WhichOneof("input") == "tokenized", "the prompt is not token ids")
    for name in ("media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        _need(not request.HasField(name), f"{name} is set")
    _need(not request.extra_mm_inputs, "extra_mm_inputs is set, but there is only one modality")
    ids = np.array(request.tokenized.input_ids, np.int64)
    _need(ids.size, "there are no input_ids")
    _need(ids.size < facts.max_context, f"{ids.size} input_ids leave no room in a context of {facts.max_context}")
    _need(ids.max() < facts.vocab_size, f"input id {ids.max()} is not below the vocabulary size {facts.vocab_size}")
    _need(request.HasField("sampling_params"), "sampling_params is missing")
    _check_sampling(request.sampling_params)
    if request.HasField("mm_inputs"):
        _check_images(request.mm_inputs, ids, facts)
    else:
        _need(facts.image_token_id not in ids, "the prompt has placeholders, but mm_inputs is missing")


class Identities:
    """Which picture each hash stood for, over the life of the engine."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def remember(self, request: pb.GenerateRequest) -> None:
        """Learn the hashes of a request that passed `check`. Raises Refused if one stood for another picture."""
        mm = request.mm_inputs
        if not mm.mm_hashes:
            return
        sizes = _int64(mm.model_specific_tensors[SIZES])
        grids = _int64(mm.model_specific_tensors[GRID])
        row = mm.pixel_values.shape[1] * _ITEMSIZE[mm.pixel_values.dtype]
        payload, start = memoryview(mm.pixel_values.inline), 0
        for name, rows, grid in zip(mm.mm_hashes, sizes.tolist(), grids, strict=True):
            stop = start + rows * row
            digest = hashlib.sha256(grid.tobytes() + payload[start:stop]).digest()
            start = stop
            _need(self._digests.setdefault(name, digest) == digest, f"the hash {name} belonged to another picture")


def _check_sampling(sampling: pb.SamplingParams) -> None:
    _need(sampling.HasField("temperature"), "temperature is unset, which means 1.0 whatever the checkpoint says")
    _need(0 <= sampling.temperature < math.inf, f"temperature {sampling.temperature} is not 0 or more")
    _need(0 <= sampling.top_p <= 1, f"top_p {sampling.top_p} is not between 0 and 1")
    _need(0 <= sampling.min_p <= 1, f"min_p {sampling.min_p} is not between 0 and 1")
    _need(-2 <= sampling.presence_penalty <= 2, "presence_penalty is not between -2 and 2")
    _need(-2 <= sampling.frequency_penalty <= 2, "frequency_penalty is not between -2 and 2")
    _need(0 <= sampling.repetition_penalty < math.inf, "repetition_penalty is not greater than 0")
    _need(sampling.n <= 1, "only one answer at a time is made here")
    _need(all(sampling.stop), "a stop string is empty")
    if sampling.HasField("max_tokens"):
        _need(sampling.max_tokens >= 1, "max_tokens is not 1 or more")
        _need(sampling.min_tokens <= sampling.max_tokens, "min_tokens is greater than max_tokens")


def _check_images(mm: pb.MultimodalInputs, ids: NDArray[np.int64], facts: StrictFacts) -> None:
    images = len(mm.mm_placeholders)
    _need(images, "mm_inputs is there, but has no placeholder")
    _need(images <= facts.max_images, f"{images} images are more than {facts.max_images}")
    _need(mm.modality == common_pb2.IMAGE, "modality is not IMAGE")
    _need(not mm.HasField("encoder_input_key"), "encoder_input_key is set, but the name is pixel_values")
    _need(len(mm.mm_hashes) == images, f"{len(mm.mm_hashes)} hashes for {images} placeholders")
    for name in mm.mm_hashes:
        _need(_HASH.fullmatch(name), f"the hash {name!r} is not 64 lowercase hex digits")
    _check_layout(mm)

    pixels, small = mm.pixel_values, mm.model_specific_tensors
    _check_tensor(PIXELS, pixels, facts.pixel_dtype, (None, facts.columns))
    _check_tensor(GRID, small[GRID], "int64", (images, 3))
    _check_tensor(SIZES, small[SIZES], "int64", (images,))
    grids, sizes, rows = _int64(small[GRID]), _int64(small[SIZES]), pixels.shape[0]
    for (t, h, w), size in zip(grids.tolist(), sizes.tolist(), strict=True):
        _need(t == 1 and h > 0 and w > 0, f"the grid {t}x{h}x{w} is not that of an image")
        _need(h % facts.merge_size == 0 and w % facts.merge_size == 0, f"the grid {t}x{h}x{w} cannot be merged")
        _need(size == t * h * w, f"patches_per_image {size} is not the product of the grid {t}x{h}x{w}")
    _need(sizes.sum() == rows, f"patches_per_image adds up to {sizes.sum()}, but pixel_values has {rows} rows")
    _check_spans(mm, ids, (sizes // facts.merge_size**2).tolist(), facts)


def _check_layout(mm: pb.MultimodalInputs) -> None:
    names = sorted(mm.model_specific_tensors)
    _need(names == [GRID, SIZES], f"model_specific_tensors are {', '.join(names) or 'missing'}")
    _need(mm.HasField("pixel_values"), "pixel_values is missing")
    _need(sorted(mm.batched_keys) == [GRID, SIZES], f"batched_keys are {list(mm.batched_keys)}")
    _need(dict(mm.flat_keys) == {PIXELS: SIZES}, f"flat_keys are {dict(mm.flat_keys)}")
    _need(list(mm.keep_on_cpu_keys) == [GRID], f"keep_on_cpu_keys are {list(mm.keep_on_cpu_keys)}")


def _check_tensor(name: str, tensor: pb.TensorData, dtype: str, shape: tuple[int | None, ...]) -> None:
    """``shape`` has None where any length will do."""
    own = tuple(tensor.shape)
    _need(tensor.dtype == dtype, f"{name} has dtype {tensor.dtype!r}, not {dtype!r}")
    fits = len(own) == len(shape) and all(want in (None, have) for have, want in zip(own, shape, strict=True))
    _need(fits, f"{name} has shape {own}, not {shape}")
    _need(tensor.WhichOneof("payload") == "inline", f"{name} has no inline payload")
    nbytes = math.prod(own) * _ITEMSIZE[dtype]
    _need(len(tensor.inline) == nbytes, f"{name} has {len(tensor.inline)} bytes where its shape needs {nbytes}")


def _check_spans(mm: pb.MultimodalInputs, ids: NDArray[np.int64], lengths: list[int], facts: StrictFacts) -> None:
    _need(mm.im_token_id == facts.image_token_id, f"im_token_id is {mm.im_token_id}, not {facts.image_token_id}")
    spans = [(span.offset, span.offset + span.length) for span in mm.mm_placeholders]
    end = 0
    for start, stop in spans:
        _need(start >= end, f"the span at {start} starts before {end}, where the one before it ends")
        end = stop
    _need(end <= ids.size, f"the last span ends at {end}, after the prompt of {ids.size} ids")

    embeds, limit, end = ids == facts.image_token_id, facts.max_embeddings_per_image, 0
    for (start, stop), length in zip(spans, lengths, strict=True):
        _need(stop - start == length, f"the span at {start} is {stop - start} long, its image has {length} embeddings")
        _need(not limit or length <= limit, f"an image of {length} embeddings is above the encoder's budget of {limit}")
        _need(embeds[start:stop].all(), f"the span at {start} holds an id that is no placeholder")
        _need(not embeds[end:start].any(), f"there is a placeholder before the span at {start}")
        end = stop
    _need(not embeds[end:].any(), "there is a placeholder after the last span")


def _int64(tensor: pb.TensorData) -> NDArray[np.int64]:
    return np.frombuffer(tensor.inline, "<i8").reshape(tensor.shape)


def _need(condition: Any, otherwise: str) -> None:
    if not condition:
        raise Refused(otherwise)


def _read(directory: Path, name: str) -> Mapping[str, Any]:
    try:
        content = json.loads((directory / name).read_text())
    except (OSError, ValueError):
        raise CheckpointError(f"{directory / name} is missing or no JSON.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{directory / name} is no JSON object.")
    return content
