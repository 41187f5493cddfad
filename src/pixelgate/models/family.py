"""The protocol every family fulfils, and the one registry of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from pixelgate.errors import CheckpointError
from pixelgate.models import qwen_vl
from pixelgate.models.checkpoint import Checkpoint
from pixelgate.pixels.affine import Rule
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
    def pixels_name(self) -> str:
        """transformers' name of the pixel tensor."""

    def plan(self, height: int, width: int, *, images_in_sample: int = 1, **options: Any) -> ImagePlan:
        """What a picture of (height, width) becomes; raises ImageRefusedError or OptionError."""

    def expansion(self, plan: ImagePlan) -> list[int]:
        """The token ids that replace the placeholder of a picture."""

    def tensors(self, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """The model inputs as an engine wants them, pixel tensor first."""


class _Loader(Protocol):
    def __call__(self, checkpoint: Checkpoint, *, backend: Rule, pillow_order: PillowOrder) -> Family: ...


_BY_MODEL_TYPE: dict[str, _Loader] = dict.fromkeys(qwen_vl.MODEL_TYPES, qwen_vl.from_checkpoint)


def supported() -> tuple[str, ...]:
    """The ``model_type`` values that have a family."""
    return tuple(sorted(_BY_MODEL_TYPE))


def from_checkpoint(checkpoint: Checkpoint, *, backend: Rule, pillow_order: PillowOrder) -> Family:
    """The family of a checkpoint, by its ``model_type``. Raises CheckpointError with what is supported."""
    load = _BY_MODEL_TYPE.get(checkpoint.model_type)
    if load is None:
        raise CheckpointError(
            f"model_type {checkpoint.model_type!r} is not supported; supported are {', '.join(supported())}"
        )
    return load(checkpoint, backend=backend, pillow_order=pillow_order)
