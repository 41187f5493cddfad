"""A wrong array raises; it never reaches a pointer."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pixelgate.errors import ConfigError, KernelError
from pixelgate.pixels import binding, kernels
from pixelgate.pixels.affine import NUMPY_DTYPES, Affine, Arithmetic
from pixelgate.pixels.kernels import Window
from pixelgate.pixels.resample import Resample, make_axis

AFFINE = Affine("torchvision", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
PICTURE = np.zeros((40, 60, 3), np.uint8)


def patches(image=PICTURE, size=(56, 84), out=None, table=None, patch=14, merge=2, temporal=2, level=None):
    out = np.empty((4 * 6, 1176), np.float32) if out is None else out
    table = AFFINE.table_as("float32") if table is None else table
    kernels.patches(image, size, Resample(), out, patch=patch, merge=merge, temporal=temporal, table=table, level=level)
    return out


@pytest.mark.parametrize(
    "image",
    [
        PICTURE.astype(np.int8),
        PICTURE.astype(np.float32),
        PICTURE[:, :, 0],
        np.zeros((40, 60, 1), np.uint8),
        np.zeros((40, 60, 5), np.uint8),
        np.zeros((0, 60, 3), np.uint8),
        np.zeros((40, 0, 3), np.uint8),
        PICTURE[::-1],
        PICTURE[:, ::2],
        PICTURE[:, :, ::-1],
        PICTURE.transpose(1, 0, 2),
        np.broadcast_to(PICTURE[:1], (40, 60, 3)),
        np.zeros((1, kernels.MAX_SIDE + 1, 3), np.uint8),
    ],
)
def test_a_picture_of_the_wrong_kind_is_refused(image):
    with pytest.raises(KernelError):
        kernels.resize(image, (20, 20), Resample())
    with pytest.raises(KernelError):
        patches(image=image)


@pytest.mark.parametrize(
    "out",
    [
        np.empty((24, 1175), np.float32),
        np.empty((23, 1176), np.float32),
        np.empty((24 * 1176,), np.float32),
        np.empty((24, 1176), np.float64),
        np.empty((24, 1176), np.int32),
        np.empty((24, 1176), ">f4"),
        np.empty((24, 2352), np.float32)[:, ::2],
        np.empty((1176, 24), np.float32).T,
        np.broadcast_to(np.float32(0), (24, 1176)),
    ],
)
def test_an_output_that_does_not_fit_is_refused(out):
    with pytest.raises(KernelError):
        patches(out=out)


@pytest.mark.parametrize(
    "table",
    [
        AFFINE.table_as("uint8"),
        AFFINE.table_as("float32")[:2],
        AFFINE.table_as("float32")[:, :255],
        np.zeros((256, 3), np.float32).T,
    ],
)
def test_a_wrong_table_is_refused(table):
    with pytest.raises(KernelError, match="table"):
        patches(table=table)


@pytest.mark.parametrize("geometry", [{"patch": 0}, {"merge": 0}, {"temporal": 0}, {"patch": 13}, {"temporal": 2000}])
def test_impossible_patches_are_refused(geometry):
    with pytest.raises(KernelError):
        patches(**geometry)


@pytest.mark.parametrize("size", [(0, 20), (20, -1), (kernels.MAX_SIDE + 1, 1)])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(KernelError, match="size"):
        kernels.resize(PICTURE, size, Resample())


def test_output_in_the_memory_of_the_picture_is_refused():
    memory = np.zeros(24 * 1176 * 4, np.uint8)
    image = memory[: 40 * 60 * 3].reshape(40, 60, 3)
    with pytest.raises(KernelError, match="shares memory"):
        patches(image=image, out=memory.view(np.float32).reshape(24, 1176))


def test_nothing_is_written_around_the_output():
    for level in binding.available_levels():
        memory = np.full(24 * 1176 + 64, 7.0, np.float32)
        patches(out=memory[32:-32].reshape(24, 1176), level=level)
        assert (memory[:32] == 7).all()
        assert (memory[-32:] == 7).all()
        assert (memory[32:-32] == -1).all()


@pytest.mark.parametrize("level", binding.available_levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_table_decides_where_arithmetic_gives_something_else(level, dtype):
    picture = np.arange(56 * 84 * 3, dtype=np.uint8).reshape(56, 84, 3)
    wrong = Arithmetic(1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    table = AFFINE.table_as(dtype)
    expected = np.stack([table[c][picture[:, :, c]] for c in range(3)])
    tile = np.empty((1, 3, 56, 84), NUMPY_DTYPES[dtype])
    kernels.tiles(picture, (56, 84), Resample(), tile, table=table, arithmetic=wrong, level=level)
    assert tile.tobytes() == expected.tobytes()
    out = np.empty((4 * 6, 3 * 14 * 14), NUMPY_DTYPES[dtype])
    kernels.patches(
        picture,
        (56, 84),
        Resample(),
        out,
        patch=14,
        merge=1,
        temporal=1,
        table=table,
        arithmetic=wrong,
        level=level,
    )
    assert out.tobytes() == expected.reshape(3, 4, 14, 6, 14).transpose(1, 3, 0, 2, 4).tobytes()


@pytest.mark.parametrize("level", binding.available_levels())
@pytest.mark.parametrize(("patch", "merge", "temporal"), [(8, 3, 2), (13, 1, 3), (14, 2, 2), (16, 2, 1), (16, 5, 2)])
@pytest.mark.parametrize("offset", [0, 4, 60])
def test_large_outputs_may_begin_anywhere(level, patch, merge, temporal, offset):
    rows, columns = 6 * merge, -(-1800 // patch // merge) * merge
    while rows * columns * patch * patch * 12 * temporal < 8 << 20:  # from there on stores bypass the cache
        rows += merge
    height, width = rows * patch, columns * patch
    picture = np.random.default_rng(patch).integers(0, 256, (height - 5, width + 7, 3), np.uint8)
    shape = (rows * columns, 3 * temporal * patch * patch)
    memory = np.full(rows * columns * shape[1] * 4 + 192, 77, np.uint8)
    begin = 64 + -memory.ctypes.data % 64 + offset
    out = memory[begin : begin + rows * columns * shape[1] * 4].view(np.float32).reshape(shape)
    affine = Affine("torchvision", (0.48, 0.46, 0.41), (0.27, 0.26, 0.28))
    options = {"table": affine.table_as("float32"), "arithmetic": affine.arithmetic, "level": level}
    kernels.patches(picture, (height, width), Resample(), out, patch=patch, merge=merge, temporal=temporal, **options)
    resized = kernels.resize(picture, (height, width), Resample(), level="portable")
    planes = np.stack([affine.table[c][resized[:, :, c]] for c in range(3)])
    grid = planes.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
    expected = np.repeat(grid.reshape(rows * columns, 3, 1, patch, patch), temporal, axis=2)
    assert np.array_equal(out.reshape(expected.shape), expected)
    assert (memory[:begin] == 77).all()
    assert (memory[begin + out.nbytes :] == 77).all()


def test_levels_can_be_forced_and_unknown_ones_are_refused():
    assert binding.available_levels()[0] == "portable"
    try:
        binding.select_level("portable")
        assert binding.default_level() == "portable"
    finally:
        binding.select_level(None)
    assert binding.default_level() == binding.available_levels()[-1]
    with pytest.raises(ConfigError, match="sse9"):
        binding.select_level("sse9")
    with pytest.raises(KernelError, match="portable"):
        patches(level="sse9")


def test_the_structures_mirror_the_native_ones():
    assert binding._library.pixelgate_job_size() == ctypes.sizeof(binding.Job)
    assert binding._library.pixelgate_bicubic_job_size() == ctypes.sizeof(binding.BicubicJob)


# ------------------------------------------------------------------------------------------------------------- tiles


def tiles(out=None, image=PICTURE, size=(28, 42), table=None, **options):
    out = np.empty((6, 3, 14, 14), np.float32) if out is None else out
    table = AFFINE.table_as("float32") if table is None else table
    kernels.tiles(image, size, Resample(), out, table=table, **options)
    return out


@pytest.mark.parametrize(
    "out",
    [
        np.empty((5, 3, 14, 14), np.float32),
        np.empty((6, 4, 14, 14), np.float32),
        np.empty((6, 3, 14, 13), np.float32),
        np.empty((6, 3 * 14 * 14), np.float32),
        np.empty((0, 3, 14, 14), np.float32),
        np.empty((6, 3, 14, 14), np.float64),
        np.empty((6, 3, 14, 28), np.float32)[..., ::2],
        np.empty((6, 3, 14, 14), np.float32)[..., ::-1],
        np.empty((6, 3, 14, 14), np.float32)[::-1],
        np.broadcast_to(np.float32(0), (6, 3, 14, 14)),
        np.lib.stride_tricks.as_strided(np.empty(9000, np.float32), (6, 3, 14, 14), (4, 784, 56, 4)),
        np.lib.stride_tricks.as_strided(np.empty(9000, np.float32), (6, 3, 14, 14), (2352, 784, 28, 4)),
    ],
)
def test_tiles_that_do_not_fit_are_refused(out):
    with pytest.raises(KernelError):
        tiles(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"canvas": (28, 41)}, "does not fit"),
        ({"canvas": (56, 84), "position": (29, 0)}, "does not fit"),
        ({"canvas": (56, 84), "position": (-1, 0)}, "does not fit"),
        ({"fill": (0, 0, 256)}, "fill"),
        ({"window": Window(0, 0, 29, 1)}, "inside"),
        ({"window": Window(0, 0, 0, 1)}, "inside"),
        ({"window": Window(-1, 0, 2, 2)}, "inside"),
        ({"table": AFFINE.table_as("uint8")}, "table"),
    ],
)
def test_impossible_tiles_are_refused(options, message):
    with pytest.raises(KernelError, match=message):
        tiles(**options)


def test_tiles_may_be_parts_of_a_larger_array():
    memory = np.full((6, 5, 20, 31), 7, np.float32)
    part = memory[:, 1:4, 2:16, 3:17]
    for level in binding.available_levels():
        memory[:] = 7
        tiles(part, level=level)
        assert part.tobytes() == tiles(level="portable").tobytes()
        assert np.count_nonzero(memory != 7) == part.size


def test_the_float_view_checks_its_arrays():
    with pytest.raises(KernelError, match="uint8"):
        kernels.bicubic_f32(PICTURE.astype(np.float32), (9, 9), AFFINE.table)
    with pytest.raises(KernelError, match="3\\]"):
        kernels.bicubic_f32(np.zeros((4, 4, 4), np.uint8), (9, 9), AFFINE.table)
    with pytest.raises(KernelError, match="table"):
        kernels.bicubic_f32(PICTURE, (9, 9), AFFINE.table_as("float16"))
    with pytest.raises(KernelError, match="size"):
        kernels.bicubic_f32(PICTURE, (0, 9), AFFINE.table)


# ------------------------------------------------------------------------------------------------------- weight cache


def test_the_weight_cache_is_bounded_and_shares():
    cache = binding.WeightCache(100_000)

    def make(size):
        return lambda: (binding.Weights(make_axis(size, 50, "bicubic", "pillow"), 3, "portable"), slice(0, size))

    first = cache.get(100, make(100))
    assert cache.get(100, make(100)) is first
    for size in range(101, 160):
        cache.get(size, make(size))
        assert cache.nbytes <= 100_000
    assert cache.get(100, make(100)) is not first


def test_weights_in_use_outlive_the_cache(monkeypatch):
    monkeypatch.setattr(binding, "_cache", binding.WeightCache(0))
    image = np.random.default_rng(5).integers(0, 256, (99, 98, 3), dtype=np.uint8)
    got = kernels.resize(image, (51, 52), Resample())
    assert binding._cache.nbytes == 0
    monkeypatch.undo()
    assert got.tobytes() == kernels.resize(image, (51, 52), Resample()).tobytes()


def test_threads_may_share_weights():
    image = np.random.default_rng(6).integers(0, 256, (301, 299, 3), dtype=np.uint8)
    expected = kernels.resize(image, (97, 103), Resample()).tobytes()
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(lambda _: kernels.resize(image, (97, 103), Resample()).tobytes(), range(40))
        assert set(results) == {expected}
