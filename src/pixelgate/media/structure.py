"""How many parts a file is made of, before a decoder looks at them.

A decoder's work grows with the parts of a file and not only with its pixels: a progressive JPEG may have a scan for
every few bytes, each of them a pass over the whole picture; metadata cut into a million pieces is put together a
million times. Real files are far below these limits.
"""

from __future__ import annotations

from pixelgate.errors import DecodeError

MAX_JPEG_SCANS = 100
MAX_JPEG_SEGMENTS = 1000
MAX_PNG_CHUNKS = 20_000

_START_OF_SCAN = 0xDA


def check(data: bytes, kind: str) -> None:
    """Raise DecodeError for a JPEG or PNG with more parts than any real one."""
    if kind == "JPEG":
        # Inside a scan FF is always followed by 00 or a restart marker, so this counts scans (and a thumbnail's).
        if data.count(b"\xff\xda") > MAX_JPEG_SCANS:
            raise DecodeError(f"the JPEG picture has more than {MAX_JPEG_SCANS} scans")
        if _segments(data) > MAX_JPEG_SEGMENTS:
            raise DecodeError(f"the JPEG picture has more than {MAX_JPEG_SEGMENTS} segments before its pixels")
    elif kind == "PNG" and _chunks(data) > MAX_PNG_CHUNKS:
        raise DecodeError(f"the PNG picture has more than {MAX_PNG_CHUNKS} chunks")


def _segments(data: bytes) -> int:
    """Segments and fill bytes up to the first scan; counting ends above the limit."""
    count, at = 0, 2
    while at + 4 <= len(data) and data[at] == 0xFF and count <= MAX_JPEG_SEGMENTS:
        count += 1
        if data[at + 1] == _START_OF_SCAN:
            break
        at += 1 if data[at + 1] == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])
    return count


def _chunks(data: bytes) -> int:
    count, at = 0, 8
    while at + 12 <= len(data) and count <= MAX_PNG_CHUNKS:
        count += 1
        at += 12 + int.from_bytes(data[at : at + 4])
    return count
