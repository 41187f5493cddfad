"""Encoded pictures to upright 8-bit RGB arrays, behind one guard: whatever a decoder throws becomes our own error.

All functions may run in many threads at once; nothing global is read or changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile

from pixelgate.errors import DecodeError, MediaError, PixelgateError, TooLargeError
from pixelgate.media import arrow, fast, formats, rgb, structure
from pixelgate.media.policy import MediaPolicy

Backend = Literal["torchvision", "pil"]
_Rule = Literal["pixelgate", "torchvision", "pil"]

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)
_PLAIN_FORMATS = ("JPEG", "PNG", "WEBP")
_PLAIN_MODES = ("L", "P", "RGB")
_PNG_HEAD = 33  # signature and IHDR
_PNG_DEPTH = 24  # the bit depth's place in it
_PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


@dataclass(frozen=True)
class Header:
    """What a picture's header tells: the size it will have once upright, and its format."""

    height: int
    width: int
    format: str


def header(data: bytes, policy: MediaPolicy, backend: Backend = "torchvision") -> Header:
    """Size and format without decoding a pixel; `decode` gives exactly this size.

    ``backend`` matters under ``rgb="hf"`` alone. Raises DecodeError for what is no accepted picture, TooLargeError
    above the policy's limits.
    """
    with _guarded(data):
        image, kind = _opened(data, policy)
        orientation = _orientation(image, kind, data, _rule(image, kind, data, policy, backend))
        return Header(*_upright_size(image, orientation), kind)


def plain(data: bytes, policy: MediaPolicy) -> str | None:
    """The format of a picture that any decoder reads as `decode` does, known from its header; None for all others.

    Plain pictures are JPEG, PNG or WEBP with one frame, upright as stored, opaque, in RGB or grey of 8 bits. Raises
    what `header` does.
    """
    with _guarded(data):
        image, kind = _opened(data, policy)
        one_frame = not getattr(image, "is_animated", False)
        upright = _orientation(image, kind, data, "pixelgate") == 1
        opaque = image.mode in _PLAIN_MODES and image.info.get("transparency") is None
        eight_bits = kind != "PNG" or data[_PNG_DEPTH] <= 8
        return kind if kind in _PLAIN_FORMATS and one_frame and upright and opaque and eight_bits else None


def decode(data: bytes, policy: MediaPolicy, backend: Backend = "torchvision") -> NDArray[np.uint8]:
    """Decode to uint8 RGB [height, width, 3], C-contiguous, by the rule that ``policy.rgb`` names.

    Under ``rgb="hf"`` it is what transformers' ``backend`` makes of a path or URL; what its torchvision backend refuses
    or garbles (BMP, TIFF, AVIF, HEIC, animated WebP, 16-bit PNG) follows our own rule.
    Raises DecodeError for what is no accepted picture or a damaged one, TooLargeError above the policy's limits.
    """
    picture = _decoded(data, policy, backend)
    if isinstance(picture, np.ndarray):
        return np.ascontiguousarray(picture[:, :, :3])
    return rgb.pixels(picture)


def decode_rows(data: bytes, policy: MediaPolicy, backend: Backend = "torchvision") -> NDArray[np.uint8]:
    """`decode` without its last copy: [height, width, 3], or 4 with a byte that means nothing; may be read-only.

    This is what the kernels read; it may be the decoder's own memory.
    """
    picture = _decoded(data, policy, backend)
    return picture if isinstance(picture, np.ndarray) else _rows(picture)


def from_pil(image: Image.Image, policy: MediaPolicy, *, drops_alpha: bool = False) -> NDArray[np.uint8]:
    """A PIL image as transformers takes it, for both values of ``policy.rgb``: on the background, not turned by EXIF.

    With ``drops_alpha`` what is transparent has the colour below its alpha. Returns rows like `decode_rows`; they may
    be the image's own memory.
    """
    _check_pixels(image.height, image.width, policy)
    with _guarded():
        return _rows(rgb.without_alpha(image) if drops_alpha else rgb.flattened(image, policy.background_rgb))


