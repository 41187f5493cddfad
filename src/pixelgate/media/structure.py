"""How many parts a file is made of, before a decoder looks at them.

A decoder's work grows with the parts of a file and not only with its pixels: a progressive JPEG may have a scan for
every few bytes, each of them a pass over the whole picture; metadata cut into a million pieces is put together a
million times; a TIFF may have a strip for every pixel. Real files are far below these limits.
"""

from __future__ import annotations

import struct

from pixelgate.errors import DecodeError

MAX_JPEG_SCANS = 100
USUAL_JPEG_SCANS = 16  # encoders make 10 or 11
MAX_JPEG_SEGMENTS = 1000
USUAL_JPEG_SEGMENTS = 100  # a large colour profile or preview takes some dozens
MAX_PNG_CHUNKS = 20_000
MAX_TIFF_VALUES = 200_000  # two for every strip

_FEW_SEGMENTS, _LITTLE_METADATA = 32, 16 << 10  # bytes; a value of EXIF takes 12, and 2 microseconds

_BASELINE, _START_OF_SCAN = 0xC0, 0xDA
_ARITHMETIC = range(0xC9, 0xD0)
_TIFF_BYTES = (1, 2, 6, 7)  # types of values: byte, text, signed byte, undefined


def check(data: bytes, kind: str) -> None:
    """Raise DecodeError for a JPEG, PNG or TIFF with more parts than any real one."""
    if kind == "JPEG":
        _check_jpeg(data)
    elif kind == "PNG" and _chunks(data) > MAX_PNG_CHUNKS:
        raise DecodeError(f"the PNG picture has more than {MAX_PNG_CHUNKS} chunks")
    elif kind == "TIFF" and _tiff_values(data) > MAX_TIFF_VALUES:
        raise DecodeError(f"the TIFF picture has more than {MAX_TIFF_VALUES} values in its directory")


def slow_jpeg(data: bytes) -> bool:
    """Whether a JPEG can take much longer to decode than one of its size does.

    By arithmetic coding, many scans, or many segments of metadata.
    """
    try:
        scans, slow = _scans(data)
    except DecodeError:
        return False  # refused before it is decoded
    return slow or scans > USUAL_JPEG_SCANS


def plain_jpeg(data: bytes) -> bool:
    """Whether a JPEG's header is read in no time: few segments and little metadata before its pixels."""
    at = 2 if data.startswith(b"\xff\xd8") else len(data)
    for _ in range(_FEW_SEGMENTS):
        if at > _LITTLE_METADATA or data[at : at + 1] != b"\xff":
            return False
        marker = data[at + 1 : at + 2]
        if marker == b"\xda":
            return True
        at += 1 if marker == b"\xff" else 2 + int.from_bytes(data[at + 2 : at + 4])
    return False


def _check_jpeg(data: bytes) -> None:
    if _scans(data)[0] > MAX_JPEG_SCANS:
        raise DecodeError(f"the JPEG picture has more than {MAX_JPEG_SCANS} scans")


def _scans(data: bytes) -> tuple[int, bool]:
    """How many scans there are at most, and whether anything else makes it slow. Scans are counted only if need be.

    Raises DecodeError where there are too many segments before the first.
    """
    components, arithmetic, at = 0, False, 2
    for number in range(MAX_JPEG_SEGMENTS):
        slow = arithmetic or number > USUAL_JPEG_SEGMENTS
        if at + 10 > len(data) or data[at] != 0xFF:
            return 0, slow  # for the decoder to refuse
        marker = data[at + 1]
        arithmetic = arithmetic or marker in _ARITHMETIC
        if marker == _BASELINE:
            components = data[at + 9]
        elif marker == _START_OF_SCAN:
            # a baseline picture whose first scan has every component ends with it
            one_scan = components and data[at + 4] == components
            # inside a scan FF is always followed by 00 or a restart marker, so this counts scans (and a thumbnail's)
            return 1 if one_scan else data.count(b"\xff\xda"), slow
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4])
    raise DecodeError(f"the JPEG picture has more than {MAX_JPEG_SEGMENTS} segments before its pixels")


def _chunks(data: bytes) -> int:
    count, at = 0, 8
    while at + 12 <= len(data) and count <= MAX_PNG_CHUNKS:
        count += 1
        at += 12 + int.from_bytes(data[at : at + 4])
    return count


def _tiff_values(data: bytes) -> int:
    """Values of the first directory that are read one by one; text and bytes are read as they are."""
    order = "<" if data[:1] == b"I" else ">"
    big = data[2:3] == b"+"  # BigTIFF, 64 bits wide; with the other byte order Pillow takes it for an ordinary TIFF
    offset, number, entry = (order + form for form in (("Q", "Q", "HHQ8x") if big else ("L", "H", "HHL4x")))
    try:
        (start,) = struct.unpack_from(offset, data, 8 if big else 4)
        (count,) = struct.unpack_from(number, data, start)
        first = start + struct.calcsize(number)
        size = struct.calcsize(entry)
        count = min(count, (len(data) - first) // size, MAX_TIFF_VALUES)
        entries = struct.iter_unpack(entry, data[first : first + max(count, 0) * size])
        return sum(1 if kind in _TIFF_BYTES else int(values) for _, kind, values in entries)
    except struct.error:
        return 0  # for the decoder to refuse
