"""The faster decoders give Pillow's pixels, and refuse nothing and accept nothing of their own."""

import io
import sys

import numpy as np
import PIL.Image
import pytest

from pixelgate.errors import PixelgateError
from pixelgate.media import decode as decoder
from pixelgate.media import fast
from pixelgate.media.policy import MediaPolicy

POLICY = MediaPolicy()


def picture(height, width, seed, mode="RGB"):
    rng = np.random.default_rng(seed)
    small = PIL.Image.fromarray(rng.integers(0, 256, (height // 5 + 1, width // 7 + 1, 3), dtype=np.uint8))
    image = np.asarray(small.resize((width, height))).astype(np.int16) + rng.integers(-9, 10, (height, width, 3))
    return PIL.Image.fromarray(np.clip(image, 0, 255).astype(np.uint8)).convert(mode)


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def files():
    """Random files of every kind that the decoders take, and of kinds that they must leave alone."""
    rng = np.random.default_rng(1)
    for seed in range(60):
        height, width = (int(v) for v in rng.integers(1, 90, 2))
        options = {
            "quality": int(rng.integers(20, 100)),
            "subsampling": int(rng.integers(0, 3)),
            "progressive": bool(rng.integers(0, 2)),
            "optimize": bool(rng.integers(0, 2)),
        }
        if seed % 5 == 0:
            options["restart_marker_blocks"] = 3
        mode = ("RGB", "L", "CMYK")[seed % 3]
        yield f"{mode} JPEG {seed}", encoded(picture(height, width, seed, mode), "JPEG", **options)
        mode = ("RGB", "RGBA", "L", "P", "LA", "1")[seed % 6]
        image = picture(height, width, seed, mode if mode != "LA" else "RGB").convert(mode)
        if mode == "RGBA" and seed % 4:
            image.putalpha(picture(height, width, seed + 1, "L"))
        transparent = {"transparency": (1, 2, 3)} if mode == "RGB" and seed % 4 == 0 else {}
        level = int(rng.integers(0, 10))
        yield f"{mode} PNG {seed}", encoded(image, "PNG", compress_level=level, **transparent)
    deep = np.random.default_rng(2).integers(0, 1 << 16, (9, 11), dtype=np.uint16)
    yield "16-bit PNG", encoded(PIL.Image.fromarray(deep), "PNG")


def outcome(data):
    try:
        return decoder.decode(data, POLICY).tobytes()
    except PixelgateError as error:
        return type(error), error.message


def both(data, monkeypatch):
    with_fast = outcome(data)
    with monkeypatch.context() as patch:
        patch.setattr(fast, "DECODERS", {})
        return with_fast, outcome(data)


def test_the_extra_is_installed_here():
    assert set(fast.DECODERS) == {"JPEG", "PNG"}
    assert [version.split()[0] for version in fast.VERSIONS] == ["simplejpeg", "pyspng"]


def test_pixels_equal_pillows_on_random_files(monkeypatch):
    for name, data in files():
        with_fast, without = both(data, monkeypatch)
        assert isinstance(without, bytes), name
        assert with_fast == without, name


def test_damaged_files_end_as_they_do_with_pillow(monkeypatch):
    rng = np.random.default_rng(3)
    sources = [data for _, data in files()]
    for number in range(600):
        data = bytearray(sources[number % len(sources)])
        for _ in range(int(rng.integers(1, 4))):
            data[int(rng.integers(0, len(data)))] = int(rng.integers(0, 256))
        if number % 3 == 0:
            del data[int(rng.integers(2, len(data))) :]
        with_fast, without = both(bytes(data), monkeypatch)
        assert with_fast == without, number


@pytest.mark.parametrize("size", [(1, 1), (17, 33), (300, 200)])
def test_rows_of_either_decoder_hold_the_same_pixels(size, monkeypatch):
    for kind, mode in (("JPEG", "RGB"), ("PNG", "RGB"), ("PNG", "RGBA")):
        data = encoded(picture(*size, 4, mode), kind)
        expected = decoder.decode(data, POLICY).tobytes()
        for decoders in (fast.DECODERS, {}):
            monkeypatch.setattr(fast, "DECODERS", decoders)
            rows = decoder.decode_rows(data, POLICY)
            assert rows[:, :, :3].tobytes() == expected


def test_what_is_not_plain_is_left_to_pillow():
    for image, kind, options in (
        (picture(9, 9, 5, "CMYK"), "JPEG", {}),
        (picture(9, 9, 5, "L"), "PNG", {}),
        (picture(9, 9, 5), "PNG", {"transparency": (1, 2, 3)}),
        (picture(9, 9, 5), "WEBP", {}),
    ):
        data = encoded(image, kind, **options)
        opened = PIL.Image.open(io.BytesIO(data))
        assert fast.decode(data, opened, kind) is None


def test_without_the_extra_there_are_no_decoders(monkeypatch):
    for name in ("simplejpeg", "pyspng"):
        monkeypatch.setitem(sys.modules, name, None)
    assert fast._found() == ({}, ())


def test_a_decoder_that_gives_another_size_is_not_believed(monkeypatch):
    data = encoded(picture(9, 9, 5), "JPEG")
    monkeypatch.setattr(fast, "DECODERS", {"JPEG": lambda _: np.zeros((8, 9, 3), np.uint8)})
    assert decoder.decode(data, POLICY).shape == (9, 9, 3)
