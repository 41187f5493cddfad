from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import threading
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile

from pixelgate.errors import DecodeError, MediaError, PixelgateError, TooLargeError
from pixelgate.media import decode as decoder
from pixelgate.media.decode import Header, decode, from_array, from_pil, header, read_path
from pixelgate.media.policy import MediaPolicy

POLICY = MediaPolicy()
HF = MediaPolicy(rgb="hf")
HEIGHT, WIDTH = 30, 46

_y, _x = np.mgrid[0:HEIGHT, 0:WIDTH]
RGB = np.stack([_x * 5, _y * 8, _x + _y * 3], -1).astype(np.uint8)
GREY = RGB[..., 0]
ALPHA = ((_x * 11 + _y) % 256).astype(np.uint8)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture() -> Image.Image:
    return Image.fromarray(RGB)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(
    samples: NDArray[Any], depth: int, colour: int, before: bytes = b"", after: bytes = b"", width: int | None = None
) -> bytes:
    """A PNG by hand: ``samples`` are its packed rows, big-endian where 16 bits wide."""
    rows = b"".join(b"\0" + row.tobytes() for row in samples)
    width = width or samples.shape[1]
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, len(samples), depth, colour, 0, 0, 0))
        + before
        + chunk(b"IDAT", zlib.compress(rows))
        + after
        + chunk(b"IEND", b"")
    )


def on_white(rgb: NDArray[Any], alpha: NDArray[Any]) -> NDArray[Any]:
    """The exact blend; Pillow's integer one may differ by one."""
    a = alpha[..., None].astype(float) / 255
    return rgb * a + 255 * (1 - a)


def same(data: bytes, expected: NDArray[Any], policy: MediaPolicy = POLICY) -> None:
    array = decode(data, policy)
    np.testing.assert_array_equal(array, expected)
    assert array.dtype == np.uint8
    assert array.flags.c_contiguous
    size = header(data, policy)
    assert (size.height, size.width, 3) == array.shape


# Formats and modes


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("WEBP", {"lossless": True}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"})],
)
def test_lossless_formats_give_back_the_pixels(kind: str, options: dict[str, Any]) -> None:
    data = encoded(picture(), kind, **options)
    same(data, RGB)
    assert header(data, POLICY) == Header(HEIGHT, WIDTH, kind)


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0, "quality": 95}])
def test_jpeg_equals_pillows(options: dict[str, Any]) -> None:
    data = encoded(picture(), "JPEG", **options)
    same(data, np.asarray(Image.open(BytesIO(data))))
    assert np.abs(decode(data, POLICY).astype(int) - RGB).mean() < 8
    assert header(data, POLICY) == Header(HEIGHT, WIDTH, "JPEG")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "BMP"])
def test_grey_becomes_three_equal_channels(kind: str) -> None:
    array = decode(encoded(Image.fromarray(GREY), kind, quality=100), POLICY)
    assert np.abs(array.astype(int) - GREY[..., None]).max() <= (1 if kind == "JPEG" else 0)
    assert (array == array[..., :1]).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP"])
def test_one_bit_becomes_black_and_white(kind: str) -> None:
    same(encoded(Image.fromarray(GREY > 100), kind), np.repeat(np.where(GREY > 100, 255, 0)[..., None], 3, axis=2))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "TIFF", "BMP"])
def test_palettes_are_resolved(kind: str) -> None:
    paletted = picture().quantize(60)
    same(encoded(paletted, kind), np.asarray(paletted.convert("RGB")))


def test_cmyk_is_converted_as_pillow_does() -> None:
    cmyk = Image.merge("CMYK", [Image.new("L", (32, 32), v) for v in (255, 0, 0, 0)])
    array = decode(encoded(cmyk, "JPEG"), POLICY)
    assert np.abs(array.astype(int) - (0, 255, 255)).max() < 3
    same(encoded(cmyk, "TIFF"), np.full((32, 32, 3), (0, 255, 255)))


