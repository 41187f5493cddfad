"""Phi-3-vision and Phi-3.5-vision: as many tiles as fit the budget, on white, and the whole in one tile before them.

Source: the checkpoints' remote code, ``image_processing_phi3_v.py`` and ``processing_phi3_v.py``: Pillow's resize of
the picture, and torch's float32 bicubic of the normalised result for the first tile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import ImageRefusedError
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch, stacked, tiles_and_sizes
from pixelgate.models.checkpoint import Checkpoint
from pixelgate.models.placeholder import NUMBERED_TAG, OnePlaceholder
from pixelgate.models.steps import Steps, take_steps
from pixelgate.pixels.plan import Canvas, FloatView, ImagePlan, Tiles, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("phi3_v",)
PROCESSORS: Mapping[str, tuple[Backend, ...]] = {"Phi3VImageProcessor": ("remote",)}
OPTIONS = ("num_crops",)
TILE = 336
ROW_TOKENS = 12  # a tile is 12 rows of 12 tokens, and every row of the picture ends with one more
WHITE = (255, 255, 255)
IMAGE_TOKEN_ID = 32044


@dataclass(frozen=True)
class Phi3Vision(OnePlaceholder):
    """The arithmetic of one Phi-3-vision checkpoint."""

    crops: int
    steps: Steps
    placeholder_id: int = IMAGE_TOKEN_ID  # that of engines; the remote code writes -k for picture k
    placeholder: str = "<|image|>"
    pixels_name: str = "pixel_values"
    drops_alpha: bool = False
    separate_texts: bool = True
    in_text: str = NUMBERED_TAG

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes. Raises ImageRefusedError when a side would vanish."""
        long, short = max(height, width), min(height, width)
        ratio = long / short
        across = 1
        while (across + 1) * math.ceil((across + 1) / ratio) <= self.crops:
            across += 1
        length = across * TILE
        breadth = int(length / ratio)
        if not breadth:
            raise ImageRefusedError(f"a picture of {width}x{height} is too narrow: nothing of it would be left")
        padded = math.ceil(breadth / TILE) * TILE
        before = (padded - breadth) // 2
        # an upright picture is turned over its diagonal, resized and turned back
        upright = width < height
        if upright:
            resized, canvas = (length, breadth), Canvas(0, before, length, padded, WHITE)
        else:
            resized, canvas = (breadth, length), Canvas(before, 0, padded, length, WHITE)
        tiled = View(resized, self.steps.resample, pad=canvas, tile=(TILE, TILE), transpose=upright)
        rows, columns = canvas.height // TILE, canvas.width // TILE
        tokens = (rows * columns + 1) * ROW_TOKENS**2 + 1 + (rows + 1) * ROW_TOKENS
        aux = {
            "image_sizes": np.array([[canvas.height, canvas.width]], np.int64),
            "num_img_tokens": np.array([tokens], np.int64),
        }
        views = (FloatView((TILE, TILE), tiled), tiled)
        return ImagePlan(height, width, views, Tiles(), self.steps.affine, tokens, aux=MappingProxyType(aux))

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[pictures, crops + 1, 3, 336, 336]; missing tiles are 0.0."""
        return stacked(plans, self.crops + 1)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """``image_sizes`` int64 [pictures, 2], (height, width) of the canvas; ``num_img_tokens`` int64 [pictures]."""
        return {name: np.concatenate([plan.aux[name] for plan in plans]) for name in plans[0].aux}

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine."""
        return tiles_and_sizes(self.pixels_name, plans, pixels, self.crops + 1)


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> Phi3Vision:
    """Read the settings. Raises CheckpointError."""
    settings = checkpoint.image_settings()
    settings.expect("resample", 2)
    settings.expect("rescale_factor", 1 / 255)
    steps = take_steps(settings, backend=backend, pillow_order=pillow_order, resample=2)
    crops = settings.count("num_crops", 1, most=256)
    settings.expect("num_img_tokens", ROW_TOKENS**2)
    settings.finish()
    return Phi3Vision(crops, steps)
