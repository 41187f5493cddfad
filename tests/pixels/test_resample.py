"""Resizes equal Pillow's and torchvision's, at every instruction-set level."""

import json

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldens import golden
from goldens.cases import RESIZE_FILTERS, resize_cases
from pixelgate.pixels import kernels
from pixelgate.pixels.resample import Resample, axis

PILLOW = {
    "bicubic": PIL.Image.Resampling.BICUBIC,
    "bilinear": PIL.Image.Resampling.BILINEAR,
    "lanczos": PIL.Image.Resampling.LANCZOS,
}
LEVELS = kernels.available_levels()


def pillow_resize(image, size, kind):
    height, width = size
    return np.asarray(PIL.Image.fromarray(image).resize((width, height), PILLOW[kind]))


def sources(image):
    """The same picture as RGB, as RGB with a byte to ignore, and as a window of a wider array."""
    padding = np.full((*image.shape[:2], 1), 77, np.uint8)
    wide = np.zeros((image.shape[0], image.shape[1] + 3, 3), np.uint8)
    wide[:, :-3] = image
    return image, np.concatenate([image, padding], axis=2), wide[:, :-3]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", RESIZE_FILTERS)
def test_pillow_semantics_equal_the_installed_pillow(kind, level):
    for name, image, size in resize_cases():
        expected = pillow_resize(image, size, kind)
        for source in sources(image):
            got = kernels.resize(source, size, Resample(kind, "pillow"), level=level)
            assert got.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", RESIZE_FILTERS)
def test_torchvision_semantics_equal_the_goldens(kind, level):
    hashes = json.loads((golden.COMMITTED / "resize.json").read_text())
    cases = list(resize_cases())
    assert len(hashes) == len(cases) * len(RESIZE_FILTERS)
    for name, image, size in cases:
        for source in sources(image):
            got = kernels.resize(source, size, Resample(kind, "torchvision"), level=level)
            assert golden.sha256(got) == hashes[f"{name}/{kind}"], name


@settings(max_examples=60, deadline=None)
@given(
    height=st.integers(1, 300),
    width=st.integers(1, 300),
    new_height=st.integers(1, 300),
    new_width=st.integers(1, 300),
    kind=st.sampled_from(RESIZE_FILTERS),
    seed=st.integers(0, 1000),
)
def test_random_shapes_equal_pillow_and_all_levels_agree(height, width, new_height, new_width, kind, seed):
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    size = (new_height, new_width)
    expected = pillow_resize(image, size, kind)
    for level in LEVELS:
        assert kernels.resize(image, size, Resample(kind, "pillow"), level=level).tobytes() == expected.tobytes()
    torchvision = {kernels.resize(image, size, Resample(kind), level=level).tobytes() for level in LEVELS}
    assert len(torchvision) == 1


def test_older_pillow_orders_are_the_passes_done_by_hand():
    image = np.random.default_rng(3).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    size = (300, 620)
    first_horizontal = pillow_resize(pillow_resize(image, (480, 620), "bicubic"), size, "bicubic")
    first_vertical = pillow_resize(pillow_resize(image, (300, 640), "bicubic"), size, "bicubic")
    assert first_horizontal.tobytes() != first_vertical.tobytes()
    for order, expected in (("13", first_vertical), ("12.2", first_horizontal), ("12.1", first_horizontal)):
        got = kernels.resize(image, size, Resample("bicubic", "pillow", order))
        assert got.tobytes() == expected.tobytes(), order


@pytest.mark.parametrize(
    ("order", "source", "target", "expected"),
    [
        ("13", (480, 640), (476, 644), True),
        ("13", (640, 480), (448, 336), False),
        ("13", (100, 100), (99, 100), True),
        ("13", (100, 100), (98, 99), False),
        ("13", (100, 100), (100, 50), False),
        ("12.2", (480, 640), (476, 644), False),
        ("12.2", (1010, 10), (500, 10), True),
        ("12.2", (1000, 10), (500, 10), False),
        ("12.2", (1010, 10), (1010, 5), False),
        ("12.1", (1010, 10), (500, 10), False),
    ],
)
def test_pass_order_rules(order, source, target, expected):
    assert Resample("bicubic", "pillow", order).vertical_first(source, target) is expected
    assert Resample("bicubic", "torchvision", order).vertical_first(source, target) is False


@pytest.mark.parametrize("field", [{"filter": "cubic"}, {"semantics": "cv2"}, {"pillow_order": "11"}])
def test_unknown_ways_to_resize_are_refused(field):
    with pytest.raises(ValueError, match="is not one of"):
        Resample(**field)


def test_weights_are_shared_and_read_only():
    first = axis(100, 50, "bicubic", "pillow")
    assert axis(100, 50, "bicubic", "pillow") is first
    assert first.count.min() >= 1
    with pytest.raises(ValueError, match="read-only"):
        first.weights[0, 0] = 1
