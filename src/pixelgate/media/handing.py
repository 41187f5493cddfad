"""Pictures for servers with a decoder of their own: files that every one of them reads as this package does."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pixelgate.media import decode
from pixelgate.media.policy import MediaPolicy

_COMPRESSION = 1  # of zlib's 9: most of what is to be had, in a tenth of the time


def handed_on(data: bytes, policy: MediaPolicy) -> tuple[bytes, str]:
    """An encoded picture to be sent elsewhere, and its media type: as it is, or decoded by ``policy`` and a PNG.

    As it is only where decoders cannot differ: they do about orientation, transparency, 16 bits, frames and rare
    formats. Raises what `decode.header` does.
    """
    kind = decode.plain(data, policy)
    if kind is not None:
        return data, f"image/{kind.lower()}"
    return png(decode.decode(data, policy)), "image/png"


def png(pixels: NDArray[np.uint8]) -> bytes:
    """uint8 RGB [height, width, 3], or 4 with a byte that means nothing, as a PNG file."""
    file = BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels[:, :, :3])).save(file, "PNG", compress_level=_COMPRESSION)
    return file.getvalue()
