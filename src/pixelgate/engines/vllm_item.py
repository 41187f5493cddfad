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

RAW = 3  # vLLM's msgpack extension type for the bytes of a tensor
_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16}


_NOTHING = msgspec.msgpack.encode(msgspec.msgpack.Ext(RAW, b""))


def pack(tensors: Sequence[Tensor], index: int) -> bytes:
    """Picture ``index`` of a request's tensors."""
    return b"".join(parted(tensors, index))


def parted(tensors: Sequence[Tensor], index: int) -> tuple[bytes, memoryview]:
    """`pack` in two parts, of which the second is the memory of the pixels: nothing is copied.

    For that they are written last and empty, and the length that is missing by hand. They must be below 4 GiB.
    """
    pixels, *small = of_one(tensors, index)
    elements = {tensor.name: _element(tensor, array, _bytes(array)) for tensor, array in small}
    elements[pixels[0].name] = _element(*pixels, b"")
    payload = _bytes(pixels[1])
    length = payload.nbytes.to_bytes(4, "big")
    head = msgspec.msgpack.encode(elements).removesuffix(_NOTHING)
    return head + b"\xc9" + length + bytes([RAW]), payload


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data  # as uint8, because bfloat16 has no buffer format


def _element(tensor: Tensor, array: NDArray[Any], data: memoryview | bytes) -> dict[str, Any]:
    return {"field": _field(tensor, array), "data": [tensor.dtype, array.shape, msgspec.msgpack.Ext(RAW, data)]}


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
    if not isinstance(data, msgspec.msgpack.Ext) or data.code != RAW:
        raise ValueError("a tensor is not raw bytes")
    kind: np.dtype[Any] = np.dtype(_DTYPES.get(dtype, dtype))
    raw = bytes(data.data)
    if math.prod(shape) * kind.itemsize != len(raw):
        raise ValueError(f"a tensor {dtype}{shape} has {len(raw)} bytes")
    return np.frombuffer(raw, kind).reshape(shape)
