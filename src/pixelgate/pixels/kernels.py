"""The only file that touches ctypes: typed, checked wrappers around the native kernels.

Every array is checked here (shape, dtype, strides, writability, overlap) before its address is taken; a wrong one
raises KernelError and never reaches a pointer. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import ConfigError, KernelError
from pixelgate.pixels.affine import NUMPY_DTYPES, Arithmetic
from pixelgate.pixels.resample import Axis, Resample, axis

LEVELS = ("portable", "avx2")
MAX_SIDE = 1 << 17
_ELEMENTS = {"uint8": 0, "float32": 1, "bfloat16": 2, "float16": 3}
_PIXELS, _PATCHES = 0, 1
_NO_MEMORY, _NO_LEVEL = 1, 2


class _Axis(ctypes.Structure):
    _fields_ = (
        ("size_in", ctypes.c_int32),
        ("size_out", ctypes.c_int32),
        ("taps", ctypes.c_int32),
        ("precision", ctypes.c_int32),
        ("start", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
    )


class _Job(ctypes.Structure):
    """Mirror of ``Job`` in native/kernels.hpp."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("channels", ctypes.c_int32),
        ("vertical_first", ctypes.c_int32),
        ("rows", _Axis),
        ("columns", _Axis),
        ("layout", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("patch", ctypes.c_int32),
        ("merge", ctypes.c_int32),
        ("temporal", ctypes.c_int32),
        ("has_arithmetic", ctypes.c_int32),
        ("table", ctypes.c_void_p),
        ("divisor", ctypes.c_float),
        ("subtract", ctypes.c_float * 3),
        ("divide", ctypes.c_float * 3),
    )
    keep: tuple[Axis | None, ...]  # whose arrays must outlive the call, whatever the weight cache drops meanwhile


def _load() -> ctypes.CDLL:
    path = Path(__file__).with_name("kernels_native.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as failure:
        raise ImportError(
            f"pixelgate's native kernels could not be loaded from {path}: {failure}. "
            "Reinstall pixelgate from a wheel for this platform, or from source with a C++17 compiler."
        ) from None
    library.pixelgate_run.argtypes = [ctypes.POINTER(_Job), ctypes.c_int]
    if library.pixelgate_job_size() != ctypes.sizeof(_Job):
        raise ImportError(f"{path} was built from other sources than this package; reinstall pixelgate.")
    return library


_library = _load()


def available_levels() -> tuple[str, ...]:
    """Instruction-set levels that this processor can run, slowest first."""
    return tuple(name for i, name in enumerate(LEVELS) if _library.pixelgate_has_level(i))


_default_level = available_levels()[-1]


def default_level() -> str:
    """The level used where a call names none."""
    return _default_level


def select_level(name: str | None) -> None:
    """Make ``name`` the default of this process; None or "" chooses the fastest available. Raises ConfigError."""
    global _default_level
    _default_level = _checked_level(name, ConfigError) if name else available_levels()[-1]


def _checked_level(name: str, error: type[ConfigError] | type[KernelError]) -> str:
    if name not in available_levels():
        raise error(
            f"instruction-set level {name!r} is not available here; this processor has {', '.join(available_levels())}"
        )
    return name


def resize(
    image: NDArray[np.uint8], size: tuple[int, int], resample: Resample, *, level: str | None = None
) -> NDArray[np.uint8]:
    """Resize uint8 [height, width, 3 or 4] to ``size`` (height, width); uint8 [*size, 3]."""
    _check_size(size)
    out = np.empty((*size, 3), np.uint8)
    job = _job(image, size, resample)
    job.layout = _PIXELS
    job.out = out.ctypes.data
    job.out_stride = out.strides[0]
    _run(job, level)
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
    _check_size(size)
    for name, value in (("patch", patch), ("merge", merge), ("temporal", temporal)):
        if not 1 <= value <= 1024:
            raise KernelError(f"{name} must be between 1 and 1024, not {value}")
    if size[0] % (patch * merge) or size[1] % (patch * merge):
        raise KernelError(f"a size of {size} is no multiple of {merge} patches of {patch} pixels")
    dtype = out.dtype.name
    if dtype not in _ELEMENTS or out.dtype != NUMPY_DTYPES[dtype]:
        raise KernelError(f"output of dtype {out.dtype} is not one of {', '.join(_ELEMENTS)}")
    if table.dtype != out.dtype or table.shape != (3, 256) or not table.flags.c_contiguous:
        raise KernelError(f"the table must be {out.dtype} [3, 256], not {table.dtype} {list(table.shape)}")
    shape = (size[0] // patch * (size[1] // patch), 3 * temporal * patch * patch)
    if out.shape != shape:
        raise KernelError(f"output of shape {out.shape} does not fit the plan, which gives {shape}")
    if not out.flags.c_contiguous or not out.flags.writeable:
        raise KernelError("output must be C-contiguous and writable")
    if np.may_share_memory(image, out):
        raise KernelError("output shares memory with the picture")
    job = _job(image, size, resample)
    job.layout = _PATCHES
    job.element = _ELEMENTS[dtype]
    job.out = out.ctypes.data
    job.patch, job.merge, job.temporal = patch, merge, temporal
    job.table = table.ctypes.data
    if arithmetic is not None:
        job.has_arithmetic = 1
        job.divisor = arithmetic.divisor
        job.subtract[:] = arithmetic.subtract
        job.divide[:] = arithmetic.divide
    _run(job, level)


def _check_size(size: tuple[int, int]) -> None:
    if not all(1 <= side <= MAX_SIDE for side in size):
        raise KernelError(f"a size of {size} (height, width) is not between 1 and {MAX_SIDE}")


def _job(image: NDArray[np.uint8], size: tuple[int, int], resample: Resample) -> _Job:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (3, 4):
        raise KernelError(f"a picture must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}")
    height, width, channels = image.shape
    _check_size((height, width))
    if image.strides[2] != 1 or image.strides[1] != channels or image.strides[0] < width * channels:
        raise KernelError("the pixels of a picture's row must be contiguous, and its rows in order and apart")
    job = _Job()
    job.pixels = image.ctypes.data
    job.row_stride = image.strides[0]
    job.channels = channels
    job.vertical_first = resample.vertical_first((height, width), size)
    job.keep = (
        _fill_axis(job.rows, height, size[0], resample),
        _fill_axis(job.columns, width, size[1], resample),
    )
    return job


def _fill_axis(target: _Axis, size_in: int, size_out: int, resample: Resample) -> Axis | None:
    target.size_in, target.size_out = size_in, size_out
    if size_in == size_out:  # an axis that does not change is not resampled, in both libraries
        return None
    weights = axis(size_in, size_out, resample.filter, resample.semantics)
    target.taps, target.precision = weights.taps, weights.precision
    target.start = weights.start.ctypes.data
    target.count = weights.count.ctypes.data
    target.weights = weights.weights.ctypes.data
    return weights


def _run(job: _Job, level: str | None) -> None:
    name = _checked_level(level, KernelError) if level else _default_level
    status = _library.pixelgate_run(ctypes.byref(job), LEVELS.index(name))
    if status == _NO_MEMORY:
        raise MemoryError("the kernels could not allocate their working rows")
    if status == _NO_LEVEL:
        raise KernelError(f"instruction-set level {name!r} is not available here")
