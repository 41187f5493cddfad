"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one resize to a multiple of merged patches, laid out as patches.

Source: transformers 5.24 ``models/qwen2_vl/image_processing_qwen2_vl.py`` and ``image_processing_pil_qwen2_vl.py``,
which all three share; ``processing_qwen2_vl.py`` for the placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import CheckpointError, ImageRefusedError, OptionError
from pixelgate.models.checkpoint import Checkpoint, Settings
from pixelgate.pixels.affine import Affine, Rule
from pixelgate.pixels.plan import ImagePlan, Patches, View
from pixelgate.pixels.resample import Filter, PillowOrder, Resample
from pixelgate.pixels.tensor import Tensor

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MAX_ASPECT_RATIO = 200
PIL_FILTERS: dict[int, Filter] = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class QwenVL:
    """The arithmetic of one Qwen-VL checkpoint."""

    patches: Patches
    min_pixels: int
    max_pixels: int
    resample: Resample
    affine: Affine
    placeholder_id: int
    placeholder: str = "<|image_pad|>"
    pixels_name: str = "pixel_values"
    options: tuple[str, ...] = ("min_pixels", "max_pixels")

    def plan(self, height: int, width: int, *, images_in_sample: int = 1, **options: Any) -> ImagePlan:
        """What a picture of this size becomes. ``min_pixels`` and ``max_pixels`` override the checkpoint's bounds.

        Raises ImageRefusedError for an aspect ratio above 200, OptionError for an unknown or impossible option.
        """
        family = self._with(options) if options else self
        resized = smart_resize(
            height,
            width,
            factor=self.patches.patch * self.patches.merge,
            min_pixels=family.min_pixels,
            max_pixels=family.max_pixels,
        )
        grid = (1, resized[0] // self.patches.patch, resized[1] // self.patches.patch)
        return ImagePlan(
            height=height,
            width=width,
            views=(View(resized, self.resample),),
            layout=self.patches,
            affine=self.affine,
            tokens=grid[1] * grid[2] // self.patches.merge**2,
            grid=grid,
            aux=MappingProxyType({"image_grid_thw": np.array([grid], np.int64)}),
        )

    def expansion(self, plan: ImagePlan) -> list[int]:
        """The token ids that stand for one picture in the prompt: one placeholder per merged patch."""
        return [self.placeholder_id] * plan.tokens

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs for an engine, one part per picture; ``pixels[i]`` is what ``plans[i]`` was executed to."""
        rows = [np.array([plan.shape[0]], np.int64) for plan in plans]
        grids = [plan.aux["image_grid_thw"] for plan in plans]
        return (
            Tensor("pixel_values", pixels[0].dtype.name, tuple(pixels), "flat", sizes="patches_per_image"),
            Tensor("image_grid_thw", "int64", tuple(grids), "batched", keep_on_cpu=True),
            Tensor("patches_per_image", "int64", tuple(rows), "batched"),
        )

    def _with(self, options: dict[str, Any]) -> QwenVL:
        for name, value in options.items():
            if name not in self.options:
                raise OptionError(
                    f"unknown option {name!r}; this processor knows {', '.join(self.options)}", param=name
                )
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name} must be a positive number of pixels, not {value!r}", param=name)
        family = replace(self, **options)
        if family.min_pixels > family.max_pixels:
            raise OptionError(
                f"min_pixels ({family.min_pixels}) is above max_pixels ({family.max_pixels})",
                param="min_pixels",
            )
        return family


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


def from_checkpoint(checkpoint: Checkpoint, *, backend: Rule, pillow_order: PillowOrder) -> QwenVL:
    """Read the settings; defaults are those of transformers' class where the checkpoint is silent."""
    source = "the image processor's configuration"
    settings = Settings(checkpoint.preprocessor, source)
    for switch in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        settings.expect(switch, True)
    # a size in the checkpoint is whole, as in transformers: its defaults replace none of its parts
    size = Settings(
        settings.take("size", dict, {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}), f"size of {source}"
    )
    min_pixels, max_pixels = size.count("shortest_edge"), size.count("longest_edge")
    size.finish()
    resample = settings.take("resample", int, 3)
    if resample not in PIL_FILTERS:
        raise CheckpointError(f"resample={resample} of {source} is not one of {sorted(PIL_FILTERS)}")
    family = QwenVL(
        patches=Patches(
            patch=settings.count("patch_size", 14, most=1024),
            merge=settings.count("merge_size", 2, most=64),
            temporal=settings.count("temporal_patch_size", 2, most=64),
        ),
        # the older spelling wins over size, as in transformers
        min_pixels=settings.count("min_pixels", min_pixels),
        max_pixels=settings.count("max_pixels", max_pixels),
        resample=Resample(PIL_FILTERS[resample], "pillow" if backend == "pil" else "torchvision", pillow_order),
        affine=Affine(
            rule=backend,
            mean=settings.triple("image_mean", CLIP_MEAN),
            std=settings.triple("image_std", CLIP_STD),
            rescale_factor=settings.take("rescale_factor", (int, float), 1 / 255),
        ),
        placeholder_id=Settings(checkpoint.config, "config.json").take("image_token_id", int),
    )
    settings.ignore("image_processor_type", "feature_extractor_type", "processor_class", "auto_map", "_processor_class")
    settings.ignore("default_to_square", "data_format", "input_data_format", "device", "disable_grouping")
    settings.ignore("return_tensors", "video_processor_type")
    settings.finish()
    if not (family.affine.rescale_factor > 0 and all(math.isfinite(v) and v for v in family.affine.std)):
        raise CheckpointError(f"rescale_factor and image_std of {source} must not be zero")
    vision = checkpoint.config.get("vision_config", {})
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
