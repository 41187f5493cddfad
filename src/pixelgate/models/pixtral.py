"""Pixtral and Mistral 3: one resize to whole patches, at most the longest edge; rows of patches end with a token.

Source: transformers 5.24 ``models/pixtral/image_processing_pixtral.py``, its pil counterpart, and
``processing_pixtral.py``, which multiplies the patch size by the model's spatial merge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import CheckpointError, ImageRefusedError
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch, padded
from pixelgate.models.checkpoint import Checkpoint, Settings
from pixelgate.models.placeholder import InPrompt
from pixelgate.models.steps import BOTH, COMMON_OPTIONS, Steps, take_steps
from pixelgate.pixels.affine import DTYPE_NAMES
from pixelgate.pixels.plan import ImagePlan, Tiles, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("llava", "pixtral", "mistral3")
PROCESSORS: Mapping[str, tuple[Backend, ...]] = {"PixtralImageProcessor": BOTH}
OPTIONS = ("size", "do_resize", *COMMON_OPTIONS)


@dataclass(frozen=True)
class Pixtral(InPrompt):
    """The arithmetic of one Pixtral or Mistral 3 checkpoint; ``patch`` is what one token covers, in pixels."""

    patch: int
    longest_edge: int
    steps: Steps
    placeholder_id: int
    placeholder: str
    row_end: str
    image_end: str
    pixels_name: str = "pixel_values"
    drops_alpha: bool = False

    @property
    def embedded(self) -> str:
        """The token that receives an embedding."""
        return self.placeholder

    @property
    def image_tokens(self) -> tuple[str, ...]:
        """The special tokens that only pictures have."""
        return (self.placeholder, self.row_end, self.image_end)

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes. Raises ImageRefusedError when a side would vanish."""
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        kept_height, kept_width = height, width
        if self.steps.resizes and ratio > 1:
            kept_height, kept_width = math.floor(height / ratio), math.floor(width / ratio)
        if not kept_height or not kept_width:
            raise ImageRefusedError(f"a picture of {width}x{height} is too narrow: nothing of it would be left")
        rows, columns = (kept_height - 1) // self.patch + 1, (kept_width - 1) // self.patch + 1
        size = rows * self.patch, columns * self.patch
        if not self.steps.resizes and size != (height, width):
            raise ImageRefusedError(
                f"without do_resize the sides of a picture must be multiples of {self.patch}, not {width}x{height}"
            )
        return ImagePlan(
            height,
            width,
            (View(size, self.steps.resample),),
            Tiles(),
            self.steps.affine,
            rows * columns,
            grid=(1, rows, columns),
            aux=MappingProxyType({"image_sizes": np.array([size], np.int64)}),
        )

    def expansion(self, plan: ImagePlan) -> list[tuple[str, int]]:
        """A row of placeholders, the token that ends it, and so on; the last row ends the picture."""
        assert plan.grid is not None
        _, rows, columns = plan.grid
        runs = [(self.placeholder, columns), (self.row_end, 1)] * rows
        return [*runs[:-1], (self.image_end, 1)]

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[pictures, 3, tallest, widest]; around smaller pictures is 0.0."""
        return padded(plans)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """``image_sizes`` int64 [pictures, 2]: the resized (height, width)."""
        return {"image_sizes": np.concatenate([plan.aux["image_sizes"] for plan in plans])}

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine."""
        return (Tensor("pixel_values", DTYPE_NAMES[pixels[0].dtype], tuple(pixels), "batched"),)


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> Pixtral:
    """Read the settings. Raises CheckpointError."""
    settings = checkpoint.image_settings()
    steps = take_steps(settings, backend=backend, pillow_order=pillow_order, may_keep_size=True)
    size = Settings(settings.take("size", dict, {"longest_edge": 1024}), "size of the image processor's configuration")
    longest = size.count("longest_edge")
    size.finish()
    settings.nullable("patch_size")
    own = settings.size("patch_size", 16)
    settings.expect("do_pad", True)
    settings.finish()
    processor = Settings(checkpoint.processor, "processor_config.json")
    merge = processor.count("spatial_merge_size", 1)
    patch = processor.count("patch_size", 16)
    if own not in ((patch, patch), (patch * merge, patch * merge)):  # of a patch, or of what a token covers
        raise CheckpointError(
            f"patch_size is {own} in the image processor's configuration, but {patch} in the processor's"
        )
    if checkpoint.config.get("spatial_merge_size", merge) != merge:
        raise CheckpointError(
            f"config.json says spatial_merge_size={checkpoint.config['spatial_merge_size']}, "
            f"but processor_config.json says {merge}"
        )
    return Pixtral(
        patch * merge,
        longest,
        steps,
        checkpoint.image_token_id,
        checkpoint.image_token("[IMG]"),
        processor.take("image_break_token", str, "[IMG_BREAK]"),
        processor.take("image_end_token", str, "[IMG_END]"),
    )
