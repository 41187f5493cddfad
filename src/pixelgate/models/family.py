"""The protocol every family fulfils, and the one registry of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from pixelgate.errors import CheckpointError, OptionError
from pixelgate.models import (
    llama4,
    llava,
    llava_next,
    llava_onevision,
    phi3_vision,
    phi4_multimodal,
    pixtral,
    qwen_vl,
)
from pixelgate.models.backend import Backend
from pixelgate.models.batch import Batch
from pixelgate.models.checkpoint import IMAGE_SETTINGS, Checkpoint
from pixelgate.pixels.plan import ImagePlan
from pixelgate.pixels.resample import PillowOrder
from pixelgate.pixels.tensor import Tensor


class Family(Protocol):
    """What a model family knows about pictures, all of it from sizes alone."""

    @property
    def placeholder(self) -> str:
        """The token that a chat template writes once per picture."""

    @property
    def placeholder_id(self) -> int:
        """The id that receives an embedding wherever it stands in an expansion."""

    @property
    def in_text(self) -> str:
        """What stands for a picture in content that is a string; ``{number}`` in it counts pictures from 1."""

    @property
    def image_tokens(self) -> tuple[str, ...]:
        """The special tokens that only pictures have."""

    @property
    def separate_texts(self) -> bool:
        """Whether the texts around pictures are tokenised one by one, each as if it were a prompt of its own."""

    @property
    def pixels_name(self) -> str:
        """transformers' name of the pixel tensor."""

    @property
    def drops_alpha(self) -> bool:
        """Whether it takes transparent pixels for what they would be without alpha, under ``rgb="hf"``."""

    def plan(self, height: int, width: int, *, images_in_sample: int = 1) -> ImagePlan:
        """What a picture of (height, width) becomes; raises ImageRefusedError."""

    @property
    def embedded(self) -> str:
        """The token of an expansion that receives an embedding."""

    def expansion(self, plan: ImagePlan) -> list[tuple[str, int]]:
        """What replaces the placeholder of a picture: runs of special tokens, as (token, how many)."""

    def collate(self, plans: Sequence[ImagePlan]) -> Batch:
        """Where the pictures' tensors lie in the one tensor of a call."""

    def outputs(self, plans: Sequence[ImagePlan], samples: Sequence[int]) -> Mapping[str, NDArray[Any]]:
        """transformers' arrays besides the pixels; ``samples`` holds the number of pictures of each sample."""

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs as an engine wants them, pixel tensor first."""


class _Module(Protocol):
    """A family's file."""

    @property
    def MODEL_TYPES(self) -> tuple[str, ...]: ...

    @property
    def PROCESSORS(self) -> Mapping[str, tuple[Backend, ...]]: ...

    @property
    def OPTIONS(self) -> tuple[str, ...]: ...

    def from_checkpoint(self, checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> Family: ...


_FAMILIES: tuple[_Module, ...] = (
    llama4,
    llava,
    llava_next,
    llava_onevision,
    phi3_vision,
    phi4_multimodal,
    pixtral,
    qwen_vl,
)


def supported() -> tuple[str, ...]:
    """The ``model_type`` values that have a family."""
    return tuple(sorted({name for family in _FAMILIES for name in family.MODEL_TYPES}))


def choose_backend(checkpoint: Checkpoint, asked: Backend | None) -> Backend:
    """``asked``, or the first that there is. Raises CheckpointError with what there is."""
    backends = _find(checkpoint)[1]
    if asked is not None and asked not in backends:
        name = checkpoint.image_processor or checkpoint.model_type
        raise CheckpointError(f"{name} has no backend {asked!r}, only {', '.join(backends)}")
    return asked or backends[0]


def from_checkpoint(checkpoint: Checkpoint, *, backend: Backend, pillow_order: PillowOrder) -> Family:
    """The family of a checkpoint. Raises CheckpointError with what is supported, OptionError for a call's options."""
    module = _find(checkpoint)[0]
    for name, value in checkpoint.options.items():
        if name not in module.OPTIONS:
            known = ", ".join(module.OPTIONS)
            raise OptionError(f"unknown option {name!r}; this processor knows {known}", param=name)
        if value is None:
            raise OptionError(f"{name} must have a value; leave it out for the checkpoint's own", param=name)
    try:
        return module.from_checkpoint(checkpoint, backend=backend, pillow_order=pillow_order)
    except CheckpointError as failure:
        if not checkpoint.options:
            raise
        # without options the same checkpoint was accepted
        named = next((name for name in checkpoint.options if name in failure.message), None)
        raise OptionError(failure.message.replace(f" of {IMAGE_SETTINGS}", ""), param=named) from None


def _find(checkpoint: Checkpoint) -> tuple[_Module, tuple[Backend, ...]]:
    """A family and its backends, by ``model_type`` and the class of the image processor."""
    candidates = [family for family in _FAMILIES if checkpoint.model_type in family.MODEL_TYPES]
    if not candidates:
        raise CheckpointError(
            f"model_type {checkpoint.model_type!r} is not supported; supported are {', '.join(supported())}"
        )
    known = {name: (family, backends) for family in candidates for name, backends in family.PROCESSORS.items()}
    if not checkpoint.image_processor and len(set(known.values())) == 1:  # older files do not name the class
        return next(iter(known.values()))
    if not checkpoint.image_processor:
        raise CheckpointError(
            f"{IMAGE_SETTINGS} has no image_processor_type, and a {checkpoint.model_type} may have {', '.join(known)}"
        )
    if checkpoint.image_processor not in known:
        raise CheckpointError(
            f"image_processor_type {checkpoint.image_processor!r} of a {checkpoint.model_type} is not supported; "
            f"supported are {', '.join(known)}"
        )
    return known[checkpoint.image_processor]
