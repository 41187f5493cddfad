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

_BASELINE, _START_OF_SCAN = 0xC0, 0xDA


def check(data: bytes, kind: str) -> None:
    """Raise DecodeError for a JPEG or PNG with more parts than any real one."""
    if kind == "JPEG":
        _check_jpeg(data)
    elif kind == "PNG" and _chunks(data) > MAX_PNG_CHUNKS:
        raise DecodeError(f"the PNG picture has more than {MAX_PNG_CHUNKS} chunks")


def _check_jpeg(data: bytes) -> None:
    """Walk to the first scan; count the others only where there can be some."""
    components, at = 0, 2
    for _ in range(MAX_JPEG_SEGMENTS):
        if at + 10 > len(data) or data[at] != 0xFF:
            return  # for the decoder to refuse
        marker = data[at + 1]
        if marker == _BASELINE:
            components = data[at + 9]
        elif marker == _START_OF_SCAN:
            # a baseline picture whose first scan has every component ends with it
            one_scan = components and data[at + 4] == components
            # inside a scan FF is always followed by 00 or a restart marker, so this counts scans (and a thumbnail's)
            if not one_scan and data.count(b"\xff\xda") > MAX_JPEG_SCANS:
                raise DecodeError(f"the JPEG picture has more than {MAX_JPEG_SCANS} scans")
            return
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])
    raise DecodeError(f"the JPEG picture has more than {MAX_JPEG_SEGMENTS} segments before its pixels")


def _chunks(data: bytes) -> int:
    count, at = 0, 8
    while at + 12 <= len(data) and count <= MAX_PNG_CHUNKS:
        count += 1
        at += 12 + int.from_bytes(data[at : at + 4])
    return count
