"""A picture is planned before it is touched: the small algebra of views and layouts, and the executor that runs it.

A family turns a size into an `ImagePlan`; everything that can be known without pixels (tokens, bytes, shapes) is
read off the plan, and `execute` does the rest in one pass of the native kernels, straight into the destination.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import KernelError
from pixelgate.pixels import kernels
from pixelgate.pixels.affine import NUMPY_DTYPES, Affine
from pixelgate.pixels.resample import Resample


@dataclass(frozen=True)
class View:
    """One resized version of the picture; ``resize`` is (height, width)."""

    resize: tuple[int, int]
    resample: Resample


@dataclass(frozen=True)
class Patches:
    """Square patches as rows: [grid_h * grid_w, 3 * temporal * patch * patch].

    Patches follow each other in blocks of ``merge`` x ``merge``, blocks row by row; inside a row the order is channel,
    temporal copy, y, x. A still picture fills every one of its ``temporal`` slots with the same frame.
    """

    patch: int
    merge: int
    temporal: int

    def shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """Shape of the tensor for a view of (height, width) ``size``."""
        height, width = size
        rows = (height // self.patch) * (width // self.patch)
        return rows, 3 * self.temporal * self.patch * self.patch


@dataclass(frozen=True)
class ImagePlan:
    """What one picture will become. ``height`` and ``width`` are the picture's own; no pixel has been read.

    ``grid`` is (temporal, height, width) in patches. ``tokens`` counts the placeholder tokens that receive an
    embedding. ``aux`` holds the small arrays a model wants besides its pixels, each with a leading image dimension.
    """

    height: int
    width: int
    views: tuple[View, ...]
    layout: Patches
    affine: Affine
    tokens: int
    grid: tuple[int, int, int]
    dtype: str = "float32"
    aux: Mapping[str, NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this picture's rows of the pixel tensor."""
        return self.layout.shape(self.views[0].resize)

    @property
    def nbytes(self) -> int:
        """Bytes of the pixel tensor in the plan's own dtype."""
        return self.nbytes_as(self.dtype)

    def nbytes_as(self, dtype: str) -> int:
        """Bytes of the pixel tensor in ``dtype``."""
        rows, columns = self.layout.shape(self.views[0].resize)
        return rows * columns * NUMPY_DTYPES[dtype].itemsize


def execute(
    plan: ImagePlan,
    image: NDArray[np.uint8],
    out: NDArray[Any] | None = None,
    *,
    dtype: str | None = None,
    level: str | None = None,
) -> NDArray[Any]:
    """Run ``plan`` on ``image`` (uint8 [height, width, 3], or 4 with a byte that is ignored) and return the tensor.

    ``out`` is C-contiguous memory of the plan's shape and of ``dtype`` (default: the plan's own) to write into.
    ``dtype="uint8"`` is the plan without its affine step. ``level`` forces an instruction-set level.
    Raises KernelError when an array does not fit the plan; nothing is written then.
    """
    dtype = dtype or plan.dtype
    if dtype not in NUMPY_DTYPES:
        raise KernelError(f"dtype {dtype!r} is not one of {', '.join(NUMPY_DTYPES)}")
    if image.shape[:2] != (plan.height, plan.width):
        raise KernelError(
            f"the plan is for a picture of {plan.height}x{plan.width} (height x width), "
            f"but the array has shape {image.shape}"
        )
    if out is None:
        out = np.empty(plan.shape, NUMPY_DTYPES[dtype])
    view, layout = plan.views[0], plan.layout
    kernels.patches(
        image,
        view.resize,
        view.resample,
        out,
        patch=layout.patch,
        merge=layout.merge,
        temporal=layout.temporal,
        table=plan.affine.table_as(dtype),
        arithmetic=None if dtype == "uint8" else plan.affine.arithmetic,
        level=level,
    )
    return out
