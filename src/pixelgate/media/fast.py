"""Faster decoders for the commonest files, where the extra ``pixelgate[fast]`` is installed.

They give Pillow's pixels, byte for byte; Pillow stays the reference and does whatever they do not take. A file on which
one of them fails goes to Pillow too, so that what is refused, and in which words, does not depend on the extra.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import metadata

import numpy as np
from numpy.typing import NDArray
from PIL.ImageFile import ImageFile

Decoder = Callable[[bytes], NDArray[np.uint8]]

_JPEG_COMPONENTS = {"L", "RGB"}
_PNG_COLOURS = (2, 6)  # colour types of the header: RGB, RGBA
_PNG_DEPTH, _PNG_COLOUR = 24, 25  # their places in the file


def _found() -> tuple[dict[str, Decoder], tuple[str, ...]]:
    decoders: dict[str, Decoder] = {}
    versions: list[str] = []
    try:
        import simplejpeg

        # strict: whatever libjpeg-turbo only warns about is left to Pillow
        decoders["JPEG"] = lambda data: simplejpeg.decode_jpeg(data, "RGB", strict=True)
        versions.append(f"simplejpeg {metadata.version('simplejpeg')}")
    except ImportError:
        pass
    try:
        import pyspng

        decoders["PNG"] = pyspng.load
        versions.append(f"pyspng {metadata.version('pyspng')}")
    except ImportError:
        pass
    return decoders, tuple(versions)


DECODERS, VERSIONS = _found()
"""The decoders that are installed, by format, and their names and versions."""


def decode(data: bytes, image: ImageFile, kind: str) -> NDArray[np.uint8] | None:
    """uint8 [height, width, 3], or 4 with a byte that means nothing; None where Pillow has to decode.

    ``image`` is the same file opened by Pillow, not loaded. Taken are JPEGs that are not CMYK, and 8-bit RGB or RGBA
    PNGs with nothing transparent in them: other kinds of transparency and depth have rules of their own.
    """
    decoder = DECODERS.get(kind)
    if decoder is None or not _plain(data, image, kind):
        return None
    try:
        pixels = decoder(data)
    except Exception:  # either library raises what it likes; Pillow decides what becomes of the file
        return None
    if pixels.ndim != 3 or pixels.shape[:2] != (image.height, image.width):
        return None
    if pixels.shape[2] == 4 and pixels[:, :, 3].min() != 255:
        return None
    return pixels


def _plain(data: bytes, image: ImageFile, kind: str) -> bool:
    if kind == "JPEG":
        return image.mode in _JPEG_COMPONENTS
    if data[_PNG_DEPTH] != 8 or data[_PNG_COLOUR] not in _PNG_COLOURS or image.info.get("transparency") is not None:
        return False
    return _intact(data)


def _intact(data: bytes) -> bool:
    """Whether a PNG's chunks are whole, up to its end: libspng overlooks damage that Pillow refuses."""
    at, view = 8, memoryview(data)
    while at + 12 <= len(data):
        length = int.from_bytes(data[at : at + 4])
        end = at + 12 + length
        if end > len(data) or zlib.crc32(view[at + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            return False
        if data[at + 4 : at + 8] == b"IEND":
            return length == 0
        at = end
    return False