def test_ycck_jpeg_is_read() -> None:
    data = encoded(picture().convert("CMYK"), "JPEG", quality=95)
    array = decode(data, POLICY)
    assert np.abs(array.astype(int) - RGB).mean() < 4


def test_a_picture_of_one_pixel_and_of_three_rows() -> None:
    same(png(np.array([[9, 8, 7]], np.uint8), 8, 2, width=1), np.array([[[9, 8, 7]]]))
    same(encoded(Image.fromarray(RGB[:3, :22]), "PNG"), RGB[:3, :22])
    same(encoded(Image.fromarray(RGB[:, :1]), "PNG"), RGB[:, :1])


def test_a_big_picture_is_copied_in_strips_without_a_seam() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2803, 4000, 3), np.uint8)
    same(encoded(Image.fromarray(noise), "BMP"), noise, MediaPolicy(max_bytes=2**26))


# Transparency


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True, "exact": True})])
def test_alpha_is_composited_on_white(kind: str, options: dict[str, Any]) -> None:
    image = picture()
    image.putalpha(Image.fromarray(ALPHA))
    data = encoded(image, kind, **options)
    assert np.abs(decode(data, POLICY) - on_white(RGB, ALPHA)).max() <= 1
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    same(data, np.asarray(Image.alpha_composite(white, image).convert("RGB")))


def test_hidden_colour_is_white_and_opaque_colour_does_not_move() -> None:
    image = picture()
    image.putalpha(0)
    same(encoded(image, "PNG"), np.full_like(RGB, 255))
    image.putalpha(255)
    same(encoded(image, "PNG"), RGB)


def test_grey_with_alpha_is_composited_on_white() -> None:
    data = encoded(Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(ALPHA))), "PNG")
    expected = on_white(np.repeat(GREY[..., None], 3, axis=2), ALPHA)
    assert np.abs(decode(data, POLICY) - expected).max() <= 1


def test_premultiplied_grey_is_composited_on_white() -> None:
    image = Image.merge("LA", (Image.new("L", (20, 10), 100), Image.new("L", (20, 10), 128)))
    array = decode(_tiff_with_associated_alpha(image), POLICY)
    assert np.abs(array.astype(int) - 177).max() <= 2


def _tiff_with_associated_alpha(image: Image.Image) -> bytes:
    data = bytearray(encoded(image, "TIFF"))
    extra_samples = struct.pack("<HHI", 338, 3, 1)
    at = data.index(extra_samples)
    data[at + 8 : at + 10] = struct.pack("<H", 1)  # 2, unassociated, becomes 1, premultiplied
    start = data.index(bytes([100, 128]) * 20)
    data[start : start + 400] = bytes([50, 128]) * 200
    return bytes(data)


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_transparent_palette_entry_is_white(kind: str) -> None:
    paletted = picture().quantize(60)
    expected = np.asarray(paletted.convert("RGB")).copy()
    expected[np.asarray(paletted) == 7] = 255
    same(encoded(paletted, kind, transparency=7), expected)


def test_palette_entries_may_be_half_transparent() -> None:
    paletted = picture().quantize(60)
    alphas = np.arange(0, 240, 4, dtype=np.uint8)
    expected = on_white(np.asarray(paletted.convert("RGB")), alphas[np.asarray(paletted)])
    data = encoded(paletted, "PNG", transparency=alphas.tobytes())
    assert np.abs(decode(data, POLICY) - expected).max() <= 1


