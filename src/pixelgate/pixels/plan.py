"""A picture is planned before it is touched: the small algebra of views and layouts, and the executor that runs it.

A family turns a size into an `ImagePlan`; everything that can be known without pixels (tokens, bytes, shapes) is
read off the plan, and `execute` does the rest, view by view, straight into the destination. No float picture exists in
between, but for the one view that is interpolated from floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import KernelError
from pixelgate.pixels import kernels
from pixelgate.pixels.affine import DTYPE_NAMES, NUMPY_DTYPES, Affine
from pixelgate.pixels.kernels import Window
from pixelgate.pixels.resample import Resample


@dataclass(frozen=True)
class Canvas:
    """A larger rectangle that a picture is laid on, at (top, left); ``fill`` is the 8-bit RGB around it."""

    top: int
    left: int
    height: int
    width: int
    fill: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class View:
    """One version of the picture: padded before (``pre_pad``), resized, cropped, padded after, cut into tiles.

    ``resize`` is (height, width). Of the resized picture ``crop`` is kept, and only that is computed; ``pad`` lays the
    result on a canvas. ``tile`` (height, width) cuts the canvas row by row; without it there is one tile. ``transpose``
    resizes the picture as if it were turned over its diagonal, and turns it back: only the order of passes changes.
    """

    resize: tuple[int, int]
    resample: Resample
    pre_pad: Canvas | None = None
    crop: Window | None = None
    pad: Canvas | None = None
    tile: tuple[int, int] | None = None
    transpose: bool = False

    @property
    def canvas(self) -> tuple[int, int]:
        """(height, width) of the finished view."""
        if self.pad:
            return self.pad.height, self.pad.width
        if self.crop:
            return self.crop.height, self.crop.width
        return self.resize

    @property
    def tile_size(self) -> tuple[int, int]:
        """(height, width) of a tile."""
        return self.tile or self.canvas

    @property
    def tiles(self) -> int:
        """How many tiles the view gives."""
        (height, width), (tile_height, tile_width) = self.canvas, self.tile_size
        return height // tile_height * (width // tile_width)


@dataclass(frozen=True)
class FloatView:
    """One tile of ``resize`` (height, width), interpolated from the normalised floats of ``source``.

    torch's bicubic without antialias (``F.interpolate``), as Phi makes its global view; no table can express it.
    """

    resize: tuple[int, int]
    source: View

    @property
    def tile_size(self) -> tuple[int, int]:
        """(height, width) of the tile."""
        return self.resize

    @property
    def tiles(self) -> int:
        """One."""
        return 1


@dataclass(frozen=True)
class Patches:
    """Square patches as rows: [grid_h * grid_w, 3 * temporal * patch * patch].

    Patches follow each other in blocks of ``merge`` x ``merge``, blocks row by row; inside a row the order is channel,
    temporal copy, y, x. A still picture fills every one of its ``temporal`` slots with the same frame.
    """

    patch: int
    merge: int
    temporal: int

    def shape(self, views: tuple[View | FloatView, ...]) -> tuple[int, ...]:
        """Shape of the tensor of the only view."""
        height, width = views[0].tile_size
        return (height // self.patch) * (width // self.patch), 3 * self.temporal * self.patch * self.patch


@dataclass(frozen=True)
class Tiles:
    """Channel planes: [tiles, 3, tile_height, tile_width], one view's tiles after the other's."""

    def shape(self, views: tuple[View | FloatView, ...]) -> tuple[int, ...]:
        """Shape of the tensor of all views, whose tiles have one size."""
        return sum(view.tiles for view in views), 3, *views[0].tile_size


@dataclass(frozen=True)
class ImagePlan:
    """What one picture will become. ``height`` and ``width`` are the picture's own; no pixel has been read.

    ``grid`` is (temporal, height, width) in patches, where there are patches. ``tokens`` counts the placeholder tokens
    that receive an embedding. ``aux`` holds the small arrays a model wants besides its pixels, each with a leading
    image dimension.
    """

    height: int
    width: int
    views: tuple[View | FloatView, ...]
    layout: Patches | Tiles
    affine: Affine
    tokens: int
    grid: tuple[int, int, int] | None = None
    dtype: str = "float32"
    # follows from the rest, and arrays have no single truth
    aux: Mapping[str, NDArray[Any]] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the read-only mapping cannot be."""
        return {**self.__dict__, "aux": dict(self.aux)}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of this picture's part of the pixel tensor."""
        return self.layout.shape(self.views)

    @property
    def nbytes(self) -> int:
        """Bytes of the pixel tensor in the plan's own dtype."""
        return self.nbytes_as(self.dtype)

    def nbytes_as(self, dtype: str) -> int:
        """Bytes of the pixel tensor in ``dtype``."""
        return math.prod(self.shape) * NUMPY_DTYPES[dtype].itemsize


