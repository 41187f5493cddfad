"""Pictures of any resolution, as LLaVA-NeXT and LLaVA-OneVision take them: the best of several canvases, in tiles.

Source: transformers 5.24 ``image_processing_utils.py`` (select_best_resolution, get_patch_output_size),
``models/llava_next/image_processing_llava_next.py`` and ``processing_llava_next.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pixelgate.errors import CheckpointError
from pixelgate.models.checkpoint import Settings
from pixelgate.pixels.plan import Canvas, View
from pixelgate.pixels.resample import Resample

Size = tuple[int, int]


def best_canvas(height: int, width: int, canvases: Sequence[Size]) -> Size:
    """The canvas on which most pixels of the picture survive; of equals the one with least waste, then the first."""
    best, most, least = canvases[0], 0, math.inf
    for canvas_height, canvas_width in canvases:
        scale = min(canvas_width / width, canvas_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = canvas_height * canvas_width - kept
        if kept > most or (kept == most and waste < least):
            best, most, least = (canvas_height, canvas_width), kept, waste
    return best


def fitted(height: int, width: int, canvas: Size) -> Size:
    """The size (height, width) at which a picture just fits a canvas."""
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


def tiled_view(height: int, width: int, canvas: Size, tile: Size, resample: Resample) -> View:
    """The picture fitted to the canvas, centred on black, in tiles."""
    resized = fitted(height, width, canvas)
    top, left = (canvas[0] - resized[0]) // 2, (canvas[1] - resized[1]) // 2
    return View(resized, resample, pad=Canvas(top, left, *canvas), tile=tile)


def unpadded_grid(height: int, width: int, grid: Size) -> Size:
    """The rows and columns of features that are left of a canvas' ``grid`` once the padding is taken off again."""
    rows, columns = grid
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        rows -= (rows - kept) // 2 * 2
    else:
        kept = int(round(width * (rows / height), 7))
        columns -= (columns - kept) // 2 * 2
    return rows, columns


def take_canvases(settings: Settings, tile: Size) -> tuple[Size, ...]:
    """``image_grid_pinpoints``: whole tiles each. Raises CheckpointError."""
    pinpoints = settings.take("image_grid_pinpoints", list)
    whole = pinpoints and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(side, int) and side > 0 and side % edge == 0 for side, edge in zip(pair, tile, strict=True))
        for pair in pinpoints
    )
    if not whole:
        raise CheckpointError(f"image_grid_pinpoints must be (height, width) pairs in multiples of the tile {tile}")
    return tuple((int(height), int(width)) for height, width in pinpoints)
