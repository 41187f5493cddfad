"""LLaVA-NeXT (1.6): the whole picture as a first tile, then the picture on its best canvas in tiles.

Source: transformers 5.24 ``models/llava_next/image_processing_llava_next.py``, its pil counterpart, and
``processing_llava_next.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import CheckpointError
from pixelgate.models.anyres import Size, best_canvas, take_canvases, tiled_view, unpadded_grid
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch, stacked, tiles_and_sizes
from pixelgate.models.checkpoint import Checkpoint
from pixelgate.models.llava import Vision, shortest_edge
from pixelgate.models.placeholder import OnePlaceholder
from pixelgate.models.steps import BOTH, COMMON_OPTIONS, Steps, take_steps
from pixelgate.pixels.plan import ImagePlan, Tiles, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("llava_next",)
PROCESSORS: Mapping[str, tuple[Backend, ...]] = {"LlavaNextImageProcessor": BOTH}
OPTIONS = COMMON_OPTIONS


@dataclass(frozen=True)
class LlavaNext(OnePlaceholder):
    """The arithmetic of one LLaVA-NeXT checkpoint."""

    tile: Size
    canvases: tuple[Size, ...]
    vision: Vision
    steps: Steps
    placeholder_id: int
    placeholder: str = "<image>"
    pixels_name: str = "pixel_values"
    drops_alpha: bool = False

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes: a base tile and the tiles of its best canvas."""
        canvas = best_canvas(height, width, self.canvases)
        base = View(self.tile, self.steps.resample)
        views = (base, tiled_view(height, width, canvas, self.tile, self.steps.resample))
        rows, columns = self.tile[0] // self.vision.patch, self.tile[1] // self.vision.patch
        grid = (rows * (canvas[0] // self.tile[0]), columns * (canvas[1] // self.tile[1]))
        kept_rows, kept_columns = unpadded_grid(height, width, grid)
        # every row of the canvas ends with a newline feature
        tokens = kept_rows * kept_columns + kept_rows + self.vision.features(*self.tile)
        return ImagePlan(height, width, views, Tiles(), self.steps.affine, tokens, aux=image_size(height, width))

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[pictures, most tiles, 3, height, width]; missing tiles are 0.0."""
        return stacked(plans)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """``image_sizes`` int64 [pictures, 2]: the pictures' own (height, width)."""
        return {"image_sizes": np.concatenate([plan.aux["image_sizes"] for plan in plans])}

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine; pictures with fewer tiles than another are filled up with 0.0."""
        return tiles_and_sizes("pixel_values", plans, pixels)


def image_size(height: int, width: int) -> Mapping[str, NDArray[Any]]:
    """``image_sizes`` of one picture."""
    return MappingProxyType({"image_sizes": np.array([[height, width]], np.int64)})


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> LlavaNext:
    """Read the settings. Raises CheckpointError."""
    settings = checkpoint.image_settings()
    steps = take_steps(settings, backend=backend, pillow_order=pillow_order, square=False)
    edge = shortest_edge(settings)
    crop = settings.size("crop_size", 224)
    for switch in ("do_center_crop", "do_pad"):
        settings.expect(switch, True)
    settings.expect("aspect_ratio_setting", "anyres")
    if crop != (edge, edge):
        raise CheckpointError(f"crop_size {crop} and the shortest edge {edge} must be the same: the size of a tile")
    canvases = take_canvases(settings, crop)
    settings.finish()
    return LlavaNext(
        crop, canvases, Vision.read(checkpoint), steps, checkpoint.image_token_id, checkpoint.image_token("<image>")
    )
