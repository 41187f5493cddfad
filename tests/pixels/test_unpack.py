"""`unpack` against a forward written with explicit loops, which shares no reshape with the code."""

from __future__ import annotations

import numpy as np
import pytest

from pixelgate.errors import KernelError
from pixelgate.pixels.affine import NUMPY_DTYPES, Affine
from pixelgate.pixels.plan import ImagePlan, Patches, View
from pixelgate.pixels.resample import Resample
from pixelgate.pixels.unpack import unpack

CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def plan_of(height, width, layout, affine, dtype="float32"):
    rows, columns = height // layout.patch, width // layout.patch
    return ImagePlan(
        height=height,
        width=width,
        views=(View((height, width), Resample()),),
        layout=layout,
        affine=affine,
        tokens=rows * columns // layout.merge**2,
        grid=(1, rows, columns),
        dtype=dtype,
    )


def pack(picture, layout, table):
    """uint8 [height, width, 3] to patch rows: one patch at a time, found by its place in the picture."""
    height, width, _ = picture.shape
    patch, merge = layout.patch, layout.merge
    rows = []
    for block_y in range(0, height, patch * merge):
        for block_x in range(0, width, patch * merge):
            for y in range(block_y, block_y + patch * merge, patch):
                for x in range(block_x, block_x + patch * merge, patch):
                    row = []
                    for channel in range(3):
                        square = picture[y : y + patch, x : x + patch, channel].ravel()
                        row += [table[channel][square]] * layout.temporal
                    rows.append(np.concatenate(row))
    return np.stack(rows)


def every_value(rng, height, width):
    """Random pixels in which each channel holds all 256 values."""
    picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    for channel in range(3):
        picture[..., channel].flat[:256] = rng.permutation(256)
    return picture


@pytest.mark.parametrize("rule", ["torchvision", "pil"])
@pytest.mark.parametrize("constants", [CLIP, HALF], ids=["clip", "half"])
@pytest.mark.parametrize(
    "layout", [Patches(14, 2, 2), Patches(16, 2, 2), Patches(16, 1, 1), Patches(14, 3, 4)], ids=str
)
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_every_picture_comes_back_exactly(rule, constants, layout, dtype):
    rng = np.random.default_rng(layout.patch * 100 + layout.merge)
    affine = Affine(rule, **constants)
    block = layout.patch * layout.merge
    for _ in range(4):
        rows, columns = rng.integers(1, 6, 2)
        picture = every_value(rng, rows * block, columns * block)
        plan = plan_of(rows * block, columns * block, layout, affine)
        restored = unpack(plan, pack(picture, layout, affine.table_as(dtype)))
        assert restored.dtype == np.uint8
        assert np.array_equal(restored, picture)


@pytest.mark.parametrize("rule", ["torchvision", "pil"])
@pytest.mark.parametrize("constants", [CLIP, HALF], ids=["clip", "half"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("patch", [14, 16])
def test_a_16_bit_tensor_comes_back_as_a_picture_with_the_same_tensor(rule, constants, dtype, patch):
    rng = np.random.default_rng(patch)
    affine, layout = Affine(rule, **constants), Patches(patch, 2, 2)
    table = affine.table_as(dtype)
    picture = every_value(rng, patch * 4, patch * 6)
    tensor = pack(picture, layout, table)
    restored = unpack(plan_of(patch * 4, patch * 6, layout, affine, dtype), tensor)
    assert pack(restored, layout, table).tobytes() == tensor.tobytes()
    # only entries that the rounding made equal may be taken for one another
    distinct = [len(np.unique(row.astype(np.float32))) for row in table]
    if min(distinct) == 256:
        assert np.array_equal(restored, picture)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_no_table_entry_becomes_the_nearest(dtype):
    affine, layout = Affine("torchvision", **HALF), Patches(14, 2, 1)
    tensor = np.zeros((4, 588), NUMPY_DTYPES[dtype])
    tensor[0, :6] = [-5.0, 5.0, np.inf, -np.inf, 0.9999, -0.992]
    restored = unpack(plan_of(28, 28, layout, affine, dtype), tensor)
    assert restored[0, :6, 0].tolist() == [0, 255, 255, 0, 255, 1]


def test_nan_is_survived():
    affine, layout = Affine("pil", **CLIP), Patches(14, 2, 2)
    for dtype in ("float32", "bfloat16", "float16"):
        tensor = np.full((4, 1176), np.nan, NUMPY_DTYPES[dtype])
        assert unpack(plan_of(28, 28, layout, affine, dtype), tensor).shape == (28, 28, 3)


def test_the_first_temporal_copy_is_read():
    affine, layout = Affine("torchvision", **CLIP), Patches(14, 2, 2)
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 256, (2, 28, 56, 3), dtype=np.uint8)
    tensor = pack(first, layout, affine.table).reshape(8, 3, 2, 196)
    tensor[:, :, 1] = pack(second, layout, affine.table).reshape(8, 3, 2, 196)[:, :, 1]
    assert np.array_equal(unpack(plan_of(28, 56, layout, affine), tensor.reshape(8, 1176)), first)


def test_a_strided_read_only_tensor_is_taken():
    affine, layout = Affine("torchvision", **CLIP), Patches(14, 2, 2)
    picture = np.random.default_rng(5).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    tensor = np.asfortranarray(pack(picture, layout, affine.table))
    tensor.setflags(write=False)
    assert np.array_equal(unpack(plan_of(28, 28, layout, affine), tensor), picture)


@pytest.mark.parametrize(
    ("tensor", "height", "words"),
    [
        (np.zeros((5, 1176), np.float32), 28, r"shape \[4, 1176\], but the array has \[5, 1176\]"),
        (np.zeros((4, 588), np.float32), 28, r"the array has \[4, 588\]"),
        (np.zeros((2, 2, 1176), np.float32), 28, r"the array has \[2, 2, 1176\]"),
        (np.zeros((4, 1176), np.float64), 28, "dtype 'float64' is not one of float32"),
        (np.zeros((4, 1176), ">f4"), 28, "dtype '>f4' is not one of float32"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(tensor, height, words):
    plan = plan_of(height, 28, Patches(14, 2, 2), Affine("torchvision", **CLIP))
    with pytest.raises(KernelError, match=words):
        unpack(plan, tensor)
