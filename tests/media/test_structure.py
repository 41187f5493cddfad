"""Files of too many parts are refused before a decoder sees them."""

import io
import struct
import time
import zlib

import numpy as np
import PIL.Image
import pytest

from pixelgate.errors import DecodeError
from pixelgate.media import decode as decoder
from pixelgate.media import structure
from pixelgate.media.policy import MediaPolicy

POLICY = MediaPolicy()


def encoded(kind, **options):
    buffer = io.BytesIO()
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    PIL.Image.fromarray(noise).save(buffer, kind, **options)
    return buffer.getvalue()


def with_segments(count, marker=0xE1, body=b"Exif\0\0"):
    jpeg = encoded("JPEG")
    segment = bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body
    return jpeg[:2] + segment * count + jpeg[2:]


def with_chunks(count):
    png = encoded("PNG")
    chunk = struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))
    return png[:33] + chunk * count + png[33:]


def with_scans(count):
    jpeg = encoded("JPEG", progressive=True)
    last = jpeg.rindex(b"\xff\xda")
    return jpeg[:-2] + jpeg[last:-2] * count + jpeg[-2:]


@pytest.mark.parametrize(
    ("make", "limit", "words"),
    [
        (with_segments, structure.MAX_JPEG_SEGMENTS, "segments"),
        (with_chunks, structure.MAX_PNG_CHUNKS, "chunks"),
        (with_scans, structure.MAX_JPEG_SCANS, "scans"),
    ],
)
def test_too_many_parts(make, limit, words):
    for call in (decoder.header, decoder.decode):
        call(make(limit // 2), POLICY)
        with pytest.raises(DecodeError, match=words):
            call(make(limit + 1), POLICY)


def tiff(order, big, strips):
    """Grey, one pixel wide, and a strip for every row."""
    count, number, entry, head = ("Q", "Q", "HHQQ", 16) if big else ("L", "H", "HHLL", 8)
    at = head + struct.calcsize("=" + number) + 8 * struct.calcsize("=" + entry) + struct.calcsize("=" + count)
    tags = ((256, 1, 1), (257, 1, strips), (258, 1, 8), (259, 1, 1), (262, 1, 1), (273, strips, at), (278, 1, 1))
    tags = (*tags, (279, strips, at + 4 * strips))
    start = struct.pack(order + "2sH", b"II" if order == "<" else b"MM", 43 if big else 42)
    start += struct.pack(order + "HHQ", 8, 0, 16) if big else struct.pack(order + "L", 8)
    start += struct.pack(order + number, len(tags))
    for tag, values, value in tags:
        start += struct.pack(order + entry, tag, 4, values, value)
    start += struct.pack(order + count, 0)
    return start + struct.pack(f"{order}{strips}L", *[at] * strips) + struct.pack(f"{order}{strips}L", *[1] * strips)


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])
def test_a_tiff_has_not_a_strip_for_every_pixel(order, big):
    good = tiff(order, big, 1000)
    assert decoder.header(good, POLICY).height == 1000
    assert decoder.decode(good, POLICY).shape == (1000, 1, 3)
    bad = tiff(order, big, structure.MAX_TIFF_VALUES // 2 + 1)
    start = time.process_time()
    for call in (decoder.header, decoder.decode):
        with pytest.raises(DecodeError, match="values in its directory"):
            call(bad, POLICY)
    assert time.process_time() - start < 1


def test_a_directory_that_is_cut_or_nowhere_is_for_the_decoder():
    for data in (b"II*\0", b"II*\0\xff\xff\xff\xff", tiff("<", False, 10)[:40], b"MM\0+" + bytes(12)):
        structure.check(data, "TIFF")
        with pytest.raises(DecodeError, match="damaged"):
            decoder.header(data, POLICY)


def test_jpegs_that_take_long_for_their_size():
    assert structure.slow_jpeg(with_scans(structure.USUAL_JPEG_SCANS))
    arithmetic = encoded("JPEG").replace(b"\xff\xc0", b"\xff\xc9", 1)
    assert structure.slow_jpeg(arithmetic)
    assert structure.slow_jpeg(with_segments(150))
    for usual in (encoded("JPEG"), encoded("JPEG", progressive=True), with_segments(50), b"\xff\xd8\xff"):
        assert not structure.slow_jpeg(usual)


def test_fill_bytes_are_counted_too():
    jpeg = encoded("JPEG")
    with pytest.raises(DecodeError, match="segments"):
        decoder.header(jpeg[:2] + b"\xff" * 2000 + jpeg[2:], POLICY)


def test_more_scans_after_a_whole_one_are_no_picture():
    baseline = encoded("JPEG")
    last = baseline.rindex(b"\xff\xda")
    with pytest.raises(DecodeError, match="damaged"):
        decoder.decode(baseline[:-2] + baseline[last:-2] * 200 + baseline[-2:], POLICY)


def test_a_flood_is_refused_at_once():
    flood = with_segments(2_000_000)
    start = time.process_time()
    with pytest.raises(DecodeError):
        decoder.header(flood, POLICY)
    assert time.process_time() - start < 1  # decoding it would take minutes


def test_real_files_are_far_below():
    for data in (encoded("JPEG"), encoded("JPEG", progressive=True), encoded("PNG"), encoded("WEBP")):
        decoder.decode(data, POLICY)
    structure.check(b"\xff\xd8\xff", "JPEG")
    structure.check(b"\x89PNG\r\n\x1a\n", "PNG")


def test_plain_jpegs_have_few_segments_and_little_metadata():
    for plain in (encoded("JPEG"), with_segments(20), with_segments(1, body=b"Exif\0\0" + bytes(15_000))):
        assert structure.plain_jpeg(plain)
    many, much, png = with_segments(40), with_segments(1, body=b"Exif\0\0" + bytes(17_000)), encoded("PNG")
    for other in (many, much, png, b"", b"\xff\xd8\xff", encoded("JPEG")[:200]):
        assert not structure.plain_jpeg(other)
