"""execute() equals a plain numpy forward, for every layout, dtype, rule and level."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from pixelgate.errors import KernelError
from pixelgate.pixels import binding, kernels
from pixelgate.pixels.affine import Affine
from pixelgate.pixels.kernels import Window
from pixelgate.pixels.plan import Canvas, FloatView, ImagePlan, Patches, Tiles, View, execute
from pixelgate.pixels.resample import Resample
from pixelgate.pixels.unpack import unpack

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


@pytest.mark.parametrize("level", binding.available_levels())
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


@pytest.mark.parametrize("level", binding.available_levels())
def test_large_outputs_take_the_streaming_path(level):
    affine = Affine("torchvision", *CLIP)
    plan = plan_for(300, 500, (40, 60), 14, 2, 2, affine)
    image = np.random.default_rng(1).integers(0, 256, (300, 500, 3), dtype=np.uint8)
    assert plan.nbytes_as("uint8") > 8 << 20
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
    for level in binding.available_levels():
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
    for level in binding.available_levels():
        assert execute(plan, image, level=level).tobytes() == patchify(values, 14, 2, 2).tobytes()


# ------------------------------------------------------------------------------------------------------------- tiles


def tiles_plan(image, *views, affine=None):
    affine = affine or Affine("torchvision", *CLIP)
    return ImagePlan(*image.shape[:2], views, Tiles(), affine, tokens=0)


def plain_tiles(canvas, tile, table):
    """uint8 [H, W, 3] to [tiles, 3, h, w], one tile at a time."""
    made = []
    for top in range(0, canvas.shape[0], tile[0]):
        for left in range(0, canvas.shape[1], tile[1]):
            piece = canvas[top : top + tile[0], left : left + tile[1]]
            made.append(np.stack([table[c][piece[:, :, c]] for c in range(3)]))
    return np.stack(made)


def on_canvas(picture, pad):
    canvas = np.full((pad.height, pad.width, 3), pad.fill, np.uint8)
    canvas[pad.top : pad.top + picture.shape[0], pad.left : pad.left + picture.shape[1]] = picture
    return canvas


@pytest.mark.parametrize("level", binding.available_levels())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [(30, 45), (60, 90), (15, 6), (60, 1)])
def test_tiles_equal_a_plain_forward(tile, dtype, level):
    image = np.random.default_rng(7).integers(0, 256, (110, 133, 3), dtype=np.uint8)
    pad = Canvas(7, 11, 60, 90, (1, 200, 31))
    for rule in ("torchvision", "pil"):
        affine = Affine(rule, *CLIP)
        resample = Resample("bilinear", "pillow" if rule == "pil" else "torchvision")
        plan = tiles_plan(image, View((50, 70), resample, pad=pad, tile=tile), affine=affine)
        canvas = on_canvas(kernels.resize(image, (50, 70), resample, level="portable"), pad)
        got = execute(plan, image, dtype=dtype, level=level)
        assert got.tobytes() == plain_tiles(canvas, tile, affine.table_as(dtype)).tobytes()
        restored = unpack(plan, got)
        if dtype in ("float32", "uint8"):
            assert restored.tobytes() == canvas.tobytes()


def test_views_follow_each_other():
    image = np.random.default_rng(8).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    base = View((56, 56), Resample())
    anyres = View((100, 150), Resample(), pad=Canvas(6, 9, 112, 168), tile=(56, 56))
    plan = tiles_plan(image, base, anyres)
    assert plan.shape == (7, 3, 56, 56)
    assert plan.nbytes == 7 * 3 * 56 * 56 * 4
    got = execute(plan, image)
    table = plan.affine.table
    assert got[:1].tobytes() == plain_tiles(kernels.resize(image, (56, 56), Resample()), (56, 56), table).tobytes()
    canvas = on_canvas(kernels.resize(image, (100, 150), Resample()), anyres.pad)
    assert got[1:].tobytes() == plain_tiles(canvas, (56, 56), table).tobytes()
    assert unpack(plan, got, view=1).tobytes() == canvas.tobytes()


def test_a_crop_computes_the_window_alone():
    image = np.random.default_rng(9).integers(0, 256, (300, 500, 3), dtype=np.uint8)
    for semantics in ("torchvision", "pillow"):
        resample = Resample("bicubic", semantics)
        plan = tiles_plan(image, View((336, 560), resample, crop=Window(0, 112, 336, 336)))
        whole = kernels.resize(image, (336, 560), resample)
        assert plan.shape == (1, 3, 336, 336)
        expected = plain_tiles(whole[:, 112:448], (336, 336), plan.affine.table)
        for level in binding.available_levels():
            assert execute(plan, image, level=level).tobytes() == expected.tobytes()


def test_padding_before_the_resize():
    image = np.random.default_rng(10).integers(0, 256, (40, 100, 3), dtype=np.uint8)
    square = Canvas(30, 0, 100, 100, (122, 116, 104))
    plan = tiles_plan(image, View((64, 64), Resample(), pre_pad=square))
    expected = kernels.resize(on_canvas(image, square), (64, 64), Resample())
    with_padding = np.concatenate([image, image[:, :, :1]], axis=2)
    for source in (image, with_padding):
        assert execute(plan, source).tobytes() == plain_tiles(expected, (64, 64), plan.affine.table).tobytes()


def test_a_transposed_resize_is_the_resize_of_the_transposed_picture():
    image = np.random.default_rng(11).integers(0, 256, (400, 90, 3), dtype=np.uint8)
    for resample in (Resample("bilinear", "pillow"), Resample("bilinear", "pillow", "12.1"), Resample("bilinear")):
        for size in ((200, 60), (390, 45), (410, 100)):
            turned = np.ascontiguousarray(image.transpose(1, 0, 2))
            expected = kernels.resize(turned, size[::-1], resample).transpose(1, 0, 2)
            plan = tiles_plan(image, View(size, resample, transpose=True))
            assert execute(plan, image).tobytes() == plain_tiles(expected, size, plan.affine.table).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_float_view_is_interpolated_from_the_finished_floats(dtype):
    image = np.random.default_rng(12).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    hd = View((100, 130), Resample("bilinear"), pad=Canvas(0, 0, 112, 168, (255, 255, 255)), tile=(56, 56))
    plan = tiles_plan(image, FloatView((56, 56), hd), hd)
    got = execute(plan, image, dtype=dtype)
    canvas = on_canvas(kernels.resize(image, (100, 130), Resample("bilinear")), hd.pad)
    floats = kernels.bicubic_f32(canvas, (56, 56), plan.affine.table)
    assert got[0].tobytes() == floats.astype(got.dtype).tobytes()
    assert got[1:].tobytes() == plain_tiles(canvas, (56, 56), plan.affine.table_as(dtype)).tobytes()
    assert unpack(plan, got).shape == (56, 56, 3)
    with pytest.raises(KernelError, match="no uint8 tensor"):
        execute(plan, image, dtype="uint8")


def test_patches_take_a_single_plain_view():
    plan = plan_for(56, 84, (2, 3), 14, 2, 2, Affine("torchvision", *CLIP))
    cropped = View((84, 84), Resample(), crop=Window(0, 0, 56, 84))
    image = np.zeros((56, 84, 3), np.uint8)
    for views in ((cropped,), (plan.views[0], plan.views[0])):
        with pytest.raises(KernelError, match="single view"):
            execute(dataclasses.replace(plan, views=views), image)
