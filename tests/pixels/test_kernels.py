"""A wrong array raises; it never reaches a pointer."""

import ctypes

import numpy as np
import pytest

from pixelgate.errors import ConfigError, KernelError
from pixelgate.pixels import kernels
from pixelgate.pixels.affine import Affine
from pixelgate.pixels.resample import Resample

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
    for level in kernels.available_levels():
        memory = np.full(24 * 1176 + 64, 7.0, np.float32)
        patches(out=memory[32:-32].reshape(24, 1176), level=level)
        assert (memory[:32] == 7).all()
        assert (memory[-32:] == 7).all()
        assert (memory[32:-32] == -1).all()


def test_levels_can_be_forced_and_unknown_ones_are_refused():
    assert kernels.available_levels()[0] == "portable"
    try:
        kernels.select_level("portable")
        assert kernels.default_level() == "portable"
    finally:
        kernels.select_level(None)
    assert kernels.default_level() == kernels.available_levels()[-1]
    with pytest.raises(ConfigError, match="sse9"):
        kernels.select_level("sse9")
    with pytest.raises(KernelError, match="portable"):
        patches(level="sse9")


def test_the_structure_mirrors_the_native_one():
    assert kernels._library.pixelgate_job_size() == ctypes.sizeof(kernels._Job)
