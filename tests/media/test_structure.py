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
