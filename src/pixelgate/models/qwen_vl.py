"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one resize to a multiple of merged patches, laid out as patches.

Source: transformers 5.24 ``models/qwen2_vl/image_processing_qwen2_vl.py`` and ``image_processing_pil_qwen2_vl.py``,
which all three share; ``processing_qwen2_vl.py`` for the placeholders.
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
from pixelgate.models.batch import Batch, concatenated
from pixelgate.models.checkpoint import Checkpoint, Settings
from pixelgate.models.placeholder import OnePlaceholder
from pixelgate.models.steps import BOTH, COMMON_OPTIONS, Steps, take_steps
from pixelgate.pixels.affine import DTYPE_NAMES
from pixelgate.pixels.plan import ImagePlan, Patches, View
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
PROCESSORS: Mapping[str, tuple[Backend, ...]] = dict.fromkeys(
    ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor"), BOTH
)
OPTIONS = ("min_pixels", "max_pixels", "size", "do_resize", *COMMON_OPTIONS)
MAX_ASPECT_RATIO = 200


@dataclass(frozen=True)
class QwenVL(OnePlaceholder):
    """The arithmetic of one Qwen-VL checkpoint."""

    patches: Patches
    min_pixels: int
    max_pixels: int
    steps: Steps
    placeholder_id: int
    placeholder: str = "<|image_pad|>"
    drops_alpha: bool = False
    pixels_name: str = "pixel_values"

    @property
    def in_text(self) -> str:
        """What stands for a picture in content that is a string."""
        return f"<|vision_start|>{self.placeholder}<|vision_end|>"

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of this size becomes. Raises ImageRefusedError for an aspect ratio above 200."""
        factor, resized = self.patches.patch * self.patches.merge, (height, width)
        if self.steps.resizes:
            bounds = {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}
            resized = smart_resize(height, width, factor=factor, **bounds)
        elif height % factor or width % factor:
            raise ImageRefusedError(
                f"without do_resize the sides of a picture must be multiples of {factor}, not {width}x{height}"
            )
        grid = (1, resized[0] // self.patches.patch, resized[1] // self.patches.patch)
        return ImagePlan(
            height=height,
            width=width,
            views=(View(resized, self.steps.resample),),
            layout=self.patches,
            affine=self.steps.affine,
            tokens=grid[1] * grid[2] // self.patches.merge**2,
            grid=grid,
            aux=MappingProxyType({"image_grid_thw": np.array([grid], np.int64)}),
        )

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """[patches of all pictures, elements of a patch]."""
        return concatenated(plans)

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """``image_grid_thw`` int64 [pictures, 3]."""
        return {"image_grid_thw": np.concatenate([plan.aux["image_grid_thw"] for plan in plans])}

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine, one part per picture; ``pixels[i]`` is what ``plans[i]`` was executed to."""
        rows = [np.array([plan.shape[0]], np.int64) for plan in plans]
        grids = [plan.aux["image_grid_thw"] for plan in plans]
        return (
            Tensor("pixel_values", DTYPE_NAMES[pixels[0].dtype], tuple(pixels), "flat", sizes="patches_per_image"),
            Tensor("image_grid_thw", "int64", tuple(grids), "batched", keep_on_cpu=True),
            Tensor("patches_per_image", "int64", tuple(rows), "batched"),
        )


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size (height, width) in multiples of ``factor``, within the pixel bounds, nearest to the picture's ratio.

    ``smart_resize`` of transformers; Python's round() goes half to even, as there.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ImageRefusedError(
            f"a picture of {width}x{height} is {ratio:.4g} times as long as it is wide; "
            f"this model takes at most {MAX_ASPECT_RATIO}"
        )
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        beta = math.sqrt((height * width) / max_pixels)
        rows = max(factor, math.floor(height / beta / factor) * factor)
        columns = max(factor, math.floor(width / beta / factor) * factor)
    elif rows * columns < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * beta / factor) * factor
        columns = math.ceil(width * beta / factor) * factor
    return rows, columns


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> QwenVL:
    """Read the settings; defaults are those of transformers' class where the checkpoint is silent."""
    settings = checkpoint.image_settings()
    steps = take_steps(settings, backend=backend, pillow_order=pillow_order, may_keep_size=True)
    # a size in the checkpoint is whole, as in transformers: its defaults replace none of its parts
    size = Settings(
        settings.take("size", dict, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}),
        "size of the image processor's configuration",
    )
    min_pixels, max_pixels = size.count("shortest_edge"), size.count("longest_edge")
    size.finish()
    if "size" in checkpoint.options:  # it replaces the older spelling too
        settings.ignore(*{"min_pixels", "max_pixels"}.difference(checkpoint.options))
    settings.nullable("min_pixels", "max_pixels")
    family = QwenVL(
        patches=Patches(
            patch=settings.count("patch_size", 14, most=1024),
            merge=settings.count("merge_size", 2, most=64),
            temporal=settings.count("temporal_patch_size", 2, most=64),
        ),
        # the older spelling wins over size, as in transformers
        min_pixels=settings.count("min_pixels", min_pixels),
        max_pixels=settings.count("max_pixels", max_pixels),
        steps=steps,
        placeholder_id=checkpoint.image_token_id,
    )
    settings.finish()
    vision = checkpoint.section("vision_config")
    for name, ours in (
        ("patch_size", family.patches.patch),
        ("spatial_merge_size", family.patches.merge),
        ("temporal_patch_size", family.patches.temporal),
    ):
        if vision.get(name, ours) != ours:
            raise CheckpointError(
                f"config.json says {name}={vision[name]}, but the image processor's configuration says {ours}"
            )
    return family
