"""Resize cases, the same wherever they are made: shapes that have found mistakes, then random ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

TORCHVISION_FILTERS = ("nearest", "bilinear", "bicubic", "lanczos")
PILLOW_FILTERS = ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos")
FLOAT_TABLE = np.stack([np.arange(256, dtype=np.float32) / np.float32(d) - np.float32(0.5) for d in (255, 127, 64)])
"""What a byte becomes before torch's float32 bicubic: float32 [3, 256]."""
_SHAPES = [
    ((1, 1), (28, 28)),
    ((1, 1), (1, 7)),
    ((3, 5), (84, 140)),
    ((5, 3), (1, 1)),
    ((1, 200), (28, 28)),
    ((200, 1), (1, 300)),
    ((600, 2), (3, 90)),
    ((2, 700), (90, 3)),
    ((336, 336), (336, 100)),
    ((336, 336), (100, 336)),
    ((480, 640), (476, 644)),
    ((640, 480), (448, 336)),
    ((30, 900), (28, 868)),
    ((7, 9), (1, 9)),
    ((9, 7), (9, 1)),
    ((900, 11), (13, 11)),
]
# where torch's two ways to pick the nearest differ, the second with an output small enough for the other
_NEAREST = [((2, 5), (189, 189)), ((2, 4), (41, 82))]
_RANDOM = 44


def resize_cases() -> Iterator[tuple[str, np.ndarray, tuple[int, int]]]:
    """(name, uint8 [h, w, 3], new (h, w)): noise, and black and white pixels, which overshoot most."""
    rng = np.random.default_rng(20)
    shapes = list(_SHAPES)
    for limit in np.resize([16, 64, 200, 500], _RANDOM):
        height, width, new_height, new_width = (int(v) for v in rng.integers(1, limit + 1, 4))
        shapes.append(((height, width), (new_height, new_width)))
    shapes += _NEAREST
    for number, (old, new) in enumerate(shapes):
        image = rng.integers(0, 256, (*old, 3), dtype=np.uint8)
        if number % 2:
            image = np.where(image < 128, 0, 255).astype(np.uint8)
        yield f"{number}_{old[0]}x{old[1]}_to_{new[0]}x{new[1]}", image, new