def test_a_transparent_colour_or_grey_is_white() -> None:
    colour = RGB[5, 7]
    expected = np.where((colour == RGB).all(-1)[..., None], 255, RGB)
    same(encoded(picture(), "PNG", transparency=tuple(int(v) for v in colour)), expected)
    grey = np.repeat(np.where(GREY == 50, 255, GREY)[..., None], 3, axis=2)
    same(encoded(Image.fromarray(GREY), "PNG", transparency=50), grey)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_transparent_grey_is_stated_at_the_files_own_depth(depth: int) -> None:
    levels = np.arange(8) % (1 << depth)
    packed = np.packbits((levels[:, None] >> np.arange(depth - 1, -1, -1) & 1).astype(np.uint8).ravel())[None]
    data = png(packed, depth, 0, chunk(b"tRNS", struct.pack(">H", 1)), width=8)
    expected = np.where(levels == 1, 255, levels * 255 // ((1 << depth) - 1))
    same(data, np.repeat(expected[None, :, None], 3, axis=2))


# 16 bits


def test_16_bit_grey_is_scaled() -> None:
    deep = (_x * 1400 + _y).astype(np.uint16)
    expected = np.repeat((deep >> 8)[..., None], 3, axis=2)
    same(encoded(Image.fromarray(deep), "PNG"), expected)
    same(encoded(Image.fromarray(deep), "TIFF"), expected)
    same(_big_endian_tiff(deep), expected)


def _big_endian_tiff(samples: NDArray[Any]) -> bytes:
    """Pillow opens it as I;16B."""
    height, width = samples.shape
    tags = [
        (256, 4, width),
        (257, 4, height),
        (258, 3, 16 << 16),
        (259, 3, 1 << 16),
        (262, 3, 1 << 16),
        (273, 4, 8 + 2 + 12 * 8 + 4),
        (278, 4, height),
        (279, 4, 2 * height * width),
    ]
    directory = b"".join(struct.pack(">HHII", tag, kind, 1, value) for tag, kind, value in tags)
    head = b"MM\0*" + struct.pack(">I", 8) + struct.pack(">H", len(tags)) + directory + bytes(4)
    return head + samples.astype(">u2").tobytes()


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_16_bit_colour_and_alpha_are_scaled(colour: int, channels: int) -> None:
    deep = np.random.default_rng(1).integers(0, 65536, (9, 7, channels)).astype(">u2")
    array = decode(png(deep, 16, colour), POLICY)
    high = (deep >> 8).astype(np.uint8)
    rgb = np.repeat(high[..., :1], 3, axis=2) if channels == 2 else high[..., :3]
    alpha = high[..., -1] if channels != 3 else np.full((9, 7), 255)
    assert np.abs(array - on_white(rgb, alpha)).max() <= 1


def test_a_transparent_16_bit_grey_is_compared_at_16_bits() -> None:
    deep = np.array([[0x1200, 0x1201, 0xFF00]], ">u2")
    data = png(deep, 16, 0, chunk(b"tRNS", struct.pack(">H", 0x1201)))
    same(data, np.array([[[0x12] * 3, [0xFF] * 3, [0xFF] * 3]]))


def test_a_transparent_16_bit_colour_is_white() -> None:
    deep = np.array([[[0x1234, 0x5678, 0x9ABC], [0x0102, 0x0304, 0x0506]]], ">u2")
    same(png(deep, 16, 2, chunk(b"tRNS", deep[0, 0].tobytes())), np.array([[[255] * 3, [1, 3, 5]]]))


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_samples_without_a_fixed_white_are_refused_with_a_reason(dtype: Any) -> None:
    data = encoded(Image.fromarray(np.ones((4, 4), dtype)), "TIFF")
    with pytest.raises(DecodeError, match="8 or 16 bits"):
        decode(data, POLICY)


# Orientation

UPRIGHT = {  # what a viewer does with the stored rows, in array steps
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a[::-1].transpose(1, 0, 2),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a[:, ::-1].transpose(1, 0, 2),
}


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[0x0112] = orientation
    return tags


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_pictures_are_turned_upright(kind: str, orientation: int) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    stored = decode(encoded(picture(), kind, **options), POLICY)
    same(
        encoded(picture(), kind, exif=exif(orientation), **options),
        UPRIGHT.get(orientation, UPRIGHT[1])(stored),
    )


def test_transparency_survives_the_turn() -> None:
    paletted = picture().quantize(60)
    expected = np.asarray(paletted.convert("RGB")).copy()
    expected[np.asarray(paletted) == 7] = 255
    same(encoded(paletted, "PNG", transparency=7, exif=exif(6)), UPRIGHT[6](expected))
    deep = (_x * 1400).astype(np.uint16)
    same(
        encoded(Image.fromarray(deep), "PNG", exif=exif(8)),
        UPRIGHT[8](np.repeat((deep >> 8)[..., None], 3, axis=2)),
    )


XMP = b'XML:com.adobe.xmp\0\0\0\0\0<x:xmpmeta><rdf tiff:Orientation="6"/></x:xmpmeta>'


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("extra", [chunk(b"eXIf", exif(6).tobytes()[6:]), chunk(b"iTXt", XMP)])
def test_a_png_is_turned_wherever_its_metadata_stands(extra: bytes, late: bool) -> None:
    data = png(RGB, 8, 2, *((b"", extra) if late else (extra, b"")))
    same(data, UPRIGHT[6](RGB))


def test_a_tiff_is_turned_by_xmp_where_the_tag_is_missing() -> None:
    data = encoded(picture(), "TIFF", tiffinfo={700: XMP[22:]})
    same(data, UPRIGHT[6](RGB))


@pytest.mark.parametrize(
    "broken",
    [
        b"Exif\0\0",
        b"Exif\0\0garbage!garbage!",
        b"Exif\0\0II*\0\xff\xff\xff\x7f",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x02\0\0\x006\0\0\0\0\0\0\0",
    ],
)
def test_broken_metadata_means_not_turned(broken: bytes) -> None:
    data = encoded(picture(), "JPEG", exif=broken)
    assert b"Exif" in data
    same(data, decode(encoded(picture(), "JPEG"), POLICY))
    same(png(RGB, 8, 2, chunk(b"eXIf", broken[6:])), RGB)
    same(png(RGB, 8, 2, b"", chunk(b"eXIf", broken[6:])), RGB)
    same(png(RGB, 8, 2, b"", chunk(b"zTXt", b"x\0\0broken")), RGB)
    same(png(RGB, 8, 2, chunk(b"tEXt", b"exif\0text in its place")), RGB)


# Animations and tails


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})])
def test_the_first_frame_of_an_animation_is_taken(kind: str, options: dict[str, Any]) -> None:
    red, green = Image.new("RGB", (20, 10), (255, 0, 0)), Image.new("RGB", (20, 10), (0, 255, 0))
    data = encoded(red, kind, save_all=True, append_images=[green, red], **options)
    same(data, np.full((10, 20, 3), (255, 0, 0)))


