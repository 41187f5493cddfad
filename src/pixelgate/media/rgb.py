"""From a decoded picture of any Pillow mode to 8-bit RGB: our own rule, and those of transformers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from pixelgate.errors import DecodeError

# Copying a big picture in strips that stay in the processor's cache is two to four times as fast as copying it in
# one go, which maps fresh memory twice; and it halves the peak. Below this size the allocator reuses memory anyway.
_BIG = 32 * 1024 * 1024
_STRIP = 768 * 1024

Colour = tuple[int, int, int]

WHITE: Colour = (255, 255, 255)


def flattened(image: Image.Image, background: Colour = WHITE) -> Image.Image:
    """RGB, anything transparent composited on ``background``.

    On white it is what transformers 5.24 makes of a PIL image, bit for bit. As there, 16-bit grey is cut off at
    255; give such a picture to `eight_bit` first.
    """
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba = image if image.mode == "RGBA" else image.convert("RGBA")
    if rgba.getchannel("A").getextrema() != (255, 255):  # else the composite is the picture itself
        rgba = Image.alpha_composite(Image.new("RGBA", rgba.size, (*background, 255)), rgba)
    return rgba.convert("RGB")


def without_alpha(image: Image.Image) -> Image.Image:
    """RGB, the alpha dropped: ``convert("RGB")`` of code that checkpoints bring along."""
    if isinstance(image.info.get("transparency"), bytes):
        image = image.copy()  # the caller's stays as it is
        del image.info["transparency"]  # dropped anyway, but not without a warning
    return image.convert("RGB")


def eight_bit(image: Image.Image, png_depth: int | None) -> Image.Image:
    """Bring what `flattened` would get wrong to 8 bits: 16-bit grey by its high byte, colour keys by the same scale.

    ``png_depth`` is the bit depth in a PNG's header, None for other formats. Raises DecodeError for sample types
    that have no fixed black and white.
    """
    if image.mode.startswith("I;16"):
        return _grey16(image)
    if image.mode in ("I", "F"):
        raise DecodeError(
            "a picture with 32-bit, signed or floating-point samples has no fixed black and white; "
            "convert it to 8 or 16 bits first"
        )
    if image.mode == "La":
        return image.convert("LA")
    key = image.info.get("transparency")
    if png_depth is not None and image.mode in ("L", "RGB") and key is not None:
        # The file states the transparent colour at its own depth, Pillow hands out samples at 8 bits.
        image.info["transparency"] = (
            tuple(_scaled(sample, png_depth) for sample in key) if isinstance(key, tuple) else _scaled(key, png_depth)
        )
    return image


def by_pil_backend(image: Image.Image) -> Image.Image:
    """What transformers' pil backend makes of an upright picture that was given as a path.

    It drops the alpha, then applies the rule for PIL images to the result: a colour key outlives the first step, so
    that this very colour becomes white.
    """
    if isinstance(image.info.get("transparency"), bytes):
        del image.info["transparency"]  # dropped with the alpha, but not without a warning
    return flattened(image.convert("RGB"))


def by_torchvision_backend(image: Image.Image) -> Image.Image:
    """What transformers' torchvision backend makes of a picture that was given as a path: alpha is dropped.

    Transparent pixels of a GIF get the file's background colour.
    """
    if not isinstance(image, GifImageFile) or image.info.get("transparency") is None:
        if isinstance(image.info.get("transparency"), bytes):
            del image.info["transparency"]
        return image.convert("RGB")
    palette = image.global_palette
    start = 3 * image.info.get("background", 0)
    colour = tuple(palette.palette[start : start + 3]) if palette else ()
    background = Image.new("RGBA", image.size, (*colour, 255) if len(colour) == 3 else (0, 0, 0, 255))
    return Image.alpha_composite(background, image.convert("RGBA")).convert("RGB")


def pixels(image: Image.Image) -> NDArray[np.uint8]:
    """An RGB image's memory as uint8 [height, width, 3], C-contiguous; may be read-only."""
    width, height = image.size
    if 3 * width * height < _BIG:
        return np.asarray(image)
    array = np.empty((height, width, 3), np.uint8)
    rows = max(1, _STRIP // (3 * width))
    for top in range(0, height, rows):
        strip = image.crop((0, top, width, min(top + rows, height)))
        array[top : top + rows] = np.asarray(strip)
    return array


def _grey16(image: Image.Image) -> Image.Image:
    samples = np.asarray(image)
    grey = Image.fromarray((samples >> 8).astype(np.uint8))
    key = image.info.get("transparency")
    if key is None:
        return grey
    return Image.merge("LA", (grey, Image.fromarray(np.where(samples == key, 0, 255).astype(np.uint8))))


def _scaled(sample: int, depth: int) -> int:
    if depth == 16:
        return sample >> 8
    most = (1 << depth) - 1
    return (sample & most) * (255 // most)
