"""What the body of vLLM's ``POST /inference/v1/generate`` must be, and the same request as its gRPC service knows it.

A picture's item describes itself alone, so the rules of items are here; everything else that a request must keep is
said once, for both protocols, in strict_rules.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.pixels.affine import NUMPY_DTYPES
from pixelgate.testing.strict_layouts import Layout, Refused, need
from pixelgate.testing.strict_rules import StrictFacts

PIXELS = "pixel_values"  # where the gRPC service has the pixels, whatever their name
RAW = 3
FIELDS = ("model", "request_id", "token_ids", "sampling_params", "stream", "stream_options", "features")
FEATURES = {"mm_hashes", "mm_placeholders", "kwargs_data"}


class UnknownItemError(Exception):
    """An item is to be taken from the cache, which does not have it."""


@dataclass(frozen=True)
class Element:
    """One tensor of an item, and how the items of a request share it."""

    dtype: str
    array: NDArray[Any]
    field: str
    keep_on_cpu: bool


Item = Mapping[str, Element]


def message(body: Any, cache: Mapping[str, Item], facts: StrictFacts) -> tuple[pb.GenerateRequest, dict[str, Item]]:
    """A body as a message of the gRPC service, and its items by hash.

    Raises Refused where the body cannot be one, UnknownItemError for a null whose hash is not in ``cache``.
    """
    need(isinstance(body, dict), "the body is no object")
    for name in body:
        need(name in FIELDS, f"{name} is not expected")
    made = pb.GenerateRequest(request_id=body.get("request_id", ""), stream=bool(body.get("stream")))
    try:
        made.tokenized.input_ids.extend(body["token_ids"])
    except (KeyError, TypeError, ValueError):
        raise Refused("token_ids is no list of token ids") from None
    _sampling(made.sampling_params, body.get("sampling_params"))
    if "features" not in body:
        return made, {}
    return made, _features(made, body["features"], cache, facts)


def _sampling(made: pb.SamplingParams, values: Any) -> None:
    need(isinstance(values, dict), "sampling_params is missing")
    values = dict(values)
    detokenize = values.pop("detokenize", True)
    need(detokenize or not values.get("stop"), "stop strings are not found without detokenize")
    for name, value in values.items():
        try:
            if name == "logit_bias":
                made.logit_bias.update({int(token): bias for token, bias in value.items()})
            elif name == "structured_outputs":
                _constrain(made, value)
            elif isinstance(value, list):
                getattr(made, name).extend(value)
            else:
                # -1 is "all tokens" in JSON, where the message has 0
                setattr(made, name, 0 if name == "top_k" and value == -1 else value)
        except (AttributeError, TypeError, ValueError):
            raise Refused(f"sampling_params.{name} is not expected, or has no value that can be") from None


def _constrain(made: pb.SamplingParams, values: Mapping[str, Any]) -> None:
    ((kind, value),) = values.items()
    if kind == "choice":
        made.choice.choices.extend(value)
    else:
        setattr(made, {"json": "json_schema"}.get(kind, kind), value)


def _features(
    made: pb.GenerateRequest, features: Any, cache: Mapping[str, Item], facts: StrictFacts
) -> dict[str, Item]:
    need(isinstance(features, dict) and set(features) == FEATURES, f"features must be {', '.join(sorted(FEATURES))}")
    for name, part in features.items():
        need(isinstance(part, dict) and list(part) == ["image"], f"{name} is not that of images alone")
    hashes, spans, data = (features[name]["image"] for name in ("mm_hashes", "mm_placeholders", "kwargs_data"))
    need(len(hashes) == len(spans) == len(data) > 0, "hashes, placeholders and items differ in number")
    ids = list(made.tokenized.input_ids)
    for span in spans:
        inside = ids[span["offset"] : span["offset"] + span["length"]]
        need(
            inside.count(facts.image_token_id) == span["length"],
            f"the span at {span['offset']} holds other ids than {facts.image_token_id}, and there is no mask",
        )
    items = []
    for name, text in zip(hashes, data, strict=True):
        if text is None and name not in cache:
            raise UnknownItemError(name)
        items.append(cache[name] if text is None else _item(text, facts.layout))
    mm = made.mm_inputs
    mm.mm_hashes.extend(hashes)
    mm.mm_placeholders.extend(pb.PlaceholderRange(**span) for span in spans)
    mm.im_token_id, mm.modality = facts.image_token_id, common_pb2.IMAGE
    if facts.layout.key != PIXELS:
        mm.encoder_input_key = facts.layout.key
    _join(mm, items, facts.layout)
    return dict(zip(hashes, items, strict=True))


def _item(text: Any, layout: Layout) -> Item:
    try:
        elements = msgspec.msgpack.decode(pybase64.b64decode(text, validate=True))
        need(layout.sizes not in elements, f"{layout.sizes} has no place in an item")
        return {name: _element(name, **element) for name, element in elements.items()}
    except (AttributeError, TypeError, ValueError, msgspec.DecodeError):
        raise Refused("an item is no base64 of a msgpack map of tensors") from None


def _element(name: str, data: Any, field: Any) -> Element:
    (dtype, shape, raw), (kind, how) = data, field
    need(dtype in NUMPY_DTYPES or dtype == "int64", f"{name} has dtype {dtype!r}")
    need(isinstance(raw, msgspec.msgpack.Ext) and raw.code == RAW, f"{name} is not raw bytes")
    kind_of: np.dtype[Any] = np.dtype(NUMPY_DTYPES.get(dtype, np.int64))
    nbytes = math.prod(shape) * kind_of.itemsize
    need(len(raw.data) == nbytes, f"{name} has {len(raw.data)} bytes where its shape needs {nbytes}")
    expected = {"keep_on_cpu": how["keep_on_cpu"]}
    if kind == "flat":
        expected |= {"slices": [[[0, shape[0], None]]], "dim": 0}
    need(kind in ("flat", "batched") and how == expected, f"{name} is {kind} {how}, not {expected}")
    return Element(dtype, np.frombuffer(bytes(raw.data), kind_of).reshape(shape), kind, how["keep_on_cpu"])


def _join(mm: pb.MultimodalInputs, items: Sequence[Item], layout: Layout) -> None:
    """The items' tensors together, as the gRPC service has them."""
    first = items[0]
    for item in items:
        own = [(name, e.dtype, e.field, e.keep_on_cpu) for name, e in sorted(item.items())]
        need(own == [(n, e.dtype, e.field, e.keep_on_cpu) for n, e in sorted(first.items())], "items are not alike")
    for name, element in first.items():
        arrays = [item[name].array for item in items]
        if element.field == "flat":
            _add_sizes(mm, name, [len(array) for array in arrays], layout)
            joined = np.concatenate(arrays)
        else:
            tiled = arrays[0].ndim > 1  # a picture may have more tiles than another
            alike = {array.shape[tiled:] for array in arrays}
            need(len(alike) == 1, f"{name} differs in shape from item to item")
            mm.batched_keys.append(name)
            joined = np.stack(_filled_up(arrays) if tiled else arrays)
        if element.keep_on_cpu:
            mm.keep_on_cpu_keys.append(name)
        place = mm.pixel_values if name == layout.key else mm.model_specific_tensors[name]
        place.CopyFrom(_tensor(element.dtype, joined))


def _add_sizes(mm: pb.MultimodalInputs, name: str, rows: Sequence[int], layout: Layout) -> None:
    """The tensor by which the gRPC service cuts a flat one."""
    sizes = layout.sizes or "rows"
    mm.flat_keys[name] = sizes
    mm.batched_keys.append(sizes)
    mm.model_specific_tensors[sizes].CopyFrom(_tensor("int64", np.array(rows, np.int64)))
    if sizes in layout.small and layout.small[sizes].cpu:
        mm.keep_on_cpu_keys.append(sizes)


def _filled_up(arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Pictures with fewer tiles get empty ones: items from a cache come from other requests."""
    most = max(len(array) for array in arrays)
    return [np.concatenate([a, np.zeros((most - len(a), *a.shape[1:]), a.dtype)]) for a in arrays]


def _tensor(dtype: str, array: NDArray[Any]) -> pb.TensorData:
    return pb.TensorData(dtype=dtype, shape=array.shape, inline=array.tobytes())
