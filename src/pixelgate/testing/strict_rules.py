"""What a GenerateRequest for a vision-language model must be: every rule a vLLM engine relies on.

A real engine checks few of these itself; it crashes, or answers nonsense, where `check` refuses.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.errors import CheckpointError
from pixelgate.testing import strict_layouts
from pixelgate.testing.strict_layouts import Layout, Runs, need, values

_ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8}
_IMAGE_TOKENS = {"phi3_v": 32044, "phi4mm": 200010, "phi4_multimodal": 200010}  # constants of the models
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class StrictFacts:
    """What the engine knows of its model. ``device_normalize``: it wants uint8 pixels, else ``encoder_dtype``."""

    model_type: str
    vocab_size: int
    image_token_id: int
    layout: Layout
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

    @classmethod
    def from_checkpoint(cls, directory: Path, **settings: Any) -> StrictFacts:
        """The facts of a checkpoint directory; ``settings`` are fields that win over what is read.

        Raises CheckpointError when a file or a fact is missing.
        """
        config = strict_layouts.read(directory, "config.json")
        processor = strict_layouts.read(directory, "processor_config.json", optional=True)
        image_processor = strict_layouts.read(directory, "preprocessor_config.json", optional=True)
        image_processor = image_processor or processor.get("image_processor", {})
        text = config.get("text_config", {})
        eos = config.get("eos_token_id", text.get("eos_token_id", ()))
        known = _IMAGE_TOKENS.get(str(config.get("model_type")))
        facts: dict[str, Any] = {
            "model_type": config.get("model_type"),
            "vocab_size": config.get("vocab_size", text.get("vocab_size")),
            "image_token_id": config.get("image_token_id", config.get("image_token_index", known)),
            "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos or ()),
            **settings,
        }
        missing = [name for name, value in facts.items() if value is None]
        if missing:
            raise CheckpointError(f"{directory} does not say its {', '.join(missing)}.")
        return cls(layout=strict_layouts.layout(config, image_processor, processor), **facts)


def check(request: pb.GenerateRequest, facts: StrictFacts) -> None:
    """Raise Refused unless ``request`` keeps every rule that can be seen on it alone."""
    need(request.request_id, "request_id is empty")
    need(request.WhichOneof("input") == "tokenized", "the prompt is not token ids")
    for name in ("media_refs", "kv_transfer_params", "kv_transfer_params_json"):
        need(not request.HasField(name), f"{name} is set")
    need(not request.extra_mm_inputs, "extra_mm_inputs is set, but there is only one modality")
    ids = np.array(request.tokenized.input_ids, np.int64)
    need(ids.size, "there are no input_ids")
    need(ids.size < facts.max_context, f"{ids.size} input_ids leave no room in a context of {facts.max_context}")
    need(ids.max() < facts.vocab_size, f"input id {ids.max()} is not below the vocabulary size {facts.vocab_size}")
    need(request.HasField("sampling_params"), "sampling_params is missing")
    _check_sampling(request.sampling_params)
    if request.HasField("mm_inputs"):
        _check_images(request.mm_inputs, ids, facts)
    else:
        need(facts.image_token_id not in ids, "the prompt has placeholders, but mm_inputs is missing")


class Identities:
    """Which picture each hash stood for, over the life of the engine."""

    def __init__(self) -> None:
        self._digests: dict[str, bytes] = {}

    def remember(self, request: pb.GenerateRequest, layout: Layout) -> None:
        """Learn the hashes of a request that passed `check`. Raises Refused if one stood for another picture."""
        mm = request.mm_inputs
        if not mm.mm_hashes:
            return
        small = {name: values(tensor) for name, tensor in mm.model_specific_tensors.items()}
        rows = small[layout.sizes].tolist() if layout.sizes else [1] * len(mm.mm_hashes)
        row = len(mm.pixel_values.inline) // mm.pixel_values.shape[0]
        payload, start = memoryview(mm.pixel_values.inline), 0
        for i, name in enumerate(mm.mm_hashes):
            stop = start + rows[i] * row
            # a picture is filled up with as many empty tiles as the largest of its request has
            pixels = payload[start:stop] if layout.sizes else bytes(payload[start:stop]).rstrip(b"\0")
            facts = b"".join(
                array[i].tobytes() for key, array in sorted(small.items()) if key != "image_attention_mask"
            )
            digest = hashlib.sha256(facts + pixels).digest()
            start = stop
            need(self._digests.setdefault(name, digest) == digest, f"the hash {name} belonged to another picture")


def _check_sampling(sampling: pb.SamplingParams) -> None:
    need(sampling.HasField("temperature"), "temperature is unset, which means 1.0 whatever the checkpoint says")
    need(0 <= sampling.temperature < math.inf, f"temperature {sampling.temperature} is not 0 or more")
    need(0 <= sampling.top_p <= 1, f"top_p {sampling.top_p} is not between 0 and 1")
    need(0 <= sampling.min_p <= 1, f"min_p {sampling.min_p} is not between 0 and 1")
    need(-2 <= sampling.presence_penalty <= 2, "presence_penalty is not between -2 and 2")
    need(-2 <= sampling.frequency_penalty <= 2, "frequency_penalty is not between -2 and 2")
    need(0 <= sampling.repetition_penalty < math.inf, "repetition_penalty is not greater than 0")
    need(sampling.n <= 1 or sampling.temperature >= 1e-5, "several answers at a temperature of 0")
    need(sampling.n <= 64, f"{sampling.n} answers are more than 64")
    if sampling.HasField("logprobs"):
        need(0 <= sampling.logprobs <= 20, f"logprobs {sampling.logprobs} is not between 0 and 20")
    need(all(-100 <= bias <= 100 for bias in sampling.logit_bias.values()), "a logit_bias is not between -100 and 100")
    kind = sampling.WhichOneof("constraint")
    need(kind is None or getattr(sampling, kind), f"the constraint {kind} is empty")
    need(kind != "choice" or all(sampling.choice.choices), "a choice is empty")
    need(all(sampling.stop), "a stop string is empty")
    if sampling.HasField("max_tokens"):
        need(sampling.max_tokens >= 1, "max_tokens is not 1 or more")
        need(sampling.min_tokens <= sampling.max_tokens, "min_tokens is greater than max_tokens")


def _check_images(mm: pb.MultimodalInputs, ids: NDArray[np.int64], facts: StrictFacts) -> None:
    images, layout = len(mm.mm_placeholders), facts.layout
    need(images, "mm_inputs is there, but has no placeholder")
    need(images <= facts.max_images, f"{images} images are more than {facts.max_images}")
    need(mm.modality == common_pb2.IMAGE, "modality is not IMAGE")
    key = mm.encoder_input_key if mm.HasField("encoder_input_key") else "pixel_values"
    said = "set" if mm.HasField("encoder_input_key") else "not set"
    need(key == layout.key, f"encoder_input_key is {said}, but the name is {layout.key}")
    need(len(mm.mm_hashes) == images, f"{len(mm.mm_hashes)} hashes for {images} placeholders")
    for name in mm.mm_hashes:
        need(_HASH.fullmatch(name), f"the hash {name!r} is not 64 lowercase hex digits")
    _check_layout(mm, layout)

    pixels = mm.pixel_values
    shape = (None if layout.sizes else images, *layout.pixels)
    _check_tensor(layout.key, pixels, facts.pixel_dtype, shape)
    for name, small in layout.small.items():
        _check_tensor(name, mm.model_specific_tensors[name], small.dtype, (images, *small.shape))
    small_values = {name: values(tensor) for name, tensor in mm.model_specific_tensors.items()}
    runs = layout.runs(tuple(pixels.shape), small_values)
    if layout.sizes:
        total, rows = small_values[layout.sizes].sum(), pixels.shape[0]
        need(total == rows, f"{layout.sizes} adds up to {total}, but {layout.key} has {rows} rows")
    _check_spans(mm, ids, runs, facts)


def _check_layout(mm: pb.MultimodalInputs, layout: Layout) -> None:
    names = sorted(mm.model_specific_tensors)
    need(names == sorted(layout.small), f"model_specific_tensors are {', '.join(names) or 'missing'}")
    need(mm.HasField("pixel_values"), f"{layout.key} is missing")
    batched = [*layout.small, *(() if layout.sizes else (layout.key,))]
    need(sorted(mm.batched_keys) == sorted(batched), f"batched_keys are {list(mm.batched_keys)}")
    flat = {layout.key: layout.sizes} if layout.sizes else {}
    need(dict(mm.flat_keys) == flat, f"flat_keys are {dict(mm.flat_keys)}")
    on_cpu = [name for name, small in layout.small.items() if small.cpu]
    need(sorted(mm.keep_on_cpu_keys) == sorted(on_cpu), f"keep_on_cpu_keys are {list(mm.keep_on_cpu_keys)}")


def _check_tensor(name: str, tensor: pb.TensorData, dtype: str, shape: tuple[int | None, ...]) -> None:
    """``shape`` has None where any length will do."""
    own = tuple(tensor.shape)
    need(tensor.dtype == dtype, f"{name} has dtype {tensor.dtype!r}, not {dtype!r}")
    fits = len(own) == len(shape) and all(want in (None, have) for have, want in zip(own, shape, strict=True))
    need(fits, f"{name} has shape {own}, not {shape}")
    need(tensor.WhichOneof("payload") == "inline", f"{name} has no inline payload")
    nbytes = math.prod(own) * _ITEMSIZE[dtype]
    need(len(tensor.inline) == nbytes, f"{name} has {len(tensor.inline)} bytes where its shape needs {nbytes}")


def _check_spans(mm: pb.MultimodalInputs, ids: NDArray[np.int64], runs: list[Runs], facts: StrictFacts) -> None:
    need(mm.im_token_id == facts.image_token_id, f"im_token_id is {mm.im_token_id}, not {facts.image_token_id}")
    spans = [(span.offset, span.offset + span.length) for span in mm.mm_placeholders]
    end = 0
    for start, stop in spans:
        need(start >= end, f"the span at {start} starts before {end}, where the one before it ends")
        end = stop
    need(end <= ids.size, f"the last span ends at {end}, after the prompt of {ids.size} ids")

    embeds, limit, end = ids == facts.image_token_id, facts.max_embeddings_per_image, 0
    for (start, stop), own in zip(spans, runs, strict=True):
        mask = np.repeat([embedded for embedded, _ in own], [count for _, count in own])
        length, found = int(mask.sum()), stop - start
        between = f" and {mask.size - length} other tokens" if mask.size > length else ""
        need(found == mask.size, f"the span at {start} is {found} long, its image has {length} embeddings{between}")
        need(not limit or length <= limit, f"an image of {length} embeddings is above the encoder's budget of {limit}")
        need((embeds[start:stop] | ~mask).all(), f"the span at {start} holds an id that is no placeholder")
        need((~embeds[start:stop] | mask).all(), f"the span at {start} has a placeholder in the place of another token")
        need(not embeds[end:start].any(), f"there is a placeholder before the span at {start}")
        end = stop
    need(not embeds[end:].any(), "there is a placeholder after the last span")
