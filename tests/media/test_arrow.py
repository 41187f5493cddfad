"""Pillow's memory, shared."""

import gc

import numpy as np
import PIL.Image
import pytest

from pixelgate.media.arrow import shared_pixels


def noise(height, width, mode="RGB"):
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    return PIL.Image.fromarray(np.random.default_rng(height).integers(0, 256, shape, dtype=np.uint8), mode)


@pytest.mark.parametrize("size", [(1, 1), (3, 5), (480, 640), (1, 4000), (4000, 1)])
def test_the_array_is_the_picture(size):
    image = noise(*size)
    shared = shared_pixels(image)
    assert shared.shape == (*size, 4)
    assert not shared.flags.writeable
    assert shared[:, :, :3].tobytes() == np.asarray(image).tobytes()


def test_it_is_the_same_memory_and_outlives_the_image():
    image = noise(50, 60)
    shared = shared_pixels(image)
    image.putpixel((7, 3), (1, 2, 3))
    assert shared[3, 7, :3].tolist() == [1, 2, 3]
    expected = np.asarray(image).tobytes()
    del image
    gc.collect()
    junk = [noise(50, 60) for _ in range(50)]
    assert shared[:, :, :3].tobytes() == expected
    assert len(junk) == 50


def test_other_modes_are_not_shared():
    assert shared_pixels(noise(4, 4, "L")) is None
    assert shared_pixels(noise(4, 4, "RGBA")) is None


def test_rows_in_several_blocks_are_not_shared():
    core = PIL.Image.core
    usual = core.get_block_size()
    core.set_block_size(1 << 20)
    try:
        in_blocks = noise(1024, 512)  # two of them
    finally:
        core.set_block_size(usual)
    assert shared_pixels(in_blocks) is None