def test_a_small_first_frame_lies_on_its_canvas() -> None:
    paletted = picture().quantize(60)
    expected = np.full((HEIGHT + 4, WIDTH + 3, 3), 255)
    expected[:HEIGHT, :WIDTH] = np.asarray(paletted.convert("RGB"))
    expected[:HEIGHT, :WIDTH][np.asarray(paletted) == 7] = 255
    data = bytearray(encoded(paletted, "GIF", transparency=7))
    data[6:10] = struct.pack("<HH", WIDTH + 3, HEIGHT + 4)
    same(bytes(data), expected)


def test_bytes_behind_the_picture_do_not_matter() -> None:
    for kind in ("JPEG", "PNG", "GIF", "BMP"):
        data = encoded(picture(), kind)
        same(data + b"\0\0\0\x18ftypmp42" * 100, decode(data, POLICY))


def test_a_multi_picture_jpeg_gives_its_first() -> None:
    second = Image.fromarray(255 - RGB)
    data = encoded(picture(), "MPO", save_all=True, append_images=[second], quality=95)
    assert np.abs(decode(data, POLICY).astype(int) - RGB).mean() < 8
    assert header(data, POLICY) == Header(HEIGHT, WIDTH, "JPEG")


# What is refused


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
@pytest.mark.parametrize("share", [0.2, 0.6, 0.95])
def test_a_cut_picture_is_refused(kind: str, share: float) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    data = encoded(noise, kind, **({"lossless": True} if kind == "WEBP" else {}))
    with pytest.raises(DecodeError, match="cut short"):
        decode(data[: int(len(data) * share)], POLICY)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "no bytes"),
        (b"\0" * 100, "no known format"),
        (b"hello", "no known format"),
        (b"\n <!DOCTYPE html><p>", "HTML"),
        (b"\xef\xbb\xbf<HTML>", "HTML"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "PostScript"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "MP4"),
    ],
)
def test_other_content_is_named_with_what_is_accepted(data: bytes, found: str) -> None:
    for function in (header, decode):
        with pytest.raises(DecodeError, match=found) as caught:
            function(data, POLICY)
        assert "JPEG, PNG, WEBP, GIF, BMP, TIFF, AVIF, HEIC" in caught.value.message