def execute(
    plan: ImagePlan,
    image: NDArray[np.uint8],
    out: NDArray[Any] | None = None,
    *,
    dtype: str | None = None,
    level: str | None = None,
) -> NDArray[Any]:
    """Run ``plan`` on ``image`` (uint8 [height, width, 3], or 4 with a byte that is ignored) and return the tensor.

    ``out`` is memory of the plan's shape and of ``dtype`` (default: the plan's own) to write into: C-contiguous for
    patches; tiles may be parts of a larger array, as in a padded batch. ``dtype="uint8"`` is the plan without its
    affine step, refused where a view is made of floats. ``level`` forces an instruction-set level.
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
    if dtype == "uint8" and any(isinstance(view, FloatView) for view in plan.views):
        raise KernelError("this plan interpolates normalised floats, which no uint8 tensor can hold")
    if out is None:
        out = np.empty(plan.shape, NUMPY_DTYPES[dtype])
    elif out.shape != plan.shape or out.dtype != NUMPY_DTYPES[dtype]:
        raise KernelError(f"output must be {dtype} {list(plan.shape)}, not {out.dtype} {list(out.shape)}")
    if isinstance(plan.layout, Patches):
        _store_patches(plan, plan.layout, image, out, level)
    else:
        _store_tiles(plan, image, out, level)
    return out


def _store_patches(
    plan: ImagePlan, layout: Patches, image: NDArray[np.uint8], out: NDArray[Any], level: str | None
) -> None:
    view = plan.views[0]
    if len(plan.views) != 1 or not isinstance(view, View) or view != View(view.resize, view.resample):
        raise KernelError("patches are made of a single view that is only resized")
    kernels.patches(
        image,
        view.resize,
        view.resample,
        out,
        patch=layout.patch,
        merge=layout.merge,
        temporal=layout.temporal,
        table=plan.affine.table_as(DTYPE_NAMES[out.dtype]),
        arithmetic=plan.affine.arithmetic if out.dtype != np.uint8 else None,
        level=level,
    )


def _store_tiles(plan: ImagePlan, image: NDArray[np.uint8], out: NDArray[Any], level: str | None) -> None:
    first = 0
    for view in plan.views:
        part = out[first : first + view.tiles]
        first += view.tiles
        if isinstance(view, FloatView):
            finished = _canvas(view.source, image, level)
            part[0] = kernels.bicubic_f32(finished, view.resize, plan.affine.table).astype(part.dtype)
            continue
        pad = view.pad or Canvas(0, 0, *view.canvas)
        kernels.tiles(
            _padded(image, view.pre_pad),
            view.resize,
            view.resample,
            part,
            table=plan.affine.table_as(DTYPE_NAMES[out.dtype]),
            arithmetic=plan.affine.arithmetic if out.dtype != np.uint8 else None,
            window=view.crop,
            canvas=(pad.height, pad.width),
            position=(pad.top, pad.left),
            fill=pad.fill,
            vertical_first=_vertical_first(view, image),
            level=level,
        )


def _vertical_first(view: View, image: NDArray[np.uint8]) -> bool | None:
    """The pass order of a transposed resize: its horizontal pass runs along the picture's columns."""
    if not view.transpose:
        return None
    (height, width), (new_height, new_width) = image.shape[:2], view.resize
    return not view.resample.vertical_first((width, height), (new_width, new_height))


def _canvas(view: View, image: NDArray[np.uint8], level: str | None) -> NDArray[np.uint8]:
    """A finished view as uint8 [height, width, 3]."""
    resized = kernels.resize(
        _padded(image, view.pre_pad),
        view.resize,
        view.resample,
        window=view.crop,
        vertical_first=_vertical_first(view, image),
        level=level,
    )
    return _padded(resized, view.pad)


def _padded(image: NDArray[np.uint8], canvas: Canvas | None) -> NDArray[np.uint8]:
    if canvas is None:
        return image
    height, width = image.shape[:2]
    out = np.empty((canvas.height, canvas.width, 3), np.uint8)
    out[:] = canvas.fill
    out[canvas.top : canvas.top + height, canvas.left : canvas.left + width] = image[:, :, :3]
    return out
