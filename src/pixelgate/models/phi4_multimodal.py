"""Phi-4-multimodal: the picture on a canvas of up to 36 tiles, white at its right and below, and the whole before them.

Source: transformers 5.24 ``models/phi4_multimodal/image_processing_phi4_multimodal.py``, and the checkpoint's remote
code ``processing_phi4mm.py``, which does the same with Pillow's resize.
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

from pixelgate.errors import CheckpointError, ImageRefusedError
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch, filled_up, stacked, tiles_and_sizes
from pixelgate.models.checkpoint import Checkpoint
from pixelgate.models.placeholder import NUMBERED_TAG, OnePlaceholder
from pixelgate.models.steps import HALF, Steps, take_steps
from pixelgate.pixels.plan import Canvas, FloatView, ImagePlan, Tiles, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("phi4_multimodal", "phi4mm")
PROCESSORS: Mapping[str, tuple[Backend, ...]] = {
    "Phi4MultimodalImageProcessor": ("torchvision",),
    "Phi4MMImageProcessor": ("remote",),
}
OPTIONS = ("dynamic_hd",)
WHITE = (255, 255, 255)
IMAGE_TOKEN_ID = 200010
PATCH = 14  # pixels of a patch's side
SIDE = 32  # patches of a tile
LEAST = 10  # pixels of a resized side
AUDIO = ("audio_compression_rate", "audio_downsample_rate", "audio_feat_stride")


@dataclass(frozen=True)
class Phi4Multimodal(OnePlaceholder):
    """The arithmetic of one Phi-4-multimodal checkpoint."""

    tile: int
    patch: int
    max_tiles: int
    steps: Steps
    pixels_name: str
    drops_alpha: bool
    placeholder_id: int = IMAGE_TOKEN_ID
    placeholder: str = "<|endoftext10|>"
    in_text: str = NUMBERED_TAG

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes. Raises ImageRefusedError when a side would be under 10 pixels."""
        columns, rows = self._grid(height, width)
        canvas_height, canvas_width = rows * self.tile, columns * self.tile
        across, down = canvas_width / width, canvas_height / height
        resized = (int(height * across), canvas_width) if across < down else (canvas_height, int(width * down))
        if min(resized) < LEAST:
            raise ImageRefusedError(
                f"a picture of {width}x{height} is too narrow: it would be resized to {resized[1]}x{resized[0]}, "
                f"and {LEAST} a side is the least"
            )
        canvas = Canvas(0, 0, canvas_height, canvas_width, WHITE)
        tiled = View(resized, self.steps.resample, pad=canvas, tile=(self.tile, self.tile))
        mask = self._mask(rows, columns, resized)
        tokens = self._tokens(mask)
        masks = np.ones((1, 1 + tiled.tiles, *mask.shape[1::2]), np.float32)
        masks[0, 1:] = mask.transpose(0, 2, 1, 3).reshape(tiled.tiles, *masks.shape[2:])
        aux = {
            "image_sizes": np.array([[canvas_height, canvas_width]], np.int64),
            "image_attention_mask": masks,
            "num_img_tokens": np.array([tokens], np.int64),
        }
        views = (FloatView((self.tile, self.tile), tiled), tiled)
        return ImagePlan(height, width, views, Tiles(), self.steps.affine, tokens, aux=MappingProxyType(aux))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """(columns, rows) of tiles: as large as the picture, or of the closest ratio where those are too many."""
        columns, rows = math.ceil(width / self.tile), math.ceil(height / self.tile)
        if columns * rows <= self.max_tiles:
            return columns, rows
        best, least = (1, 1), math.inf
        for grid in grids(self.max_tiles):
            off = abs(width / height - grid[0] / grid[1])
            enough = height * width > 0.5 * self.tile * self.tile * grid[0] * grid[1]
            if off < least or (off == least and enough):
                best, least = grid, off
        return best

    def _mask(self, rows: int, columns: int, resized: tuple[int, int]) -> NDArray[np.float32]:
        """float32 [rows, patches down, columns, patches across]: 1 where the canvas has pixels of the picture."""
        mask = np.ones((rows * SIDE, columns * SIDE), np.float32)
        mask[len(mask) - (rows * self.tile - resized[0]) // self.patch :] = 0
        mask[:, mask.shape[1] - (columns * self.tile - resized[1]) // self.patch :] = 0
        return mask.reshape(rows, SIDE, columns, SIDE)

    @staticmethod
    def _tokens(mask: NDArray[np.float32]) -> int:
        """Every second patch both ways and one for each row of them, for the first tile and the canvas; a separator."""
        kept = mask.reshape(mask.shape[0] * SIDE, -1)[::2, ::2]
        half = SIDE // 2
        return half * half + half + 1 + int(kept.sum()) + int(kept[:, 0].sum())

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[pictures, most tiles, 3, height, width]; missing tiles are 0.0."""
        return stacked(plans)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """``image_sizes`` int64 [pictures, 2], (height, width) of the canvas; ``num_img_tokens`` int64 [pictures].

        ``image_attention_mask`` float32 [pictures, most tiles, patches, patches] is 1 where tiles are missing.
        """
        joined = {
            name: np.concatenate([plan.aux[name] for plan in plans]) for name in ("image_sizes", "num_img_tokens")
        }
        return {**joined, "image_attention_mask": np.concatenate(self._masks(plans))}

    def _masks(self, plans: Sequence[ImagePlan]) -> tuple[NDArray[Any], ...]:
        return filled_up([plan.aux["image_attention_mask"][0] for plan in plans], fill=1)

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine."""
        mask = Tensor("image_attention_mask", "float32", self._masks(plans), "batched")
        counts = tuple(plan.aux["num_img_tokens"] for plan in plans)
        tokens = Tensor("num_img_tokens", "int64", counts, "batched", keep_on_cpu=True)
        return (*tiles_and_sizes(self.pixels_name, plans, pixels), mask, tokens)


@lru_cache(maxsize=8)
def grids(most: int) -> tuple[tuple[int, int], ...]:
    """(columns, rows) of every canvas, by the number of tiles.

    Of canvases with as many tiles the order is that in which a set iterates, as in transformers; so it is a set here,
    filled in the same order.
    """
    every = {
        (columns, rows)
        for count in range(1, most + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if columns * rows <= most
    }
    return tuple(sorted(every, key=math.prod))


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> Phi4Multimodal:
    """Read the settings. Raises CheckpointError."""
    settings = checkpoint.image_settings()
    settings.expect("resample", 3)  # of the first tile; the others are always bilinear
    remote = backend == "remote"
    if remote:  # numbers that stand in its code
        for name in ("image_mean", "image_std"):
            settings.expect(name, [*HALF])
        settings.expect("rescale_factor", 1 / 255)
    steps = take_steps(settings, backend=backend, pillow_order=pillow_order, mean=HALF, std=HALF, resample=2)
    tile, patch = settings.size("size", 448), settings.count("patch_size", PATCH)
    max_tiles = settings.count("dynamic_hd", 36, most=256)
    settings.ignore(*AUDIO)
    settings.finish()
    if tile != (SIDE * patch, SIDE * patch):  # transformers counts tokens for no other
        raise CheckpointError(f"size must be {SIDE} times the patch_size {patch} both ways, not {tile}")
    if remote and patch != PATCH:
        raise CheckpointError(f"patch_size must be {PATCH}, not {patch}: the checkpoint's own code knows no other")
    name = "input_image_embeds" if remote else "image_pixel_values"
    return Phi4Multimodal(tile[0], patch, max_tiles, steps, name, drops_alpha=remote)
