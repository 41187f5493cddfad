"""What every image processor of transformers does the same way: conversion, filter, rescaling and normalising."""

from __future__ import annotations

from dataclasses import dataclass

from pixelgate.errors import CheckpointError
from pixelgate.models.backend import Backend
from pixelgate.models.checkpoint import Settings, is_number
from pixelgate.pixels.affine import Affine, Rule
from pixelgate.pixels.resample import Filter, PillowOrder, Resample, Semantics

BOTH: tuple[Backend, ...] = ("torchvision", "pil")
PIL_FILTERS: dict[int, Filter] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
NORMALISING = ("image_mean", "image_std", "rescale_factor")
"""The options of a call that change no size and no byte, only what is made of the bytes."""
COMMON_OPTIONS = (*NORMALISING, "resample")
"""The options of a call that mean the same to every processor of transformers' own."""

# names and switches of transformers' own that change no number
_IGNORED = (
    "image_processor_type",
    "feature_extractor_type",
    "processor_class",
    "_processor_class",
    "video_processor_type",
    "auto_map",
    "data_format",
    "input_data_format",
    "device",
    "disable_grouping",
    "return_tensors",
)


@dataclass(frozen=True)
class Steps:
    """The steps of a processor that do not depend on a picture's size."""

    resample: Resample
    affine: Affine
    resizes: bool = True


def take_steps(
    settings: Settings,
    *,
    backend: Backend,
    pillow_order: PillowOrder,
    mean: tuple[float, float, float] = CLIP_MEAN,
    std: tuple[float, float, float] = CLIP_STD,
    resample: int = 3,
    rule: Rule | None = None,
    square: bool = True,
    may_keep_size: bool = False,
) -> Steps:
    """Read them; ``mean``, ``std`` and ``resample`` are the defaults of transformers' class.

    ``rule`` is that of the normalisation, where it is not the backend's; ``square`` is whether a size of one number is
    that of a square, and ``may_keep_size`` whether the family knows what to do without ``do_resize``.
    Raises CheckpointError.
    """
    resizes = settings.switch("do_resize") if may_keep_size else True
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        settings.expect(name, True)
    # it decides what a size that is a single number means
    if settings.is_number("size"):
        settings.expect("default_to_square", square)
    settings.ignore(*_IGNORED, "default_to_square")
    number = settings.take("resample", int, resample)
    # remote code resizes with Pillow and normalises as the pil backend does, entry for entry
    semantics: Semantics = "torchvision" if backend == "torchvision" else "pillow"
    try:
        chosen = Resample(PIL_FILTERS[number], semantics, pillow_order)
    except (KeyError, ValueError):
        known = ", ".join(f"{number} is {name}" for number, name in PIL_FILTERS.items())
        raise CheckpointError(
            f"resample={number} is no filter that the {backend} backend has (by Pillow's numbers: {known})"
        ) from None
    affine = Affine(
        rule=rule or ("torchvision" if backend == "torchvision" else "pil"),
        mean=settings.triple("image_mean", mean),
        std=settings.triple("image_std", std),
        rescale_factor=settings.take("rescale_factor", (int, float), 1 / 255),
    )
    if not (is_number(affine.rescale_factor) and affine.rescale_factor > 0 and all(affine.std)):
        raise CheckpointError("rescale_factor must be positive, and image_std must not be zero")
    return Steps(chosen, affine, resizes)
