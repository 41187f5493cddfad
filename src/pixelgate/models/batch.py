"""How the tensors of several pictures lie in the one tensor of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.pixels.affine import DTYPE_NAMES
from pixelgate.pixels.plan import ImagePlan
from pixelgate.pixels.tensor import Tensor

Slot = tuple[int | slice, ...]


@dataclass(frozen=True)
class Batch:
    """The tensor's ``shape``, and where in it each picture's own tensor lies.

    Without ``gaps`` the pictures cover it all; otherwise the rest holds 0.0, whatever a black pixel would be.
    """

    shape: tuple[int, ...]
    slots: tuple[Slot, ...]
    gaps: bool = False


def concatenated(plans: Sequence[ImagePlan]) -> Batch:
    """One after the other along dimension 0."""
    slots: list[Slot] = []
    end = 0
    for plan in plans:
        slots.append((slice(end, end + plan.shape[0]),))
        end += plan.shape[0]
    return Batch((end, *plans[0].shape[1:]), tuple(slots))


def padded(plans: Sequence[ImagePlan]) -> Batch:
    """[pictures, 3, tallest, widest]: a smaller picture leaves a gap at its right and below."""
    tallest, widest = (max(plan.shape[side] for plan in plans) for side in (2, 3))
    slots = tuple(
        (slice(number, number + 1), slice(None), slice(plan.shape[2]), slice(plan.shape[3]))
        for number, plan in enumerate(plans)
    )
    gaps = any(plan.shape[2:] != (tallest, widest) for plan in plans)
    return Batch((len(plans), 3, tallest, widest), slots, gaps)


def stacked(plans: Sequence[ImagePlan], most: int | None = None) -> Batch:
    """[pictures, tiles, ...]: ``most`` tiles, or as many as the picture with most has; fewer leave a gap."""
    most = most or max(plan.shape[0] for plan in plans)
    slots = tuple((number, slice(plan.shape[0])) for number, plan in enumerate(plans))
    gaps = any(plan.shape[0] != most for plan in plans)
    return Batch((len(plans), most, *plans[0].shape[1:]), slots, gaps)


def tiles_and_sizes(
    name: str, plans: Sequence[ImagePlan], pixels: Sequence[NDArray[Any]], most: int | None = None
) -> tuple[Tensor, Tensor]:
    """What engines take of pictures in tiles: all filled up with 0.0 to as many, and ``image_sizes``."""
    sizes = tuple(plan.aux["image_sizes"] for plan in plans)
    return (
        Tensor(name, DTYPE_NAMES[pixels[0].dtype], filled_up(pixels, most), "batched"),
        Tensor("image_sizes", "int64", sizes, "batched", keep_on_cpu=True),
    )


def filled_up(parts: Sequence[NDArray[Any]], most: int | None = None, fill: float = 0) -> tuple[NDArray[Any], ...]:
    """Each part as [1, most, ...], ``fill`` where it has fewer; ``most`` is that of the largest if not given."""
    most = most or max(len(part) for part in parts)
    whole = []
    for part in parts:
        if len(part) < most:
            gap = np.full((most - len(part), *part.shape[1:]), fill, part.dtype)
            part = np.concatenate([part, gap])
        whole.append(part[None])
    return tuple(whole)
