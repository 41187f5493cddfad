"""Pictures for the benchmarks: the same bytes everywhere that Pillow is the same."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import PIL.ImageDraw
import PIL.ImageFont

_OCTAVES = (4, 8, 16, 32, 64, 128, 256)
_WORDS = [
    "grid",
    "patch",
    "tile",
    "view",
    "span",
    "token",
    "model",
    "image",
    "light",
    "paper",
    "glass",
    "table",
    "window",
    "river",
    "stone",
    "green",
]


def photo(height: int, width: int, seed: int = 0) -> bytes:
    """A JPEG of smooth shapes of every scale under sensor-like noise: about one bit a pixel, 4:2:0, quality 85."""
    rng = np.random.default_rng(seed)
    scene = np.zeros((height, width, 3), np.float32)
    for octave in _OCTAVES:
        coarse = rng.normal(size=(height // octave + 2, width // octave + 2, 3)).astype(np.float32) * octave
        for channel in range(3):
            layer = PIL.Image.fromarray(coarse[:, :, channel])
            scene[:, :, channel] += np.asarray(layer.resize((width, height), PIL.Image.Resampling.BICUBIC))
    scene = (scene - scene.min()) / (scene.max() - scene.min()) * 255
    scene += rng.normal(size=scene.shape).astype(np.float32) * 5.5
    image = PIL.Image.fromarray(np.clip(scene, 0, 255).astype(np.uint8))
    return _encoded(image, "JPEG", quality=85)


def screenshot(height: int, width: int) -> bytes:
    """An RGB PNG like the ones agents send: flat panels, lines of text, one small photo."""
    rng = np.random.default_rng(1)
    image = PIL.Image.new("RGB", (width, height), (246, 247, 249))
    draw = PIL.ImageDraw.Draw(image)
    font = PIL.ImageFont.load_default(size=17)
    draw.rectangle((0, 0, width, 56), fill=(32, 38, 52))
    draw.rectangle((0, 56, 260, height), fill=(232, 235, 240))
    for top in range(80, height - 30, 32):
        draw.text((20, top), " ".join(rng.choice(_WORDS, 3)), font=font, fill=(60, 70, 90))
    for left in range(290, width - 520, 540):
        draw.rounded_rectangle((left, 90, left + 510, height - 30), 10, fill="white", outline=(210, 214, 220))
        for row, top in enumerate(range(110, height - 60, 23)):
            ink = (20, 90, 200) if row % 5 == 0 else (30, 30, 30)
            draw.text((left + 20, top), " ".join(rng.choice(_WORDS, 9)), font=font, fill=ink)
    with PIL.Image.open(io.BytesIO(photo(240, 320, 2))) as small:
        image.paste(small, (width - 360, height - 300))
    return _encoded(image, "PNG")


def _encoded(image: PIL.Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
