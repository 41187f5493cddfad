"""The only file that touches ctypes: the native library, its structures, and the weights it has prepared.

Nothing is checked here; kernels.py has done that.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from pixelgate.errors import ConfigError, KernelError
from pixelgate.pixels.resample import Axis, Resample, make_axis

LEVELS = ("portable", "avx2", "avx512")
WEIGHT_CACHE_BYTES = 64 << 20
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


class Job(ctypes.Structure):
    """Mirror of ``Job`` in native/kernels.hpp, which explains the fields."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("channels", ctypes.c_int32),
        ("vertical_first", ctypes.c_int32),
        ("height_in", ctypes.c_int32),
        ("width_in", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("rows", ctypes.c_void_p),
        ("columns", ctypes.c_void_p),
        ("layout", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("out", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 3),
        ("patch", ctypes.c_int32),
        ("merge", ctypes.c_int32),
        ("temporal", ctypes.c_int32),
        ("canvas_height", ctypes.c_int32),
        ("canvas_width", ctypes.c_int32),
        ("top", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("tile_height", ctypes.c_int32),
        ("tile_width", ctypes.c_int32),
        ("fill", ctypes.c_uint8 * 4),
        ("has_arithmetic", ctypes.c_int32),
        ("table", ctypes.c_void_p),
        ("divisor", ctypes.c_float),
        ("subtract", ctypes.c_float * 3),
        ("divide", ctypes.c_float * 3),
    )


class BicubicJob(ctypes.Structure):
    """Mirror of ``BicubicJob`` in native/bicubic_f32.hpp."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("height_in", ctypes.c_int32),
        ("width_in", ctypes.c_int32),
        ("height", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    )


def _load() -> ctypes.CDLL:
    path = Path(__file__).with_name("kernels_native.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as failure:
        raise ImportError(
            f"pixelgate's native kernels could not be loaded from {path}: {failure}. "
            "Reinstall pixelgate from a wheel for this platform, or from source with a C++17 compiler."
        ) from None
    library.pixelgate_run.argtypes = [ctypes.POINTER(Job), ctypes.c_int]
    library.pixelgate_bicubic_f32.argtypes = [ctypes.POINTER(BicubicJob)]
    library.pixelgate_prepare.argtypes = [
        ctypes.POINTER(_Axis),
        ctypes.c_int,
        ctypes.c_int,
        ctypes.POINTER(ctypes.c_size_t),
    ]
    library.pixelgate_prepare.restype = ctypes.c_void_p
    library.pixelgate_release.argtypes = [ctypes.c_void_p]
    library.pixelgate_release.restype = None
    sizes = (library.pixelgate_job_size(), library.pixelgate_bicubic_job_size())
    if sizes != (ctypes.sizeof(Job), ctypes.sizeof(BicubicJob)):
        raise ImportError(f"{path} was built from other sources than this package; reinstall pixelgate.")
    return library


_library = _load()


# ---------------------------------------------------------------------------------------------------------- levels


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
    if name and name not in available_levels():
        raise ConfigError(_unavailable(name))
    _default_level = name or available_levels()[-1]


def checked_level(name: str | None) -> str:
    """``name``, or the default for None. Raises KernelError for one that this processor cannot run."""
    if name is None:
        return _default_level
    if name not in available_levels():
        raise KernelError(_unavailable(name))
    return name


def _unavailable(name: str) -> str:
    return f"instruction-set level {name!r} is not available here; this processor has {', '.join(available_levels())}"


# --------------------------------------------------------------------------------------------------------- weights


class Weights:
    """An axis in the form that a level uses, in native memory that lives as long as this object."""

    def __init__(self, axis: Axis, channels: int, level: str) -> None:
        mirror = _Axis(
            axis.size_in,
            axis.size_out,
            axis.taps,
            axis.precision,
            axis.start.ctypes.data,
            axis.count.ctypes.data,
            axis.weights.ctypes.data,
        )
        nbytes = ctypes.c_size_t()
        self.address: int | None = _library.pixelgate_prepare(
            ctypes.byref(mirror), channels, LEVELS.index(level), ctypes.byref(nbytes)
        )
        if self.address is None:
            raise MemoryError("the weights of a resize could not be allocated")
        self.nbytes = nbytes.value
        weakref.finalize(self, _library.pixelgate_release, self.address).atexit = False


Prepared = tuple[Weights, slice]


class WeightCache:
    """Prepared weights, the least recently used dropped above ``max_bytes``. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[object, Prepared] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, key: object, make: Callable[[], Prepared]) -> Prepared:
        """The entry of ``key``, made outside the lock where it is missing."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key]
        made = make()
        with self._lock:
            if key not in self._entries:
                self._entries[key] = made
                self.nbytes += made[0].nbytes
            while self.nbytes > self._max_bytes:
                _, (weights, _) = self._entries.popitem(last=False)
                self.nbytes -= weights.nbytes
        return made


_cache = WeightCache(WEIGHT_CACHE_BYTES)


def weights(
    size_in: int, size_out: int, resample: Resample, small: bool, offset: int, length: int, channels: int, level: str
) -> tuple[Weights | None, slice]:
    """The weights that make outputs ``offset`` to ``offset + length``, and the inputs they need.

    ``small`` is `Resample.picks_as_small`, ``channels`` is 0 for rows. An axis that does not change is not resampled,
    in both libraries: it has no weights.
    """
    if size_in == size_out:
        return None, slice(offset, offset + length)

    def make() -> Prepared:
        axis = make_axis(size_in, size_out, resample.filter, resample.semantics, small=small)
        part, needed = axis.window(offset, length)
        return Weights(part, channels, level), needed

    key = (size_in, size_out, resample.filter, resample.semantics, small, offset, length, channels, level)
    return _cache.get(key, make)


# --------------------------------------------------------------------------------------------------------- running


def run(job: Job, level: str) -> None:
    """Run a job at a level that `checked_level` has passed."""
    _check(_library.pixelgate_run(ctypes.byref(job), LEVELS.index(level)))


def run_bicubic_f32(job: BicubicJob) -> None:
    """Run torch's float32 bicubic."""
    _check(_library.pixelgate_bicubic_f32(ctypes.byref(job)))


def _check(status: int) -> None:
    if status == _NO_MEMORY:
        raise MemoryError("the kernels could not allocate their working rows")
    if status == _NO_LEVEL:
        raise KernelError("the instruction-set level is not available here")