def test_formats_outside_the_policy_are_refused() -> None:
    policy = MediaPolicy(formats=("PNG",))
    same(encoded(picture(), "PNG"), RGB, policy)
    for kind in ("JPEG", "WEBP", "GIF", "BMP", "TIFF"):
        for function in (header, decode):
            with pytest.raises(DecodeError, match=rf"\(PNG\): this is {kind}"):
                function(encoded(picture(), kind), policy)


@pytest.mark.parametrize("kind", ["PPM", "TGA", "ICO", "JPEG2000", "PCX", "SGI", "EPS"])
def test_pillows_other_readers_are_out_of_reach(kind: str) -> None:
    with pytest.raises(DecodeError, match="accepted format"):
        decode(encoded(picture(), kind), POLICY)


def test_decoding_imports_no_other_reader() -> None:
    script = (
        "import sys; from pixelgate.media.decode import decode; from pixelgate.media.policy import MediaPolicy\n"
        "for data in (b'', b'%!PS', b'\\xff\\xd8\\xff', b'BM', b'GIF89a', bytes(64)):\n"
        "    try: decode(data, MediaPolicy())\n"
        "    except ValueError: pass\n"
        "print(*sorted(m for m in sys.modules if m.startswith('PIL.') and m.endswith('Plugin')))\n"
        "print(any(m.split('.')[0] in ('aiohttp', 'grpc', 'starlette') for m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    readers = ("Avif", "Bmp", "Gif", "Jpeg", "Png", "Tiff", "WebP")
    assert done.stdout.split() == [*(f"PIL.{name}ImagePlugin" for name in readers), "False"]


def bomb_headers() -> dict[str, bytes]:
    one = np.zeros((1, 1), np.uint8)
    large_png = bytearray(png(one, 8, 0))
    large_png[16:24] = struct.pack(">II", 50000, 50000)
    large_png[29:33] = struct.pack(">I", zlib.crc32(large_png[12:29]))
    jpeg = bytearray(encoded(Image.new("L", (8, 8)), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", 65000, 65000)
    gif = bytearray(encoded(Image.new("L", (8, 8)), "GIF"))
    gif[6:10] = struct.pack("<HH", 65535, 65535)
    frame_gif = bytearray(encoded(Image.new("P", (8, 8)), "GIF"))
    frame = frame_gif.index(b",\0\0\0\0\x08\0\x08\0")
    frame_gif[frame + 5 : frame + 9] = struct.pack("<HH", 65535, 65535)
    bmp = bytearray(encoded(Image.new("L", (8, 8)), "BMP"))
    bmp[18:26] = struct.pack("<ii", 40000, 40000)
    tiff = encoded(Image.new("1", (8, 8)), "TIFF")
    for tag in (256, 257):
        small = next(
            struct.pack("<HHII", tag, kind, 1, 8) for kind in (3, 4) if struct.pack("<HHII", tag, kind, 1, 8) in tiff
        )
        tiff = tiff.replace(small, struct.pack("<HHII", tag, 4, 1, 60000))
    webp = bytearray(encoded(Image.new("RGB", (8, 8)), "WEBP", lossless=True))
    webp[21:25] = struct.pack("<I", (16383 | 16383 << 14) & 0xFFFFFFFF)
    return {
        "PNG": bytes(large_png),
        "JPEG": bytes(jpeg),
        "GIF": bytes(gif),
        "GIF frame": bytes(frame_gif),
        "BMP": bytes(bmp),
        "TIFF": tiff,
        "WEBP": bytes(webp),
    }


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "GIF frame", "BMP", "TIFF", "WEBP"])
def test_a_bomb_is_refused_from_its_header(kind: str) -> None:
    data = bomb_headers()[kind]
    for function in (header, decode):
        with pytest.raises(TooLargeError, match="pixels"):
            function(data, POLICY)


def test_the_pixel_limit_is_exact() -> None:
    data = encoded(picture(), "PNG")
    same(data, RGB, MediaPolicy(max_pixels=HEIGHT * WIDTH))
    tight = MediaPolicy(max_pixels=HEIGHT * WIDTH - 1)
    for function in (header, decode):
        with pytest.raises(TooLargeError, match=f"{WIDTH}x{HEIGHT}"):
            function(data, tight)
    with pytest.raises(TooLargeError):
        from_pil(picture(), tight)


def test_pillows_own_limit_and_switches_play_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    same(encoded(picture(), "PNG"), RGB)
    same(encoded(picture(), "JPEG"), decode(encoded(picture(), "JPEG"), POLICY))
    with pytest.raises(TooLargeError):  # Pillow checks WebP against it, before our limit has a say
        decode(encoded(picture(), "WEBP"), POLICY)
    monkeypatch.undo()
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_the_byte_limit_is_exact() -> None:
    data = encoded(picture(), "PNG")
    same(data, RGB, MediaPolicy(max_bytes=len(data)))
    for function in (header, decode):
        with pytest.raises(TooLargeError, match=str(len(data) - 1)):
            function(data, MediaPolicy(max_bytes=len(data) - 1))


def test_a_header_alone_is_enough_for_the_header() -> None:
    assert header(encoded(picture(), "PNG")[:60], POLICY) == Header(HEIGHT, WIDTH, "PNG")
    assert header(encoded(picture(), "JPEG", exif=exif(6))[:700], POLICY) == Header(WIDTH, HEIGHT, "JPEG")


def test_damage_anywhere_ends_in_our_own_error_or_in_a_picture_of_the_announced_size() -> None:
    rng = np.random.default_rng(3)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        options = {} if kind in ("GIF", "BMP") else {"exif": exif(6)}
        good = encoded(picture(), kind, **options)
        for _ in range(150):
            data = bytearray(good)
            for at in rng.integers(0, len(data), 3):
                data[at] = rng.integers(0, 256)
            outcome = sized(bytes(data))
            if isinstance(outcome, PixelgateError):
                assert 400 <= outcome.status < 500
                assert not re.search(r"0x[0-9a-f]{6}|object|Traceback", outcome.message)
            else:
                assert outcome[0] == outcome[1]


def sized(data: bytes) -> PixelgateError | tuple[tuple[int, ...], tuple[int, ...]]:
    """The size that the header announces and that of the array, or our own error."""
    policy = MediaPolicy(max_pixels=100_000)
    try:
        size = header(data, policy)
        return (size.height, size.width, 3), decode(data, policy).shape
    except PixelgateError as error:
        return error


def test_threads_do_not_disturb_each_other() -> None:
    files = [encoded(picture(), "PNG", exif=exif(o)) for o in range(1, 9)]
    expected = [decode(data, POLICY) for data in files]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for step in range(60):
            index = (offset + step) % 8
            if not np.array_equal(decode(files[index], POLICY), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# transformers' own conversions


def rgb_then_rule(image: Image.Image) -> NDArray[Any]:
    """transformers' pil backend on a path, after the turn, written down from its description."""
    image = image.convert("RGB")
    array = np.asarray(image).copy()
    key = image.info.get("transparency")
    if key is not None:
        array[(array == key).all(-1)] = 255
    return array


@pytest.mark.parametrize("backend", ["pil", "torchvision"])
def test_hf_drops_alpha(backend: decoder.Backend) -> None:
    image = picture()
    image.putalpha(Image.fromarray(ALPHA))
    for data in (encoded(image, "PNG"), encoded(image, "WEBP", lossless=True, exact=True)):
        np.testing.assert_array_equal(decode(data, HF, backend), RGB)
    half = Image.merge("LA", (Image.fromarray(GREY), Image.fromarray(ALPHA)))
    np.testing.assert_array_equal(decode(encoded(half, "PNG"), HF, backend), np.repeat(GREY[..., None], 3, axis=2))


def test_hf_pil_turns_a_transparent_colour_white_and_torchvision_does_not() -> None:
    paletted = picture().quantize(60)
    plain = np.asarray(paletted.convert("RGB"))
    keyed = encoded(paletted, "PNG", transparency=7)
    white = plain.copy()
    white[(plain == plain[np.asarray(paletted) == 7][0]).all(-1)] = 255
    np.testing.assert_array_equal(decode(keyed, HF, "pil"), white)
    np.testing.assert_array_equal(decode(keyed, HF, "pil"), rgb_then_rule(Image.open(BytesIO(keyed))))
    np.testing.assert_array_equal(decode(keyed, HF, "torchvision"), plain)
    many = encoded(paletted, "PNG", transparency=bytes(range(60)))
    np.testing.assert_array_equal(decode(many, HF, "pil"), plain)
    np.testing.assert_array_equal(decode(many, HF, "torchvision"), plain)


def test_hf_torchvision_paints_a_gifs_transparent_pixels_in_its_background_colour() -> None:
    paletted = picture().quantize(60)
    data = bytearray(encoded(paletted, "GIF", transparency=7))
    data[11] = 9  # the background's index
    stored = Image.open(BytesIO(data))
    assert stored.info["background"] == 9
    colours = np.asarray(stored.convert("RGBA"))
    palette = np.frombuffer(bytes(data[13 : 13 + 3 * 64]), np.uint8).reshape(-1, 3)
    expected = np.where(colours[..., 3:] == 0, palette[9], colours[..., :3])
    assert (colours[..., 3] == 0).any()
    np.testing.assert_array_equal(decode(bytes(data), HF, "torchvision"), expected)


@pytest.mark.parametrize(("kind", "turned"), [("JPEG", True), ("PNG", True), ("WEBP", False), ("TIFF", True)], ids=str)
def test_hf_torchvision_turns_jpeg_and_png_alone(kind: str, turned: bool) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(picture(), kind, exif=exif(6), **options)
    stored = decode(encoded(picture(), kind, **options), POLICY)
    for backend, upright in (("torchvision", turned), ("pil", True)):
        array = decode(data, HF, backend)  # type: ignore[arg-type]
        np.testing.assert_array_equal(array, UPRIGHT[6](stored) if upright else stored)
        assert header(data, HF, backend) == Header(*array.shape[:2], kind)  # type: ignore[arg-type]


def test_hf_torchvision_knows_neither_late_exif_nor_xmp() -> None:
    late = png(RGB, 8, 2, b"", chunk(b"eXIf", exif(6).tobytes()[6:]))
    for data in (late, png(RGB, 8, 2, chunk(b"iTXt", XMP))):
        np.testing.assert_array_equal(decode(data, HF, "torchvision"), RGB)
        assert header(data, HF, "torchvision") == Header(HEIGHT, WIDTH, "PNG")
        np.testing.assert_array_equal(decode(data, HF, "pil"), UPRIGHT[6](RGB))


def test_hf_on_16_bits_clips_in_pil_and_follows_our_rule_where_torchvision_garbles() -> None:
    deep = (_x * 20).astype(np.uint16)
    data = encoded(Image.fromarray(deep), "PNG")
    np.testing.assert_array_equal(decode(data, HF, "pil"), np.repeat(deep.clip(0, 255)[..., None], 3, axis=2))
    np.testing.assert_array_equal(decode(data, HF, "torchvision"), np.repeat((deep >> 8)[..., None], 3, axis=2))


def test_hf_torchvision_follows_our_rule_where_it_would_raise() -> None:
    image = picture()
    image.putalpha(Image.fromarray(ALPHA))
    for kind, options in (
        ("TIFF", {}),
        ("WEBP", {"save_all": True, "append_images": [picture()], "lossless": True}),
    ):
        data = encoded(image, kind, **options)
        np.testing.assert_array_equal(decode(data, HF, "torchvision"), decode(data, POLICY))


# What a library user hands in


def test_a_pil_image_is_composited_but_not_turned() -> None:
    image = picture()
    image.putalpha(Image.fromarray(ALPHA))
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    expected = np.asarray(Image.alpha_composite(white, image).convert("RGB"))
    opened = Image.open(BytesIO(encoded(image, "PNG", exif=exif(6))))
    for policy in (POLICY, HF):
        np.testing.assert_array_equal(from_pil(image, policy)[:, :, :3], expected)
        np.testing.assert_array_equal(from_pil(opened, policy)[:, :, :3], expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "RGBX"])
def test_a_pil_image_without_alpha_is_what_convert_says(mode: str) -> None:
    image = picture().convert("L" if mode in ("I", "F") else "RGB").convert(mode)
    np.testing.assert_array_equal(from_pil(image, POLICY)[:, :, :3], np.asarray(image.convert("RGB")))


def test_a_16_bit_pil_image_is_clipped_as_transformers_does() -> None:
    deep = (_x * 20).astype(np.uint16)
    expected = np.repeat(deep.clip(0, 255)[..., None], 3, axis=2)
    np.testing.assert_array_equal(from_pil(Image.fromarray(deep), POLICY)[:, :, :3], expected)


def test_a_damaged_pil_image_is_told_in_our_words() -> None:
    image = Image.open(BytesIO(encoded(picture(), "PNG")[:-60]))
    with pytest.raises(DecodeError):
        from_pil(image, POLICY)


def test_arrays_pass_through_or_get_contiguous_rows() -> None:
    assert from_array(RGB) is RGB
    for view in (RGB[::-1], RGB[:, ::2], RGB.transpose(1, 0, 2), np.asfortranarray(RGB), RGB[..., ::-1]):
        array = from_array(view)
        assert array.flags.c_contiguous
        np.testing.assert_array_equal(array, view)


@pytest.mark.parametrize(
    "wrong",
    [
        RGB.astype(np.float32) / 255,
        RGB.astype(np.int64),
        RGB[..., 0],
        RGB[..., :1],
        RGB.transpose(2, 0, 1),
        np.zeros((4, 4, 4), np.uint8),
        RGB[None],
        np.zeros((0, 4, 3), np.uint8),
        [[1, 2, 3]],
    ],
)
def test_other_arrays_are_refused_with_a_reason(wrong: Any) -> None:
    with pytest.raises(MediaError, match="as an array must be"):
        from_array(wrong)


def test_memory_that_runs_out_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    data = encoded(picture(), "GIF")
    monkeypatch.setattr(ImageFile.ImageFile, "load", exhausted)
    with pytest.raises(TooLargeError, match="more memory than is allowed"):
        decode(data, POLICY)


def test_files_are_read_under_the_byte_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    data = encoded(picture(), "PNG")
    path.write_bytes(data)
    assert read_path(path, POLICY) == read_path(str(path), MediaPolicy(max_bytes=len(data))) == data
    with pytest.raises(TooLargeError):
        read_path(path, MediaPolicy(max_bytes=len(data) - 1))


def test_what_is_no_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for path in (tmp_path, tmp_path / "none.png", pipe):
        with pytest.raises(MediaError, match="no picture file"):
            read_path(path, POLICY)
    path = tmp_path / "a.png"
    path.write_bytes(b"a")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "not for you")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(MediaError, match=r"a\.png' cannot be read"):
        read_path(path, POLICY)
