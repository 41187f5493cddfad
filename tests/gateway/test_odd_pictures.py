"""What people really send, through the gateway: the library's tensors arrive, or a clear refusal."""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from running import error_of, image, picture

from pixelgate.processor import decode

pytestmark = pytest.mark.asyncio(loop_scope="module")

RGB = np.kron(np.random.default_rng(1).integers(0, 256, (4, 6, 3), np.uint8), np.ones((16, 16, 1), np.uint8))
SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6


def encoded(form, array=RGB, mode=None, **options):
    made = Image.fromarray(array)
    file = io.BytesIO()
    (made.convert(mode) if mode else made).save(file, form, **options)
    return file.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header_only(width, height):
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def animation(form):
    frames = [Image.fromarray(np.roll(RGB, turn, 1)) for turn in (0, 20, 40)]
    file = io.BytesIO()
    frames[0].save(file, form, save_all=True, append_images=frames[1:], lossless=True)
    return file.getvalue()


def url(data, head="data:image/png;base64,"):
    return head + base64.b64encode(data).decode()


PNG = encoded("PNG")
ALPHA = np.dstack([RGB, np.linspace(0, 255, RGB[..., 0].size).reshape(RGB.shape[:2]).astype(np.uint8)])
GOOD = {
    "orientation": encoded("JPEG", exif=SIDEWAYS),
    "orientation of a PNG": encoded("PNG", exif=SIDEWAYS),
    "orientation of a WebP": encoded("WEBP", exif=SIDEWAYS),
    "broken orientation": encoded("JPEG", exif=b"Exif\0\0garbage"),
    "transparency": encoded("PNG", ALPHA),
    "transparency of a WebP": encoded("WEBP", ALPHA, lossless=True),
    "grey with transparency": encoded("PNG", ALPHA, "LA"),
    "transparent palette": encoded("PNG", mode="P", transparency=3),
    "16 bit": encoded("PNG", RGB[..., 0].astype(np.uint16) * 257),
    "one bit": encoded("PNG", mode="1"),
    "grey": encoded("JPEG", mode="L"),
    "print colours": encoded("JPEG", mode="CMYK"),
    "progressive": encoded("JPEG", progressive=True),
    "animated GIF": animation("GIF"),
    "animated WebP": animation("WEBP"),
    "pages": animation("TIFF"),
    "BMP": encoded("BMP"),
    "AVIF": encoded("AVIF"),
    "a video behind it": encoded("JPEG") + b"\0\0\0\x18ftypmp42" + bytes(500),
}
BAD = {
    "cut JPEG": (encoded("JPEG")[:-200], "damaged, cut short"),
    "cut PNG": (PNG[: len(PNG) // 2], "damaged, cut short"),
    "cut WebP": (encoded("WEBP")[:-40], "damaged, cut short"),
    "a header alone": (header_only(64, 64), "damaged, cut short"),
    "a bomb": (header_only(50_000, 50_000) + chunk(b"IDAT", b""), "50000x50000 pixels, more than the limit"),
    "no width": (header_only(0, 64), "damaged"),
    "HTML": (b"<!doctype html><p>Who are you?", "this is HTML"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "this is SVG"),
    "a HEIC with nothing in it": (b"\0\0\0\x18ftypheic\0\0\0\0heicmif1", "the HEIC picture is damaged"),
}
FORMS = {
    "capitals": url(PNG, "DATA:IMAGE/PNG;BASE64,"),
    "a parameter": url(PNG, "data:image/png;charset=utf-8;base64,"),
    "no type": url(PNG, "data:;base64,"),
    "half a type": url(PNG, "data:image;base64,"),
    "a wrong type": url(PNG, "data:image/jpeg;base64,"),
    "no padding": url(PNG + b"x").rstrip("="),
    "lines": "data:image/png;base64," + base64.encodebytes(PNG).decode(),
    "the URL-safe alphabet": "data:image/png;base64," + base64.urlsafe_b64encode(PNG).decode(),
    "percent signs": "data:image/png," + "".join(f"%{byte:02X}" for byte in PNG),
}
NONE = {
    "no comma": url(PNG).replace(",", ""),
    "nothing": "data:image/png;base64,",
    "no base64": "data:image/png;base64,????",
    "bare base64": base64.b64encode(PNG).decode(),
    "a path": "/etc/passwd",
    "a URL in a URL": url(url(PNG).encode()),
}


def sent(house):
    return house.received().mm_inputs.pixel_values.SerializeToString()


@pytest.mark.parametrize("name", GOOD)
async def test_the_engine_gets_the_upright_picture_on_white(house, processor, name):
    response = await house.ask([image(GOOD[name])])
    assert response.status_code == 200, response.text
    found = sent(house)
    upright = encoded("PNG", decode(GOOD[name]))
    tokens = response.json()["usage"]["prompt_tokens_details"]["image_tokens"]
    assert tokens == processor(upright).token_counts[0]
    assert (await house.ask([image(upright)])).status_code == 200
    assert found == sent(house)


@pytest.mark.parametrize("name", FORMS)
async def test_every_form_of_a_data_url_is_the_same_picture(house, name):
    await house.ask([image(PNG)])
    expected = sent(house)
    response = await house.ask([image(FORMS[name])])
    assert response.status_code == 200, response.text
    assert sent(house) == expected


@pytest.mark.parametrize("name", [*BAD, *NONE])
async def test_what_is_no_picture_is_told_without_a_librarys_words(house, name):
    data, words = BAD.get(name, (NONE.get(name), ""))
    response = await house.ask([image(data)])
    assert response.status_code in (400, 413), response.text
    error = error_of(response)
    assert words in error["message"]
    assert error["param"] == "messages[0].content[0].image_url"
    assert len(error["message"]) < 300
    assert not re.search(r"\b0x[0-9a-f]{4,}|object at|PIL|Error", error["message"])
    assert (await house.ask([image(picture(56, 56))])).status_code == 200


async def test_paths_tell_nothing_of_what_exists(house):
    replies = [error_of(await house.ask([image(path)])) for path in ("/etc/passwd", "/etc/none", "file:///etc/passwd")]
    assert replies[0] == replies[1] == replies[2]
