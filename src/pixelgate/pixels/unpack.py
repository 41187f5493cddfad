"""The inverse of the executor: a tensor back to the picture it was made from.

What comes out is the view after its resize, which is what the model would have seen; the resize itself loses
information and is not undone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import KernelError
from pixelgate.pixels.affine import DTYPE_NAMES, NUMPY_DTYPES, Affine
from pixelgate.pixels.plan import FloatView, ImagePlan, Patches

Invert = Callable[[NDArray[Any], int], NDArray[np.uint8]]


def unpack(plan: ImagePlan, tensor: NDArray[Any], view: int = 0) -> NDArray[np.uint8]:
    """View number ``view`` as uint8 [height, width, 3], from the ``tensor`` that `execute` made of the plan.

    Tiles are put together to their canvas. Every value becomes the 8-bit value whose table entry is nearest: exact for
    float32 and uint8. A 16-bit float table may hold one number twice; then either of its two 8-bit values comes out,
    and packing the picture again gives the same tensor all the same. Of the temporal copies the first is read. Raises
    KernelError when shape or dtype do not fit the plan.
    """
    if tensor.shape != plan.shape:
        raise KernelError(f"the plan's tensor has shape {list(plan.shape)}, but the array has {list(tensor.shape)}")
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None:
        raise KernelError(f"dtype {str(tensor.dtype)!r} is not one of {', '.join(NUMPY_DTYPES)}")
    invert = _inverse(plan.affine, dtype)
    wanted = plan.views[view]
    if isinstance(plan.layout, Patches):
        return _from_patches(plan.layout, wanted.tile_size, tensor, invert)
    first = sum(earlier.tiles for earlier in plan.views[:view])
    across = 1 if isinstance(wanted, FloatView) else wanted.canvas[1] // wanted.tile_size[1]
    return _from_tiles(tensor[first : first + wanted.tiles], across, invert)


def _from_patches(layout: Patches, size: tuple[int, int], tensor: NDArray[Any], invert: Invert) -> NDArray[np.uint8]:
    height, width = size
    patch, merge = layout.patch, layout.merge
    rows, columns = height // (patch * merge), width // (patch * merge)
    values = tensor.reshape(rows, columns, merge, merge, 3, layout.temporal, patch, patch)[:, :, :, :, :, 0]
    picture = np.empty((height, width, 3), np.uint8)
    target = picture.reshape(rows, merge, patch, columns, merge, patch, 3)
    # One row of blocks at a time: its floats stay in the processor's cache.
    for row in range(rows):
        for channel in range(3):
            target[row, ..., channel] = invert(values[row, :, :, :, channel], channel).transpose(1, 3, 0, 2, 4)
    return picture


def _from_tiles(tiles: NDArray[Any], across: int, invert: Invert) -> NDArray[np.uint8]:
    count, _, height, width = tiles.shape
    picture = np.empty((count // across * height, across * width, 3), np.uint8)
    target = picture.reshape(count // across, height, across, width, 3)
    for number, tile in enumerate(tiles):
        for channel in range(3):
            target[number // across, :, number % across, :, channel] = invert(tile[channel], channel)
    return picture


def _inverse(affine: Affine, dtype: str) -> Invert:
    if dtype == "uint8":
        return lambda values, channel: values
    if dtype == "float32":
        return _float32_inverse(affine)
    nearest = _nearest(affine, dtype)
    return lambda values, channel: nearest[channel][values.view(np.uint16)]


def _float32_inverse(affine: Affine) -> Invert:
    """Read off the table's ends, so that it does not matter which rule rounded the entries between them."""
    first, last = affine.table[:, 0], affine.table[:, 255]
    low, high = np.minimum(first, last), np.maximum(first, last)
    steps_per_unit = np.float32(255) / (last - first)

    def invert(values: NDArray[Any], channel: int) -> NDArray[np.uint8]:
        # fmax and fmin, not clip: they turn NaN into a number as well
        steps = np.fmax(values, low[channel])
        np.fmin(steps, high[channel], out=steps)
        steps -= first[channel]
        steps *= steps_per_unit[channel]
        np.rint(steps, out=steps)
        restored: NDArray[np.uint8] = steps.astype(np.uint8)
        return restored

    return invert


@lru_cache(maxsize=8)
def _nearest(affine: Affine, dtype: str) -> NDArray[np.uint8]:
    """uint8 [3, 65536]: for each bit pattern of a 16-bit float the index of the nearest table entry."""
    every = np.arange(1 << 16, dtype=np.uint16).view(NUMPY_DTYPES[dtype]).astype(np.float32)
    nearest = np.empty((3, every.size), np.uint8)
    for channel, table in enumerate(affine.table_as(dtype).astype(np.float32)):
        order = np.argsort(table, kind="stable")
        entries = table[order]
        nearest[channel] = order[np.searchsorted((entries[1:] + entries[:-1]) / 2, every)]
    return nearest
