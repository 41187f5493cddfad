"""Resizes equal Pillow's and torch's, at every instruction-set level."""

import json

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldens import golden
from goldens.cases import FLOAT_TABLE, PILLOW_FILTERS, TORCHVISION_FILTERS, resize_cases
from pixelgate.pixels import binding, kernels
from pixelgate.pixels.kernels import Window
from pixelgate.pixels.resample import Resample, make_axis

LEVELS = binding.available_levels()
HASHES = json.loads((golden.COMMITTED / "resize.json").read_text())


def pillow_resize(image, size, kind):
    height, width = size
    return np.asarray(PIL.Image.fromarray(image).resize((width, height), PIL.Image.Resampling[kind.upper()]))


def sources(image):
    """The same picture as RGB, as RGB with a byte to ignore, and as a window of a wider array."""
    padding = np.full((*image.shape[:2], 1), 77, np.uint8)
    wide = np.zeros((image.shape[0], image.shape[1] + 3, 3), np.uint8)
    wide[:, :-3] = image
    return image, np.concatenate([image, padding], axis=2), wide[:, :-3]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", PILLOW_FILTERS)
def test_pillow_semantics_equal_the_installed_pillow(kind, level):
    for name, image, size in resize_cases():
        expected = pillow_resize(image, size, kind)
        for source in sources(image):
            got = kernels.resize(source, size, Resample(kind, "pillow"), level=level)
            assert got.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", TORCHVISION_FILTERS)
def test_torchvision_semantics_equal_the_goldens(kind, level):
    for name, image, size in resize_cases():
        for source in sources(image):
            got = kernels.resize(source, size, Resample(kind, "torchvision"), level=level)
            assert golden.sha256(got) == HASHES[f"{name}/{kind}"], name


def test_float32_bicubic_equals_the_goldens():
    for name, image, size in resize_cases():
        got = kernels.bicubic_f32(image, size, FLOAT_TABLE)
        assert golden.sha256(got) == HASHES[f"{name}/bicubic_f32"], name


def test_every_golden_is_compared():
    names = [name for name, _, _ in resize_cases()]
    assert set(HASHES) == {f"{name}/{kind}" for name in names for kind in (*TORCHVISION_FILTERS, "bicubic_f32")}


sides = st.integers(1, 300)


@settings(max_examples=60, deadline=None)
@given(sides, sides, sides, sides, st.sampled_from(PILLOW_FILTERS), st.integers(0, 1000))
def test_random_shapes_equal_pillow_and_all_levels_agree(height, width, new_height, new_width, kind, seed):
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    size = (new_height, new_width)
    expected = pillow_resize(image, size, kind)
    for level in LEVELS:
        assert kernels.resize(image, size, Resample(kind, "pillow"), level=level).tobytes() == expected.tobytes()
    if kind in TORCHVISION_FILTERS:
        torchvision = {kernels.resize(image, size, Resample(kind), level=level).tobytes() for level in LEVELS}
        assert len(torchvision) == 1


@settings(max_examples=60, deadline=None)
@given(sides, sides, st.integers(2, 200), st.integers(2, 200), st.data())
def test_a_window_is_a_part_of_the_whole(height, width, new_height, new_width, data):
    image = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    top, left = data.draw(st.integers(0, new_height - 1)), data.draw(st.integers(0, new_width - 1))
    window = Window(top, left, data.draw(st.integers(1, new_height - top)), data.draw(st.integers(1, new_width - left)))
    kind = data.draw(st.sampled_from(PILLOW_FILTERS))
    for semantics in ("pillow", "torchvision") if kind in TORCHVISION_FILTERS else ("pillow",):
        resample = Resample(kind, semantics)
        whole = kernels.resize(image, (new_height, new_width), resample, level="portable")
        expected = whole[top : top + window.height, left : left + window.width]
        for level in LEVELS:
            got = kernels.resize(image, (new_height, new_width), resample, window=window, level=level)
            assert got.tobytes() == expected.tobytes()


def test_older_pillow_orders_are_the_passes_done_by_hand():
    image = np.random.default_rng(3).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    size = (300, 620)
    first_horizontal = pillow_resize(pillow_resize(image, (480, 620), "bicubic"), size, "bicubic")
    first_vertical = pillow_resize(pillow_resize(image, (300, 640), "bicubic"), size, "bicubic")
    assert first_horizontal.tobytes() != first_vertical.tobytes()
    for order, expected in (("13", first_vertical), ("12.2", first_horizontal), ("12.1", first_horizontal)):
        got = kernels.resize(image, size, Resample("bicubic", "pillow", order))
        assert got.tobytes() == expected.tobytes(), order
    forced = kernels.resize(image, size, Resample("bicubic", "pillow", "12.1"), vertical_first=True)
    assert forced.tobytes() == first_vertical.tobytes()


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


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"filter": "cubic"}, "is not one of"),
        ({"semantics": "cv2"}, "is not one of"),
        ({"pillow_order": "11"}, "is not one of"),
        ({"filter": "box"}, "only Pillow has"),
        ({"filter": "hamming"}, "only Pillow has"),
    ],
)
def test_what_a_library_cannot_do_is_refused(choice, message):
    with pytest.raises(ValueError, match=message):
        Resample(**choice)


def test_every_output_has_a_tap():
    for kind in PILLOW_FILTERS:
        for size_in, size_out in ((1, 9), (9, 1), (100, 99), (3000, 7), (7, 3000)):
            axis = make_axis(size_in, size_out, kind, "pillow")
            assert axis.count.min() >= 1
            assert (axis.start >= 0).all()
            assert ((axis.start + axis.count) <= size_in).all()
