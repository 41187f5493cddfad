"""What a resize means: the filter, whose integer arithmetic, and which pass comes first.

Two libraries define the pixels that models were trained on. Both resample 8-bit channels in two separable passes
with a rounded 8-bit picture between them, over the same windows; they differ in the fixed-point weights and in the
order of the passes. The weights are computed here, in double precision and in the libraries' own operation order;
the native kernels only add and multiply integers.

Sources: Pillow 13.0 ``Resample.c``; torch 2.14 ``UpSampleKernel.cpp`` (uint8, antialias).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Filter = Literal["bilinear", "bicubic", "lanczos"]
Semantics = Literal["torchvision", "pillow"]
PillowOrder = Literal["13", "12.2", "12.1"]

PILLOW_PRECISION = 22
_MAX_PRECISION = 22
_INT16_LIMIT = 1 << 15
_AXES_CACHED = 256


@dataclass(frozen=True)
class Resample:
    """One way to resize: ``filter`` with the integer arithmetic of ``semantics``.

    ``pillow_order`` names the Pillow release whose pass order to follow ("12.1" stands for it and everything older);
    torchvision always resizes horizontally first.
    """

    filter: Filter = "bicubic"
    semantics: Semantics = "torchvision"
    pillow_order: PillowOrder = "13"

    def __post_init__(self) -> None:
        for value, allowed in (
            (self.filter, Filter),
            (self.semantics, Semantics),
            (self.pillow_order, PillowOrder),
        ):
            if value not in get_args(allowed):
                raise ValueError(f"{value!r} is not one of {', '.join(get_args(allowed))}")

    def vertical_first(self, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Whether the vertical pass comes first, from (height, width) ``source`` to ``target``."""
        (height, width), (new_height, new_width) = source, target
        if self.semantics == "torchvision" or self.pillow_order == "12.1" or new_height >= height:
            return False
        if self.pillow_order == "12.2":
            return height > 100 * width
        return height - new_height > 2 * (width - new_width)


@dataclass(frozen=True, eq=False)
class Axis:
    """One resampled axis: output i is ``sum(weights[i, k] * input[start[i] + k]) >> precision`` over ``count[i]`` taps.

    ``start`` and ``count`` are int32 [size_out], ``weights`` int32 [size_out, taps], zero beyond ``count``; all are
    read-only, C-contiguous and shared between callers.
    """

    size_in: int
    size_out: int
    precision: int
    start: NDArray[np.int32]
    count: NDArray[np.int32]
    weights: NDArray[np.int32]

    @property
    def taps(self) -> int:
        """Columns of ``weights``."""
        return int(self.weights.shape[1])


def _bilinear(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _bicubic(
    x: NDArray[np.float64], outer: Callable[[NDArray[np.float64]], NDArray[np.float64]]
) -> NDArray[np.float64]:
    a = -0.5
    x = np.abs(x)
    inner = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    return np.where(x < 1.0, inner, np.where(x < 2.0, outer(x), 0.0))


def _bicubic_pillow(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return _bicubic(x, lambda x: (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5)


def _bicubic_torch(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return _bicubic(x, lambda x: ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0)


def _sinc(x: float) -> float:
    # The C library's sine, as both libraries use; numpy's vectorised one may differ in the last bit.
    return math.sin(x * math.pi) / (x * math.pi) if x else 1.0


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    values = (_sinc(v) * _sinc(v / 3.0) if -3.0 <= v < 3.0 else 0.0 for v in x.ravel().tolist())
    return np.fromiter(values, np.float64, x.size).reshape(x.shape)


_FILTERS: dict[tuple[str, str], tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], float]] = {
    ("bilinear", "pillow"): (_bilinear, 1.0),
    ("bilinear", "torchvision"): (_bilinear, 1.0),
    ("bicubic", "pillow"): (_bicubic_pillow, 2.0),
    ("bicubic", "torchvision"): (_bicubic_torch, 2.0),
    ("lanczos", "pillow"): (_lanczos, 3.0),
    ("lanczos", "torchvision"): (_lanczos, 3.0),
}


@lru_cache(maxsize=_AXES_CACHED)
def axis(size_in: int, size_out: int, filter: Filter, semantics: Semantics) -> Axis:
    """The weights that take ``size_in`` samples to ``size_out``; cached, about ``16 * size_in`` bytes each."""
    evaluate, radius = _FILTERS[filter, semantics]
    scale = size_in / size_out
    stretch = max(scale, 1.0)
    support = radius * stretch
    taps = math.ceil(support) * 2 + 1

    center = (np.arange(size_out) + 0.5) * scale
    # astype truncates towards zero, as the C casts do
    start = np.maximum((center - support + 0.5).astype(np.int64), 0)
    stop = np.minimum((center + support + 0.5).astype(np.int64), size_in)
    count = np.clip(stop - start, 0, taps)

    tap = np.arange(taps)
    distance = (tap + start[:, None] - center[:, None] + 0.5) * (1.0 / stretch)
    weights = np.where(tap < count[:, None], evaluate(distance), 0.0)
    # cumsum adds from left to right, as the libraries do; sum() would add pairwise
    total = np.cumsum(weights, axis=1)[:, -1:]
    weights = np.divide(weights, total, out=weights, where=total != 0.0)

    precision = PILLOW_PRECISION if semantics == "pillow" else _int16_precision(float(weights.max()))
    scaled = weights * float(1 << precision)
    fixed = np.trunc(np.where(scaled < 0.0, scaled - 0.5, scaled + 0.5)).astype(np.int32)
    arrays = (start.astype(np.int32), count.astype(np.int32), fixed)
    for array in arrays:
        array.setflags(write=False)
    return Axis(size_in, size_out, precision, *arrays)


def _int16_precision(largest: float) -> int:
    """The most fraction bits with which the largest weight of an axis still fits an int16."""
    for precision in range(_MAX_PRECISION):
        if int(0.5 + max(largest, 0.0) * (1 << (precision + 1))) >= _INT16_LIMIT:
            return precision
    return _MAX_PRECISION
