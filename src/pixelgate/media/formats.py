"""Picture formats: told apart by content, and opened by the one reader that is meant for each.

Pillow's plugins are called by themselves: ``Image.open`` would try formats that nobody allowed, and compares the size
with a limit that belongs to the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata
from io import BytesIO

from PIL import features
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from pixelgate.errors import DecodeError

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML or SVG"),
    (b"<!doctype html", "HTML"),
    (b"<html", "HTML"),
)
_AVIF_BRANDS = {b"avif", b"avis"}
_HEIC_BRANDS = {b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"}


def _avif(file: BytesIO) -> ImageFile:
    if not features.check("avif"):
        raise DecodeError("AVIF pictures are not accepted here: the installed Pillow was built without AVIF")
    return AvifImageFile(file)


def _heic(file: BytesIO) -> ImageFile:
    try:
        from pillow_heif import HeifImageFile
    except ImportError:
        raise DecodeError("HEIC pictures are not accepted here: pixelgate[heif] is not installed") from None
    image: ImageFile = HeifImageFile(file)  # type: ignore[no-untyped-call]
    return image


_READERS: dict[str, Callable[[BytesIO], ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
    "TIFF": TiffImageFile,
    "AVIF": _avif,
    "HEIC": _heic,
}


def _versions() -> tuple[str, ...]:
    try:
        return (f"pillow-heif {metadata.version('pillow-heif')}",)
    except metadata.PackageNotFoundError:
        return ()


VERSIONS = _versions()
"""Name and version of the reader that does not come with Pillow, where it is installed."""


def sniff(data: bytes) -> str | None:
    """Name the format by the first bytes, also of some that are never decoded; None if they say nothing."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if data[4:8] == b"ftyp":
        return _sniff_boxes(data)
    start = bytes(data[:64])
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for signature, kind in _SIGNATURES:
        if start.startswith(signature) or (signature[:1] == b"<" and text.startswith(signature)):
            return kind
    return None


def open_header(data: bytes, kind: str) -> ImageFile:
    """The picture as Pillow sees it, not loaded. Raises DecodeError where the format's reader is not installed."""
    return _READERS[kind](BytesIO(data))


def _sniff_boxes(data: bytes) -> str:
    """The brand that a file in boxes has, or else one that it says it is compatible with: AVIF and HEIC share some."""
    end = min(int.from_bytes(data[:4]), 128)
    brands = [bytes(data[at : at + 4]) for at in (8, *range(16, end, 4))]
    if brands[0] in _AVIF_BRANDS or (brands[0] in _HEIC_BRANDS and not _AVIF_BRANDS.isdisjoint(brands)):
        return "AVIF"
    return "HEIC" if brands[0] in _HEIC_BRANDS else "MP4"
