"""A large payload at the end of a serialised protobuf message.

The pixels never enter a message object: protobuf merges repeated occurrences of an embedded message, so
``mm_inputs { pixel_values { data } }`` appended to the serialised rest is the same message as one built whole. The
pixels of a single picture are at the end of their message from the beginning, and of several one ``join`` makes the
only copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.pixels.outgoing import Outgoing, memory_of

_MOST_BYTES_OF_TOKEN = 3  # as a varint
_USUAL_REST = 4 << 10  # bytes of a message without token ids and pixels
_MOST_ROOM = 64 << 10
_SHORTEST = 2  # bytes of a field: its tag and a length of 0

MAX_TENSOR_BYTES = (1 << 31) - (64 << 20)  # protobuf's own limit of 2 GiB, less what else is in a message


def payload_prefix(path: Sequence[tuple[Any, str]], nbytes: int) -> bytes:
    """What comes before ``nbytes`` of payload: the headers of the fields on ``path``, which is innermost first."""
    prefix = b""
    for message, field in path:
        number = message.DESCRIPTOR.fields_by_name[field].number
        prefix = varint(number << 3 | 2) + varint(len(prefix) + nbytes) + prefix
    return prefix


def room_before(tokens: int) -> int:
    """Bytes of room that a tensor needs before it so that a message with as many tokens is made in place.

    Larger ones, and those with much else in them, are joined.
    """
    return min(_MOST_BYTES_OF_TOKEN * tokens + _USUAL_REST, _MOST_ROOM)


def in_place(front: bytes, pixels: Sequence[NDArray[Any]], request: Any) -> bytes | None:
    """A serialised ``request`` that ends with ``front`` and the pixels, in the memory in which they were made.

    None where that has too little room, belongs to somebody else just now, or is not all of them. Let go of it when it
    has been sent.
    """
    memory = own_memory(pixels)
    if memory is None or (padding := _padding(request, memory.room - len(front))) is None:
        return None
    return memory.lend(padding + front)


def own_memory(pixels: Sequence[NDArray[Any]]) -> Outgoing | None:
    """The memory in which a message with these pixels can be made in place."""
    return memory_of(pixels[0]) if len(pixels) == 1 else None


def _padding(request: Any, size: int) -> bytes | None:
    """``size`` bytes that change nothing at the beginning of a ``request``. None where there is no such.

    Of a field that occurs twice the last value holds, so what comes first may be anything.
    """
    if size < _SHORTEST:
        return None if size else b""
    tag = varint(request.DESCRIPTOR.fields_by_name["request_id"].number << 3 | 2)
    for digits in (1, 2, 3):
        rest = size - len(tag) - digits
        if len(varint(rest)) == digits:
            return tag + varint(rest) + bytes(rest)
    return tag + varint(0) + (_padding(request, size - _SHORTEST) or b"")  # where a digit more is one too many


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
