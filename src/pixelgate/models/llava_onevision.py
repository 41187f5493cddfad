"""LLaVA-OneVision: tiles of any resolution for a picture alone, one padded square each for several in a sample.

Source: transformers 5.24 ``models/llava_onevision/image_processing_llava_onevision.py``, its pil counterpart, and
``processing_llava_onevision.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import CheckpointError
from pixelgate.models.anyres import Size, best_canvas, take_canvases, tiled_view, unpadded_grid
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch, stacked, tiles_and_sizes
from pixelgate.models.checkpoint import Checkpoint, Settings
from pixelgate.models.llava import check_fill, drops_class_token, square_canvas
from pixelgate.models.llava_next import image_size
from pixelgate.models.placeholder import OnePlaceholder
from pixelgate.models.steps import BOTH, CLIP_MEAN, COMMON_OPTIONS, Steps, take_steps
from pixelgate.pixels.plan import ImagePlan, Tiles, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("llava_onevision",)
PROCESSORS: Mapping[str, tuple[Backend, ...]] = {"LlavaOnevisionImageProcessor": BOTH}
OPTIONS = COMMON_OPTIONS
SHRINK_ABOVE = 1.1


@dataclass(frozen=True)
class LlavaOnevision(OnePlaceholder):
    """The arithmetic of one LLaVA-OneVision checkpoint."""

    tile: Size
    canvases: tuple[Size, ...]
    tile_tokens: int
    most_tiles: int
    drops_class_token: bool
    steps: Steps
    fill: tuple[float, float, float]
    placeholder_id: int
    placeholder: str = "<image>"
    pixels_name: str = "pixel_values"
    drops_alpha: bool = False

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes, alone in its sample or one of ``images_in_sample``."""
        resample, affine = self.steps.resample, self.steps.affine
        views: tuple[View, ...]
        if images_in_sample > 1:
            square = View(self.tile, resample, pre_pad=square_canvas(height, width, self.fill))
            views, tokens = (square,), self.tile_tokens + 1
        else:
            canvas = best_canvas(height, width, self.canvases)
            views = (View(self.tile, resample), tiled_view(height, width, canvas, self.tile, resample))
            tokens = self._tiled_tokens(height, width, canvas) + self.tile_tokens
        tokens -= self.drops_class_token
        return ImagePlan(height, width, views, Tiles(), affine, tokens, aux=image_size(height, width))

    def _tiled_tokens(self, height: int, width: int, canvas: Size) -> int:
        """Features of the canvas without its padding, shrunk to about ``most_tiles``, and a newline for every row."""
        side = math.isqrt(self.tile_tokens)
        grid = (side * (canvas[0] // self.tile[0]), side * (canvas[1] // self.tile[1]))
        rows, columns = unpadded_grid(height, width, grid)
        ratio = math.sqrt(rows * columns / (self.most_tiles * side**2))
        if ratio > SHRINK_ABOVE:
            return int(rows // ratio) * int(columns // ratio) + int(rows // ratio)
        return rows * columns + rows

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[pictures, most tiles, 3, height, width]; missing tiles are 0.0."""
        return stacked(plans)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """``image_sizes`` int64 [pictures, 2] and ``batch_num_images`` int64 [samples]."""
        sizes = np.concatenate([plan.aux["image_sizes"] for plan in plans])
        return {"image_sizes": sizes, "batch_num_images": np.array(samples, np.int64)}

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine; pictures with fewer tiles than another are filled up with 0.0."""
        return tiles_and_sizes("pixel_values", plans, pixels)


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> LlavaOnevision:
    """Read the settings. Raises CheckpointError."""
    settings = checkpoint.image_settings()
    steps = take_steps(settings, backend=backend, pillow_order=pillow_order)
    tile = settings.size("size", 384)
    if tile[0] != tile[1]:
        raise CheckpointError(f"size must be a square, the size of a tile, not {tile}")
    # the checkpoint's mean whatever a call says, as in transformers
    fill = checkpoint.image_settings(with_options=False).triple("image_mean", CLIP_MEAN)
    check_fill(fill)
    settings.expect("do_pad", True)
    settings.expect("do_center_crop", None, False)
    canvases = take_canvases(settings, tile)
    settings.finish()
    processor = Settings(checkpoint.processor, "processor_config.json")
    tile_tokens = processor.count("num_image_tokens")
    if math.isqrt(tile_tokens) ** 2 != tile_tokens:
        raise CheckpointError(f"num_image_tokens must be a square number, not {tile_tokens}")
    drops = drops_class_token(processor.take("vision_feature_select_strategy", str))
    aspect = processor.take("vision_aspect_ratio", str, "anyres_max_9")
    most = re.fullmatch(r"anyres_max_([1-9]\d*)", aspect)
    if most is None:
        raise CheckpointError(f"vision_aspect_ratio must be anyres_max_ and a number, not {aspect!r}")
    return LlavaOnevision(
        tile=tile,
        canvases=canvases,
        tile_tokens=tile_tokens,
        most_tiles=int(most[1]),
        drops_class_token=drops,
        steps=steps,
        fill=fill,
        placeholder_id=checkpoint.image_token_id,
        placeholder=checkpoint.image_token("<image>"),
    )
