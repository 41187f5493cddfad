"""Memory settings for a program that owns its process. The library never makes them by itself."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping
from typing import Any

from PIL import Image

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # glibc's <malloc.h>
_KEPT_HEAP = 512 << 20
_PILLOW_BLOCK = 64 << 20  # four bytes a pixel: pictures of up to 16 megapixels are read where they lie


def keep_memory(pictures: int = 1) -> None:
    """Keep freed memory for the next picture instead of returning it to the system.

    Fresh memory costs a page fault per 4 KiB, often more than the work done in it. Pillow then allocates pictures of up
    to 16 megapixels as one block, which the kernels read without a copy, and keeps up to ``pictures`` of them; glibc's
    malloc keeps blocks of any size, in all up to 512 MiB. In the environment of `with_one_heap` that is for all
    threads together: what each kept for itself would mostly lie idle, and above 64 MiB is mapped anew. Other C
    libraries have no such settings.
    """
    Image.core.set_block_size(_PILLOW_BLOCK)  # type: ignore[attr-defined]
    Image.core.set_blocks_max(pictures)  # type: ignore[attr-defined]
    if (mallopt := _glibc("mallopt")) is not None:
        mallopt(_M_MMAP_MAX, 0)  # large blocks, too, come from the heap, to which they can be given back
        mallopt(_M_TRIM_THRESHOLD, _KEPT_HEAP)


def with_one_heap(environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` for a process that will call `keep_memory`: what glibc's malloc can only be told at the start.

    All threads share one heap. It has no huge pages: they save 5 percent of a request's time, but looking for a free
    one stops whoever first writes there, now and then for hundreds of milliseconds, and that may be the event loop.
    """
    tunables = (environment.get("GLIBC_TUNABLES"), "glibc.malloc.arena_max=1")
    return {**environment, "GLIBC_TUNABLES": ":".join(filter(None, tunables))}


def settle() -> None:
    """Once everything is loaded that stays: give back what loading it took, and look for no garbage in it any more."""
    gc.collect()
    gc.freeze()
    trim()


def trim() -> None:
    """Give memory that is kept for the next picture back to the system, as far as glibc can."""
    if (malloc_trim := _glibc("malloc_trim")) is not None:
        malloc_trim(0)


def _glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
