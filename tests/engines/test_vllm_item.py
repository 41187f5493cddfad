"""A picture's tensors in the form that vLLM has over HTTP."""

import ml_dtypes
import msgspec
import numpy as np
import pytest

from pixelgate.engines import vllm_item
from pixelgate.pixels.tensor import Tensor


def test_an_item_describes_one_picture_alone():
    pixels = [np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(n, -1) for n in (1, 3)]
    grids = [np.array([[1, 2, n]]) for n in (3, 4)]
    tensors = (
        Tensor("pixel_values", "bfloat16", tuple(pixels), "flat", sizes="rows"),
        Tensor("image_grid_thw", "int64", tuple(grids), "batched", keep_on_cpu=True),
        Tensor("rows", "int64", (np.array([1]), np.array([3])), "batched"),
    )
    item = vllm_item.pack(tensors, 1)
    assert msgspec.msgpack.decode(item) == {
        "pixel_values": {
            "data": ["bfloat16", [3, 2], msgspec.msgpack.Ext(3, pixels[1].tobytes())],
            "field": ["flat", {"keep_on_cpu": False, "slices": [[[0, 3, None]]], "dim": 0}],
        },
        "image_grid_thw": {
            "data": ["int64", [3], msgspec.msgpack.Ext(3, grids[1].tobytes())],
            "field": ["batched", {"keep_on_cpu": True}],
        },
    }
    arrays = vllm_item.unpack(item)
    assert arrays["pixel_values"].dtype == ml_dtypes.bfloat16
    assert arrays["pixel_values"].tobytes() == pixels[1].tobytes()
    assert arrays["image_grid_thw"].tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (["uint8", [2], msgspec.msgpack.Ext(3, b"abc")], "has 3 bytes"),
        (["uint8", [3], msgspec.msgpack.Ext(4, b"abc")], "not raw bytes"),
        (["uint8", [3], b"abc"], "not raw bytes"),
    ],
)
def test_what_is_no_tensor_is_refused(data, words):
    with pytest.raises(ValueError, match=words):
        vllm_item.unpack(msgspec.msgpack.encode({"a": {"data": data}}))
