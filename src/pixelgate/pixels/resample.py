"""What a resize means: the filter, whose integer arithmetic, and which pass comes first.

Two libraries define the pixels that models were trained on. Both resample 8-bit channels in two separable passes
with a rounded 8-bit picture between them, over the same windows; they differ in the fixed-point weights and in the
order of the passes. The weights are computed here, in double precision and in the libraries' own operation order;
the native kernels only add and multiply integers.

Sources: Pillow 13.0 ``Resample.c`` and ``Geometry.c``; torch 2.14 ``UpSampleKernel.cpp`` (uint8, antialias) and
``UpSampleNearest2d.cpp``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Filter = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Semantics = Literal["torchvision", "pillow"]
PillowOrder = Literal["13", "12.2", "12.1"]
Curve = Callable[[NDArray[np.float64]], NDArray[np.float64]]

PILLOW_PRECISION = 22
_MAX_PRECISION = 22
_INT16_LIMIT = 1 << 15
_SMALL_OUTPUT = 128  # height + width; torch's UpSampleKernel.cpp


@dataclass(frozen=True)
class Resample:
    """One way to resize: ``filter`` with the integer arithmetic of ``semantics``.

    ``pillow_order`` names the Pillow release whose pass order to follow ("12.1" stands for it and everything older);
    torchvision always resizes horizontally first. torchvision's "nearest" is its NEAREST_EXACT, by which transformers
    replaces Pillow's. Raises ValueError for what a library cannot do.
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
        if self.filter != "nearest" and (self.filter, self.semantics) not in _CURVES:
            raise ValueError(f"torchvision has no {self.filter} filter for 8-bit pictures; only Pillow has")

    def vertical_first(self, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Whether the vertical pass comes first, from (height, width) ``source`` to ``target``."""
        (height, width), (new_height, new_width) = source, target
        if self.semantics == "torchvision" or self.pillow_order == "12.1" or new_height >= height:
            return False
        if self.pillow_order == "12.2":
            return height > 100 * width
        return height - new_height > 2 * (width - new_width)

    def picks_as_small(self, target: tuple[int, int]) -> bool:
        """Whether torch makes ``target`` (height, width) by the kernel of small outputs, which rounds otherwise."""
        return (self.filter, self.semantics) == ("nearest", "torchvision") and sum(target) <= _SMALL_OUTPUT


@dataclass(frozen=True, eq=False)
class Axis:
    """One resampled axis: output i is ``sum(weights[i, k] * input[start[i] + k]) >> precision`` over ``count[i]`` taps.

    ``start`` and ``count`` are int32 [size_out], ``weights`` int32 [size_out, taps], zero beyond ``count``; all are
    C-contiguous.
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

    def window(self, offset: int, length: int) -> tuple[Axis, slice]:
        """The axis that makes outputs ``offset`` to ``offset + length`` alone, and the inputs it needs for that."""
        part = slice(offset, offset + length)
        start, count = self.start[part], self.count[part]
        first, last = int(start[0]), int((start + count).max())
        axis = Axis(last - first, length, self.precision, start - np.int32(first), count, self.weights[part])
        return axis, slice(first, last)


def make_axis(size_in: int, size_out: int, filter: Filter, semantics: Semantics, *, small: bool = False) -> Axis:
    """The weights that take ``size_in`` samples to ``size_out``; ``small`` is `Resample.picks_as_small`."""
    if filter == "nearest":
        return _nearest(size_in, size_out, semantics, small)
    curve, radius = _CURVES[filter, semantics]
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
    weights = np.where(tap < count[:, None], curve(distance), 0.0)
    # cumsum adds from left to right, as the libraries do; sum() would add pairwise
    total = np.cumsum(weights, axis=1)[:, -1:]
    weights = np.divide(weights, total, out=weights, where=total != 0.0)

    precision = PILLOW_PRECISION if semantics == "pillow" else _int16_precision(float(weights.max()))
    scaled = weights * float(1 << precision)
    fixed = np.trunc(np.where(scaled < 0.0, scaled - 0.5, scaled + 0.5)).astype(np.int32)
    return Axis(size_in, size_out, precision, start.astype(np.int32), count.astype(np.int32), fixed)


def _int16_precision(largest: float) -> int:
    """The most fraction bits with which the largest weight of an axis still fits an int16."""
    for precision in range(_MAX_PRECISION):
        if int(0.5 + max(largest, 0.0) * (1 << (precision + 1))) >= _INT16_LIMIT:
            return precision
    return _MAX_PRECISION


def _nearest(size_in: int, size_out: int, semantics: Semantics, small: bool) -> Axis:
    """One tap of weight 1 each, so that picking a sample is a resampling like any other."""
    if semantics == "pillow":
        scale = size_in / size_out
        steps = np.full(size_out, scale)
        steps[0] = 0.5 * scale
        place = np.cumsum(steps)  # Pillow adds the scale up, rounding errors and all
    else:
        # torch computes this in float32
        scale32 = np.float32(size_in) / np.float32(size_out)
        middle = np.arange(size_out, dtype=np.float32) + np.float32(0.5)
        if small:
            place = middle * scale32
        else:  # a fused multiply-add, as on any host with AVX2
            place = (middle.astype(np.float64) * scale32 - 0.5).astype(np.float32) + np.float32(0.5)
    start = np.minimum(place.astype(np.int32), size_in - 1).astype(np.int32)
    precision = 14
    weights = np.full((size_out, 1), 1 << precision, np.int32)
    return Axis(size_in, size_out, precision, start, np.ones(size_out, np.int32), weights)


def _box(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def _bilinear(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _bicubic(x: NDArray[np.float64], outer: Curve) -> NDArray[np.float64]:
    a = -0.5
    x = np.abs(x)
    inner = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    return np.where(x < 1.0, inner, np.where(x < 2.0, outer(x), 0.0))


def _bicubic_pillow(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return _bicubic(x, lambda x: (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5)


def _bicubic_torch(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return _bicubic(x, lambda x: ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0)


# The C library's sine and cosine, as both libraries use; numpy's vectorised ones may differ in the last bit.


def _sinc(x: float) -> float:
    return math.sin(x * math.pi) / (x * math.pi) if x else 1.0


def _hamming_at(x: float) -> float:
    if x == 0.0:
        return 1.0
    # the two constants are float literals in C
    return _sinc(x) * (float(np.float32(0.54)) + float(np.float32(0.46)) * math.cos(x * math.pi))


def _pointwise(values: NDArray[np.float64], radius: float, curve: Callable[[float], float]) -> NDArray[np.float64]:
    made = (curve(v) if -radius <= v < radius else 0.0 for v in values.ravel().tolist())
    return np.fromiter(made, np.float64, values.size).reshape(values.shape)


def _hamming(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return _pointwise(np.abs(x), 1.0, _hamming_at)


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return _pointwise(x, 3.0, lambda v: _sinc(v) * _sinc(v / 3.0))


# by filter and library: the curve, and how many samples it reaches to either side
_CURVES: dict[tuple[str, str], tuple[Curve, float]] = {
    ("box", "pillow"): (_box, 0.5),
    ("bilinear", "pillow"): (_bilinear, 1.0),
    ("bilinear", "torchvision"): (_bilinear, 1.0),
    ("hamming", "pillow"): (_hamming, 1.0),
    ("bicubic", "pillow"): (_bicubic_pillow, 2.0),
    ("bicubic", "torchvision"): (_bicubic_torch, 2.0),
    ("lanczos", "pillow"): (_lanczos, 3.0),
    ("lanczos", "torchvision"): (_lanczos, 3.0),
}
