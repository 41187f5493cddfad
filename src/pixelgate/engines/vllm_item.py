"""One picture's tensors as vLLM has them over HTTP: msgpack, a map of names to data and field layout.

Data is ``[dtype, shape, extension 3: raw bytes]``, the layout vLLM's own name for it with its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from pixelgate.pixels.tensor import Tensor, of_one

_RAW = 3
_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}


def pack(tensors: Sequence[Tensor], index: int) -> bytes:
    """Picture ``index`` of a request's tensors."""
    return msgspec.msgpack.encode(
        {
            tensor.name: {
                # as uint8, because bfloat16 has no buffer format
                "data": [tensor.dtype, array.shape, msgspec.msgpack.Ext(_RAW, array.reshape(-1).view(np.uint8).data)],
                "field": _field(tensor, array),
            }
            for tensor, array in of_one(tensors, index)
        }
    )


def _field(tensor: Tensor, array: NDArray[Any]) -> list[Any]:
    layout: dict[str, Any] = {"keep_on_cpu": tensor.keep_on_cpu}
    if tensor.field == "flat":
        layout |= {"slices": [[[0, len(array), None]]], "dim": 0}
    return [tensor.field, layout]


def unpack(item: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of a picture. Raises LookupError, TypeError or ValueError for what is no such item."""
    elements = msgspec.msgpack.decode(item)
    return {name: _array(*element["data"]) for name, element in elements.items()}


def _array(dtype: str, shape: list[int], data: Any) -> NDArray[Any]:
    if not isinstance(data, msgspec.msgpack.Ext) or data.code != _RAW:
        raise ValueError("a tensor is not raw bytes")
    kind: np.dtype[Any] = np.dtype(_DTYPES.get(dtype, dtype))
    raw = bytes(data.data)
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"a tensor {dtype}{shape} has {len(raw)} bytes")
    return np.frombuffer(raw, kind).reshape(shape)
