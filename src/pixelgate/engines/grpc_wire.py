"""A large payload at the end of a serialised protobuf message.

The pixels never enter a message object: protobuf merges repeated occurrences of an embedded message, so
``mm_inputs { pixel_values { data } }`` appended to the serialised rest is the same message as one built whole, and one
``join`` is the only copy that is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_TENSOR_BYTES = (1 << 31) - (64 << 20)  # protobuf's own limit of 2 GiB, less what else is in a message


def payload_prefix(path: Sequence[tuple[Any, str]], nbytes: int) -> bytes:
    """What comes before ``nbytes`` of payload: the headers of the fields on ``path``, which is innermost first."""
    prefix = b""
    for message, field in path:
        number = message.DESCRIPTOR.fields_by_name[field].number
        prefix = varint(number << 3 | 2) + varint(len(prefix) + nbytes) + prefix
    return prefix


def varint(value: int) -> bytes:
    """``value`` as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def raw(array: NDArray[Any]) -> memoryview:
    """The bytes of an array in its order; no copy where that is the order of its memory."""
    return array.reshape(-1).view(np.uint8).data  # as uint8, because bfloat16 has no buffer format
