"""Photo-like JPEGs for the benchmarks: the same bytes everywhere that Pillow is the same."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image

_OCTAVES = (4, 8, 16, 32, 64, 128, 256)


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
    buffer = io.BytesIO()
    PIL.Image.fromarray(np.clip(scene, 0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
