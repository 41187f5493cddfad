"""Typed, checked wrappers around the native kernels.

Every array is checked here (shape, dtype, strides, writability, overlap) before its address is taken; a wrong one
raises KernelError and never reaches a pointer. Calls release the GIL.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import KernelError
from pixelgate.pixels import binding
from pixelgate.pixels.affine import DTYPE_NAMES, Arithmetic
from pixelgate.pixels.resample import Resample

MAX_SIDE = 1 << 17
_ELEMENTS = {"uint8": 0, "float32": 1, "bfloat16": 2, "float16": 3}
_PIXELS, _PATCHES, _TILES = 0, 1, 2


@dataclass(frozen=True)
class Window:
    """A rectangle: where it begins, and its size."""

    top: int
    left: int
    height: int
    width: int


def resize(
    image: NDArray[np.uint8],
    size: tuple[int, int],
    resample: Resample,
    *,
    window: Window | None = None,
    vertical_first: bool | None = None,
    level: str | None = None,
) -> NDArray[np.uint8]:
    """Resize uint8 [height, width, 3 or 4] to ``size`` (height, width), as uint8 [height, width, 3].

    Only ``window`` of the result is computed and returned, where one is given. ``vertical_first`` overrides the pass
    order of ``resample``.
    """
    work = _work(image, size, resample, window, vertical_first, level)
    out = np.empty((work.job.height, work.job.width, 3), np.uint8)
    work.job.layout = _PIXELS
    work.job.out = out.ctypes.data
    work.job.strides[0] = out.strides[0]
    binding.run(work.job, work.level)
    return out


def patches(
    image: NDArray[np.uint8],
    size: tuple[int, int],
    resample: Resample,
    out: NDArray[Any],
    *,
    patch: int,
    merge: int,
    temporal: int,
    table: NDArray[Any],
    arithmetic: Arithmetic | None = None,
    level: str | None = None,
) -> None:
    """Resize ``image``, look every byte up in ``table`` [3, 256] and store patches into ``out``.

    ``out`` is C-contiguous, of the table's dtype and of shape [grid_h * grid_w, 3 * temporal * patch * patch].
    ``arithmetic``, where given, yields exactly the table's float32 values (rounded to the table's dtype).
    """
    for name, value in (("patch", patch), ("merge", merge), ("temporal", temporal)):
        if not 1 <= value <= 1024:
            raise KernelError(f"{name} must be between 1 and 1024, not {value}")
    if size[0] % (patch * merge) or size[1] % (patch * merge):
        raise KernelError(f"a size of {size} is no multiple of {merge} patches of {patch} pixels")
    work = _work(image, size, resample, None, None, level)
    _check_output(out, (size[0] // patch * (size[1] // patch), 3 * temporal * patch * patch), image)
    if not out.flags.c_contiguous:
        raise KernelError("output must be C-contiguous")
    job = work.job
    job.layout = _PATCHES
    job.out = out.ctypes.data
    job.patch, job.merge, job.temporal = patch, merge, temporal
    _set_affine(job, out, table, arithmetic)
    binding.run(job, work.level)


def tiles(
    image: NDArray[np.uint8],
    size: tuple[int, int],
    resample: Resample,
    out: NDArray[Any],
    *,
    table: NDArray[Any],
    arithmetic: Arithmetic | None = None,
    window: Window | None = None,
    canvas: tuple[int, int] | None = None,
    position: tuple[int, int] = (0, 0),
    fill: tuple[int, int, int] = (0, 0, 0),
    vertical_first: bool | None = None,
    level: str | None = None,
) -> None:
    """Resize ``image``, place it on a canvas, and store the canvas as tiles of channel planes.

    ``out`` is [tiles, 3, tile_height, tile_width]; the tiles cover the canvas row by row. Elements of a row must be
    contiguous; rows, planes and tiles may be apart, so that ``out`` can be a part of a larger array. ``window`` of the
    resized picture (default: all of it) lies at ``position`` (top, left) of ``canvas`` (height, width; default: just
    the picture); around it is ``fill``.
    """
    work = _work(image, size, resample, window, vertical_first, level)
    job = work.job
    height, width = canvas or (job.height, job.width)
    _check_size((height, width))
    top, left = position
    if top < 0 or left < 0 or top + job.height > height or left + job.width > width:
        raise KernelError(
            f"a picture of {job.height}x{job.width} at {position} does not fit a canvas of {height}x{width}"
        )
    if any(not 0 <= value <= 255 for value in fill):
        raise KernelError(f"fill must be three values from 0 to 255, not {fill}")
    if out.ndim != 4 or 0 in out.shape:
        raise KernelError(f"tiles are [tiles, 3, height, width], not {list(out.shape)}")
    tile_height, tile_width = out.shape[2:]
    if height % tile_height or width % tile_width:
        raise KernelError(f"a canvas of {height}x{width} is no multiple of tiles of {tile_height}x{tile_width}")
    _check_output(out, (height // tile_height * (width // tile_width), 3, tile_height, tile_width), image)
    _check_strides(out)
    job.layout = _TILES
    job.out = out.ctypes.data
    job.strides[:] = out.strides[:3]
    job.canvas_height, job.canvas_width, job.top, job.left = height, width, top, left
    job.tile_height, job.tile_width = tile_height, tile_width
    job.fill[:3] = fill
    _set_affine(job, out, table, arithmetic)
    binding.run(job, work.level)


def bicubic_f32(image: NDArray[np.uint8], size: tuple[int, int], table: NDArray[np.float32]) -> NDArray[np.float32]:
    """torch's float32 bicubic without antialias, of a picture that ``table`` [3, 256] has turned into floats.

    ``image`` is uint8 [height, width, 3]; returns float32 [3, *size]. The same at every level: the fused products are
    those of torch on processors with AVX2.
    """
    _check_image(image)
    _check_size(size)
    if image.shape[2] != 3:
        raise KernelError(f"this view is made of uint8 [height, width, 3], not {list(image.shape)}")
    _check_table(table, np.dtype(np.float32))
    out = np.empty((3, *size), np.float32)
    job = binding.BicubicJob(
        pixels=image.ctypes.data,
        row_stride=image.strides[0],
        height_in=image.shape[0],
        width_in=image.shape[1],
        height=size[0],
        width=size[1],
        table=table.ctypes.data,
        out=out.ctypes.data,
    )
    binding.run_bicubic_f32(job)
    return out


@dataclass(frozen=True)
class _Work:
    """A job, its level, and what must live until it has run."""

    job: binding.Job
    level: str
    keep: tuple[object, ...]


def _work(
    image: NDArray[np.uint8],
    size: tuple[int, int],
    resample: Resample,
    window: Window | None,
    vertical_first: bool | None,
    level: str | None,
) -> _Work:
    _check_image(image)
    _check_size(size)
    window = window or Window(0, 0, *size)
    if not (
        0 <= window.top < window.top + window.height <= size[0]
        and 0 <= window.left < window.left + window.width <= size[1]
    ):
        raise KernelError(f"{window} does not lie inside a picture of {size} (height, width)")
    level = binding.checked_level(level)
    height, width, channels = image.shape
    small = resample.picks_as_small(size)
    rows, rows_used = binding.weights(height, size[0], resample, small, window.top, window.height, 0, level)
    columns, columns_used = binding.weights(width, size[1], resample, small, window.left, window.width, channels, level)
    source = image[rows_used, columns_used]
    if vertical_first is None:
        vertical_first = resample.vertical_first((height, width), size)
    job = binding.Job(
        pixels=source.ctypes.data,
        row_stride=image.strides[0],
        channels=channels,
        vertical_first=vertical_first,
        height_in=source.shape[0],
        width_in=source.shape[1],
        height=window.height,
        width=window.width,
        rows=rows.address if rows else None,
        columns=columns.address if columns else None,
    )
    return _Work(job, level, (rows, columns, source))


def _set_affine(job: binding.Job, out: NDArray[Any], table: NDArray[Any], arithmetic: Arithmetic | None) -> None:
    _check_table(table, out.dtype)
    job.element = _ELEMENTS[DTYPE_NAMES[out.dtype]]
    job.table = table.ctypes.data
    if arithmetic is not None:
        job.has_arithmetic = 1
        job.divisor = arithmetic.divisor
        job.subtract[:] = arithmetic.subtract
        job.divide[:] = arithmetic.divide


def _check_size(size: tuple[int, int]) -> None:
    if not all(1 <= side <= MAX_SIDE for side in size):
        raise KernelError(f"a size of {size} (height, width) is not between 1 and {MAX_SIDE}")


def _check_image(image: NDArray[np.uint8]) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (3, 4):
        raise KernelError(f"a picture must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
    height, width, channels = image.shape
    _check_size((height, width))
    if image.strides[2] != 1 or image.strides[1] != channels or image.strides[0] < width * channels:
        raise KernelError("the pixels of a picture's row must be contiguous, and its rows in order and apart")


def _check_table(table: NDArray[Any], dtype: np.dtype[Any]) -> None:
    if table.dtype != dtype or table.shape != (3, 256) or not table.flags.c_contiguous:
        raise KernelError(f"the table must be {dtype} [3, 256], not {table.dtype} {list(table.shape)}")


def _check_output(out: NDArray[Any], shape: tuple[int, ...], image: NDArray[np.uint8]) -> None:
    if out.dtype not in DTYPE_NAMES:
        raise KernelError(f"output of dtype {out.dtype} is not one of {', '.join(_ELEMENTS)}")
    if out.shape != shape:
        raise KernelError(f"output of shape {out.shape} does not fit the plan, which gives {shape}")
    if not out.flags.writeable or not out.flags.aligned:
        raise KernelError("output must be writable and aligned to its elements")
    if np.may_share_memory(image, out):
        raise KernelError("output shares memory with the picture")


def _check_strides(out: NDArray[Any]) -> None:
    """Tiles must not overlap: each stride steps over all that lies inside it."""
    inner = out.itemsize
    for size, stride in zip(reversed(out.shape), reversed(out.strides), strict=True):
        if size > 1 and stride < inner:
            raise KernelError("the rows, planes and tiles of the output must be in order and apart")
        inner = max(inner, stride * size)
    if out.shape[3] > 1 and out.strides[3] != out.itemsize:
        raise KernelError("the elements of a tile's row must be contiguous")
