"""execute() equals a plain numpy forward, for every layout, dtype, rule and level."""

import ml_dtypes
import numpy as np
import pytest

from pixelgate.errors import KernelError
from pixelgate.pixels import kernels
from pixelgate.pixels.affine import Affine
from pixelgate.pixels.plan import ImagePlan, Patches, View, execute
from pixelgate.pixels.resample import Resample

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
GEOMETRIES = [(14, 2, 2), (16, 2, 2), (16, 1, 1), (8, 3, 1), (13, 2, 3), (20, 1, 2), (5, 2, 2)]
DTYPES = ["float32", "bfloat16", "float16", "uint8"]


def plan_for(height, width, grid, patch, merge, temporal, affine, resample=None):
    size = (grid[0] * merge * patch, grid[1] * merge * patch)
    return ImagePlan(
        height=height,
        width=width,
        views=(View(size, resample or Resample()),),
        layout=Patches(patch, merge, temporal),
        affine=affine,
        tokens=grid[0] * grid[1],
        grid=(1, grid[0] * merge, grid[1] * merge),
    )


def patchify(values, patch, merge, temporal):
    """[3, H, W] to rows, written from the description of the layout, one patch at a time."""
    _, height, width = values.shape
    rows = []
    block = patch * merge
    for top in range(0, height, block):
        for left in range(0, width, block):
            for y in range(top, top + block, patch):
                for x in range(left, left + block, patch):
                    piece = values[:, y : y + patch, x : x + patch]
                    rows.append(np.repeat(piece[:, None], temporal, axis=1).reshape(-1))
    return np.stack(rows)


@pytest.mark.parametrize("level", kernels.available_levels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("patch", "merge", "temporal"), GEOMETRIES)
def test_patches_equal_a_plain_forward(patch, merge, temporal, dtype, level):
    rng = np.random.default_rng(patch)
    for rule in ("torchvision", "pil"):
        affine = Affine(rule, *CLIP)
        plan = plan_for(97, 131, (3, 2), patch, merge, temporal, affine)
        image = rng.integers(0, 256, (97, 131, 3), dtype=np.uint8)
        resized = kernels.resize(image, plan.views[0].resize, Resample(), level="portable")
        table = affine.table_as(dtype)
        values = np.stack([table[c][resized[:, :, c]] for c in range(3)])
        got = execute(plan, image, dtype=dtype, level=level)
        assert got.dtype == table.dtype
        assert got.shape == plan.shape
        assert got.tobytes() == patchify(values, patch, merge, temporal).tobytes()


@pytest.mark.parametrize("level", kernels.available_levels())
def test_large_outputs_take_the_streaming_path(level):
    affine = Affine("torchvision", *CLIP)
    plan = plan_for(300, 500, (20, 30), 14, 2, 2, affine)
    image = np.random.default_rng(1).integers(0, 256, (300, 500, 3), dtype=np.uint8)
    assert plan.nbytes > 8 << 20
    for dtype in DTYPES:
        expected = execute(plan, image, dtype=dtype, level="portable")
        # an odd address: streaming stores need alignment of their own
        memory = np.zeros(expected.nbytes + 64, np.uint8)
        offset = expected.dtype.itemsize
        out = memory[offset : offset + expected.nbytes].view(expected.dtype).reshape(expected.shape)
        assert execute(plan, image, out, dtype=dtype, level=level) is out
        assert out.tobytes() == expected.tobytes()
        assert not memory[:offset].any()
        assert not memory[offset + expected.nbytes :].any()


def test_nothing_is_resampled_when_the_size_fits():
    affine = Affine("pil", (0, 0, 0), (1, 1, 1), 1.0)
    plan = plan_for(56, 84, (2, 3), 14, 2, 1, affine)
    image = np.random.default_rng(2).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    expected = patchify(image.transpose(2, 0, 1).astype(np.float32), 14, 2, 1)
    for level in kernels.available_levels():
        assert execute(plan, image, level=level).tobytes() == expected.tobytes()
        with_padding = np.concatenate([image, image[:, :, :1]], axis=2)
        assert execute(plan, with_padding, level=level).tobytes() == expected.tobytes()


def test_a_plan_knows_its_size_without_pixels():
    plan = plan_for(1080, 1920, (39, 69), 14, 2, 2, Affine("torchvision", *CLIP))
    assert plan.shape == (78 * 138, 1176)
    assert plan.nbytes == 78 * 138 * 1176 * 4
    assert plan.nbytes_as("uint8") * 2 == plan.nbytes_as("bfloat16") == plan.nbytes_as("float16")


def test_execute_refuses_what_does_not_fit_the_plan():
    plan = plan_for(56, 84, (2, 3), 14, 2, 2, Affine("torchvision", *CLIP))
    image = np.zeros((56, 84, 3), np.uint8)
    with pytest.raises(KernelError, match="56x84"):
        execute(plan, image[:55])
    with pytest.raises(KernelError, match="float64"):
        execute(plan, image, dtype="float64")
    with pytest.raises(KernelError, match="float16"):
        execute(plan, image, np.empty(plan.shape, np.float32), dtype="float16")


@pytest.mark.parametrize("rule", ["torchvision", "pil"])
def test_tables_round_to_nearest_even(rule):
    affine = Affine(rule, *CLIP)
    bits = affine.table.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    assert affine.table_as("bfloat16").view(np.uint16).tobytes() == rounded.tobytes()
    assert affine.table_as("bfloat16").dtype == ml_dtypes.bfloat16
    assert (affine.table_as("uint8") == np.arange(256)).all()
    assert affine.table_as("float16") is affine.table_as("float16")


def test_arithmetic_is_used_only_where_it_gives_the_table():
    assert Affine("torchvision", *CLIP).arithmetic is not None
    assert Affine("pil", *CLIP).arithmetic is not None
    # a factor that is no division by 255: the pil table rounds elsewhere, and must be looked up
    odd = Affine("pil", *CLIP, rescale_factor=1 / 127.5)
    assert odd.arithmetic is None
    plan = plan_for(56, 84, (2, 3), 14, 2, 2, odd)
    image = np.random.default_rng(4).integers(0, 256, (56, 84, 3), dtype=np.uint8)
    values = np.stack([odd.table[c][image[:, :, c]] for c in range(3)])
    for level in kernels.available_levels():
        assert execute(plan, image, level=level).tobytes() == patchify(values, 14, 2, 2).tobytes()
