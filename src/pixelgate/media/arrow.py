"""A Pillow image's own memory as an array, without a copy, through the Arrow C data interface.

Besides the kernels' binding the only file that touches ctypes: the interface is a C structure. The layout is fixed by
Arrow (https://arrow.apache.org/docs/format/CDataInterface.html), not by Pillow's internals.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_get_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


class _ArrowArray(ctypes.Structure):
    pass


_ArrowArray._fields_ = [
    ("length", ctypes.c_int64),
    ("null_count", ctypes.c_int64),
    ("offset", ctypes.c_int64),
    ("n_buffers", ctypes.c_int64),
    ("n_children", ctypes.c_int64),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    ("dictionary", ctypes.c_void_p),
    ("release", ctypes.c_void_p),
    ("private_data", ctypes.c_void_p),
]


class _Memory:
    """What numpy makes an array of; it holds the capsule, and the capsule holds the image's memory."""

    def __init__(self, capsule: object, address: int, shape: tuple[int, int, int]) -> None:
        self._capsule = capsule
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": shape,
            "typestr": "|u1",
            "data": (address, True),
        }


def shared_pixels(image: Image.Image) -> NDArray[np.uint8] | None:
    """A loaded RGB image as read-only uint8 [height, width, 4], whose fourth byte means nothing.

    None if the rows do not lie in one block of memory: Pillow splits large images.
    """
    if image.mode != "RGB":
        return None
    try:
        _, capsule = image.__arrow_c_array__()
    except ValueError:
        return None
    array = _ArrowArray.from_address(_get_pointer(capsule, b"arrow_array"))
    shape = (image.height, image.width, 4)
    if array.offset or array.n_children != 1:
        return None
    values = array.children[0].contents
    if values.offset or values.n_buffers != 2 or values.length != shape[0] * shape[1] * shape[2]:
        return None
    return np.asarray(_Memory(capsule, values.buffers[1], shape))
