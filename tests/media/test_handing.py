"""Which pictures may go on as they are, and what the others become."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from pixelgate.errors import DecodeError, TooLargeError
from pixelgate.media.decode import decode, plain
from pixelgate.media.handing import handed_on, png
from pixelgate.media.policy import MediaPolicy

POLICY = MediaPolicy()
PIXELS = np.random.default_rng(1).integers(0, 256, (24, 32, 4), np.uint8)


def encoded(mode="RGB", form="PNG", **options):
    file = io.BytesIO()
    Image.fromarray(PIXELS, "RGBA").convert(mode).save(file, form, **options)
    return file.getvalue()


def png8():
    file = io.BytesIO()
    Image.fromarray(PIXELS[:, :, 0]).convert("P").save(file, "PNG")
    return file.getvalue()


def grey16():
    file = io.BytesIO()
    Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 257).save(file, "PNG")
    return file.getvalue()


def exif(orientation):
    found = Image.Exif()
    found[0x0112] = orientation
    return found


FRAMES = [Image.fromarray(PIXELS[:, :, :3]), Image.fromarray(255 - PIXELS[:, :, :3])]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (encoded(), "png"),
        (encoded("L"), "png"),
        (png8(), "png"),
        (encoded(form="JPEG"), "jpeg"),
        (encoded("L", form="JPEG", exif=exif(1)), "jpeg"),
        (encoded(form="WEBP", lossless=True), "webp"),
    ],
)
def test_plain_pictures_go_on_as_they_are(data, kind):
    assert handed_on(data, POLICY) == (data, f"image/{kind}")


@pytest.mark.parametrize(
    "data",
    [
        encoded("RGBA"),
        encoded("LA"),
        encoded("1"),
        encoded("P", transparency=3),
        encoded(transparency=(1, 2, 3)),
        grey16(),
        encoded("CMYK", form="JPEG"),
        encoded(form="JPEG", exif=exif(6)),
        encoded(form="PNG", exif=exif(3)),
        encoded("RGBA", form="WEBP"),
        encoded(form="WEBP", save_all=True, append_images=FRAMES),
        encoded("P", form="GIF"),
        encoded(form="BMP"),
        encoded(form="TIFF"),
    ],
)
def test_all_others_become_what_we_see(data):
    assert plain(data, POLICY) is None
    file, kind = handed_on(data, POLICY)
    assert kind == "image/png"
    assert plain(file, POLICY) == "PNG"
    assert np.array_equal(decode(file, POLICY), decode(data, POLICY))


def test_what_is_refused_is_not_handed_on():
    with pytest.raises(DecodeError):
        handed_on(b"no picture", POLICY)
    with pytest.raises(TooLargeError):
        handed_on(encoded(), MediaPolicy(max_pixels=100))


def test_png_keeps_every_pixel():
    pixels = np.ascontiguousarray(PIXELS[:, :, :3])
    assert np.array_equal(decode(png(pixels), POLICY), pixels)