def from_array(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Check an RGB array, uint8 [height, width, 3]; copied only if its rows are not contiguous."""
    if not isinstance(array, np.ndarray) or array.dtype != np.uint8:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise MediaError(f"a picture as an array must be uint8 with values 0 to 255, not {kind}")
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise MediaError(
            f"a picture as an array must be RGB of shape [height, width, 3], not {list(array.shape)}; "
            "the channels come last, grey needs three equal channels"
        )
    # not ascontiguousarray: it leaves odd strides to axes of length 1
    return array if array.flags.c_contiguous and array.strides == (3 * array.shape[1], 3, 1) else array.copy()


def read_path(path: str | Path, policy: MediaPolicy) -> bytes:
    """Read an encoded picture for a caller in this process. Raises MediaError, or TooLargeError above max_bytes."""
    if "://" in str(path):
        raise MediaError(f"{str(path)!r} is a URL, and nothing is fetched here: give a file")
    path = Path(path)
    try:
        if not path.is_file():  # a pipe would block, a device never end
            raise MediaError(f"there is no picture file {str(path)!r}")
        with path.open("rb") as file:
            data = file.read(policy.max_bytes + 1)
    except OSError:
        raise MediaError(f"the picture file {str(path)!r} cannot be read") from None
    _check_bytes(data, policy)
    return data


def _decoded(data: bytes, policy: MediaPolicy, backend: Backend) -> NDArray[np.uint8] | Image.Image:
    """The upright picture: rows of a faster decoder, or an RGB image of Pillow's."""
    with _guarded(data):
        image, kind = _opened(data, policy)
        rule = _rule(image, kind, data, policy, backend)
        orientation = _orientation(image, kind, data, rule)
        height, width = _upright_size(image, orientation)
        # every rule leaves a plain picture that stands upright as it is
        if orientation not in _TURNS and (pixels := fast.decode(data, image, kind)) is not None:
            return pixels
        image.load()
        if rule == "pil":
            picture = rgb.by_pil_backend(image)
        elif rule == "torchvision":
            picture = rgb.by_torchvision_backend(image)
        else:
            picture = rgb.flattened(
                rgb.eight_bit(image, data[_PNG_DEPTH] if kind == "PNG" else None), policy.background_rgb
            )
        if orientation in _TURNS and kind != "TIFF":  # Pillow has turned a TIFF while loading it
            picture = picture.transpose(_TURNS[orientation])
        if picture.size != (width, height):
            raise DecodeError(f"the {kind} picture has another size than its header says")
        return picture


def _rows(picture: Image.Image) -> NDArray[np.uint8]:
    picture.load()
    shared = arrow.shared_pixels(picture)
    return rgb.pixels(picture) if shared is None else shared


@contextmanager
def _guarded(data: bytes = b"") -> Iterator[None]:
    """Turn whatever a decoder throws over ``data`` into our own errors."""
    try:
        yield
    except PixelgateError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise TooLargeError("the picture has more pixels than the limit allows") from None
    except MemoryError:
        raise TooLargeError("decoding the picture takes more memory than is allowed") from None
    except Exception:  # decoders throw OSError, SyntaxError, ValueError, struct.error and more
        kind = f"{formats.sniff(data)} picture" if data else "picture"
        raise DecodeError(f"the {kind} is damaged, cut short, or of a kind that is not supported") from None


def _opened(data: bytes, policy: MediaPolicy) -> tuple[ImageFile, str]:
    _check_bytes(data, policy)
    kind = formats.sniff(data)
    if kind not in policy.formats:
        found = "there are no bytes" if not data else f"this is {kind}" if kind else "this is no known format"
        raise DecodeError(f"not a picture in an accepted format ({', '.join(policy.formats)}): {found}")
    structure.check(data, kind)
    image = formats.open_header(data, kind)
    _check_pixels(image.height, image.width, policy)
    return image, kind


def _check_bytes(data: bytes, policy: MediaPolicy) -> None:
    if len(data) > policy.max_bytes:
        raise TooLargeError(f"the picture is larger than the limit of {policy.max_bytes} bytes")


def _check_pixels(height: int, width: int, policy: MediaPolicy) -> None:
    if height * width > policy.max_pixels:
        raise TooLargeError(
            f"the picture has {width}x{height} pixels, more than the limit of {policy.max_pixels} in all"
        )


def _rule(image: ImageFile, kind: str, data: bytes, policy: MediaPolicy, backend: Backend) -> _Rule:
    if policy.rgb == "pixelgate":
        return "pixelgate"
    if backend == "torchvision" and (
        kind in ("BMP", "TIFF", "AVIF", "HEIC")
        or (kind == "WEBP" and getattr(image, "is_animated", False))
        or (kind == "PNG" and data[_PNG_DEPTH] == 16)
    ):
        return "pixelgate"  # torchvision raises, or returns 16-bit values as if they were 8-bit ones
    return backend


def _orientation(image: ImageFile, kind: str, data: bytes, rule: _Rule) -> int:
    """EXIF orientation, found without decoding. Metadata that cannot be read means upright."""
    try:
        if rule == "torchvision":
            if kind not in ("JPEG", "PNG") or "exif" not in image.info:
                return 1
            exif = Image.Exif()
            exif.load(image.info["exif"])
        else:
            if kind == "PNG":
                image.info |= _late_metadata(data)
            exif = Image.Image.getexif(image)  # PngImageFile's own would decode the picture first
        orientation = exif.get(ExifTags.Base.Orientation)
    except Exception:
        return 1
    return orientation if isinstance(orientation, int) and orientation in _TURNS else 1


def _late_metadata(data: bytes) -> dict[str | tuple[int, int], Any]:
    """A PNG's orientation metadata from behind its pixels, where Pillow only looks after decoding them."""
    chunks: list[bytes] = []
    seen = False
    at = 8
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4])
        name = data[at + 4 : at + 8]
        if name == b"IDAT":
            seen = True
        elif seen and name in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            chunks.append(data[at:end])
        at = end
    if not chunks:
        return {}
    info = PngImageFile(BytesIO(data[:_PNG_HEAD] + b"".join(chunks) + _PNG_END)).info
    wanted = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
    return {key: info[key] for key in wanted if key in info}


def _upright_size(image: ImageFile, orientation: int) -> tuple[int, int]:
    turned = isinstance(image, TiffImageFile) and image.tag_v2.get(ExifTags.Base.Orientation) in _SIDEWAYS
    if orientation in _SIDEWAYS and not turned:
        return image.width, image.height
    return image.height, image.width
