"""Llama 4: the picture on the canvas that fits it best, in tiles, then the whole picture as one more tile.

Source: transformers 5.24 ``models/llama4/image_processing_llama4.py`` and ``processing_llama4.py``. Scales are compared
in float32, and values are rescaled and normalised in bfloat16, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import CheckpointError
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch, concatenated
from pixelgate.models.checkpoint import Checkpoint, Settings
from pixelgate.models.placeholder import InPrompt
from pixelgate.models.steps import COMMON_OPTIONS, HALF, Steps, take_steps
from pixelgate.pixels.affine import DTYPE_NAMES
from pixelgate.pixels.plan import Canvas, ImagePlan, Tiles, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("llama4",)
PROCESSORS: Mapping[str, tuple[Backend, ...]] = {"Llama4ImageProcessor": ("torchvision",)}
OPTIONS = ("max_patches", "resize_to_max_canvas", *COMMON_OPTIONS)
START, END, ACROSS, DOWN = "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"


@dataclass(frozen=True)
class Llama4(InPrompt):
    """The arithmetic of one Llama 4 checkpoint."""

    tile: int
    max_tiles: int
    tile_tokens: int
    to_largest_canvas: bool
    steps: Steps
    placeholder_id: int
    placeholder: str = "<|image|>"
    embedded: str = "<|patch|>"
    pixels_name: str = "pixel_values"
    drops_alpha: bool = False

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes."""
        canvas = best_canvas(height, width, self.tile, self.max_tiles, self.to_largest_canvas)
        resized = fitted(height, width, *(self._most(*sides) for sides in zip((height, width), canvas, strict=True)))
        resample = self.steps.resample
        views = [View(resized, resample, pad=Canvas(0, 0, *canvas), tile=(self.tile, self.tile))]
        if views[0].tiles > 1:
            views.append(View((self.tile, self.tile), resample))
        tiles = sum(view.tiles for view in views)
        grid = canvas[0] // self.tile, canvas[1] // self.tile
        return ImagePlan(
            height,
            width,
            tuple(views),
            Tiles(),
            self.steps.affine,
            tiles * self.tile_tokens,
            dtype="bfloat16",
            aux=MappingProxyType({"aspect_ratios": np.array([grid], np.int64)}),
        )

    def _most(self, side: int, canvas: int) -> int | np.float32:
        """How long a side may become; small pictures are not enlarged to more than one tile.

        The sides of a canvas are a tensor in transformers, and what is computed from them is float32.
        """
        enough = max(side, self.tile)
        return enough if not self.to_largest_canvas and enough <= canvas else np.float32(canvas)

    def expansion(self, plan: ImagePlan) -> list[tuple[str, int]]:
        """Rows of tiles with their separators, then the global tile, between a start and an end."""
        tile = (self.embedded, self.tile_tokens)
        rows, columns = plan.aux["aspect_ratios"][0].tolist()
        row = [tile, *([(ACROSS, 1), tile] * (columns - 1)), (DOWN, 1)]
        tiled = row * rows if rows * columns > 1 else []
        return [(START, 1), *tiled, (self.placeholder, 1), tile, (END, 1)]

    @property
    def image_tokens(self) -> tuple[str, ...]:
        """The special tokens that only pictures have."""
        return (self.placeholder, self.embedded, START, END, ACROSS, DOWN)

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[tiles of all pictures, 3, height, width]."""
        return concatenated(plans)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """``aspect_ratios`` int64 [pictures, 2]: rows and columns of tiles."""
        return {"aspect_ratios": np.concatenate([plan.aux["aspect_ratios"] for plan in plans])}

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine."""
        counts = tuple(np.array([plan.shape[0]], np.int64) for plan in plans)
        ratios = tuple(plan.aux["aspect_ratios"] for plan in plans)
        return (
            Tensor("pixel_values", DTYPE_NAMES[pixels[0].dtype], tuple(pixels), "flat", sizes="patches_per_image"),
            Tensor("patches_per_image", "int64", counts, "batched", keep_on_cpu=True),
            Tensor("aspect_ratios", "int64", ratios, "batched", keep_on_cpu=True),
        )


@lru_cache(maxsize=8)
def canvases(tile: int, max_tiles: int) -> NDArray[np.int64]:
    """int64 [n, 2] (height, width): every rectangle of up to ``max_tiles``, by ratio in order of first occurrence."""
    by_ratio: dict[float, list[tuple[int, int]]] = {}
    for tiles in range(max_tiles, 0, -1):
        for rows in range(1, tiles + 1):
            if tiles % rows == 0:
                columns = tiles // rows
                by_ratio.setdefault(rows / columns, []).append((rows * tile, columns * tile))
    return np.array([size for sizes in by_ratio.values() for size in sizes], np.int64)


def best_canvas(height: int, width: int, tile: int, max_tiles: int, to_largest: bool) -> tuple[int, int]:
    """The canvas that enlarges least, or shrinks least where none is large enough; of equals the smallest."""
    every = canvases(tile, max_tiles)
    across = every[:, 1].astype(np.float32) / np.float32(width)
    down = every[:, 0].astype(np.float32) / np.float32(height)
    scales = np.where(down > across, across, down)
    enlarging = scales[scales >= 1]
    chosen = enlarging.min() if enlarging.size and not to_largest else scales.max()
    candidates = every[scales == chosen]
    best = candidates[np.argmin(candidates[:, 0] * candidates[:, 1])]
    return int(best[0]), int(best[1])


def fitted(height: int, width: int, most_height: int | np.float32, most_width: int | np.float32) -> tuple[int, int]:
    """The size (height, width) at which a picture fits, rounded down, but at least one pixel."""
    across, down = most_width / width, most_height / height
    tallest, widest = int(most_height), int(most_width)
    if across < down:
        return max(min(math.floor(height * across), tallest), 1), widest
    return tallest, max(min(math.floor(width * down), widest), 1)


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> Llama4:
    """Read the settings. Raises CheckpointError."""
    settings = checkpoint.image_settings()
    steps = take_steps(
        settings, backend=backend, pillow_order=pillow_order, mean=HALF, std=HALF, rule="llama4", resample=2
    )
    tile = settings.size("size", 336)
    if tile[0] != tile[1]:
        raise CheckpointError(f"size must be a square, the size of a tile, not {tile}")
    max_tiles = settings.count("max_patches", 16, most=256)
    to_largest = settings.take("resize_to_max_canvas", bool, False)
    settings.ignore("crop_size", "do_center_crop")  # which change nothing here
    settings.finish()
    processor = Settings(checkpoint.processor, "processor_config.json")
    patch = processor.count("patch_size", 14)
    ratio = processor.take("pixel_shuffle_ratio", (int, float), 0.5)
    if not 0 < ratio <= 1:
        raise CheckpointError(f"pixel_shuffle_ratio of processor_config.json must be from 0 to 1, not {ratio}")
    tokens = (tile[0] // patch) ** 2 // round(1 / ratio**2)
    if not tokens:
        raise CheckpointError(f"a tile of {tile[0]} pixels with patch_size {patch} has no tokens")
    return Llama4(tile[0], max_tiles, tokens, to_largest, steps, checkpoint.image_token_id)
