"""Small pictures of every format and kind that the intake decodes, to be damaged by the fuzzers."""

from __future__ import annotations

import io

import numpy as np
import pillow_heif
from PIL import Image


def pictures() -> dict[str, bytes]:
    """Encoded pictures by a name that says what they are."""
    rng = np.random.default_rng(5)
    y, x = np.mgrid[0:48, 0:64]
    smooth = np.stack([x * 4, y * 5, (x + y) * 2], 2).astype(np.uint8)
    rgb = Image.fromarray(smooth ^ rng.integers(0, 8, smooth.shape, np.uint8))
    rgba = rgb.copy()
    rgba.putalpha(Image.fromarray((x * 4).astype(np.uint8)))
    grey, palette, bilevel, cmyk = rgb.convert("L"), rgb.quantize(40), rgb.convert("1"), rgb.convert("CMYK")
    grey16 = Image.fromarray((x * 1000 + y).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 6
    more = [rgb.rotate(90 * turn) for turn in range(1, 3)]
    made = {}

    def add(name: str, image: Image.Image, form: str, **options: object) -> None:
        file = io.BytesIO()
        image.save(file, form, **options)
        made[f"{form} {name}"] = file.getvalue()

    add("plain", rgb, "JPEG")
    add("progressive", rgb, "JPEG", progressive=True, subsampling=0)
    add("grey", grey, "JPEG", restart_marker_blocks=1)
    add("cmyk", cmyk, "JPEG")
    add("exif", rgb, "JPEG", exif=exif, icc_profile=bytes(500), comment=b"a comment")
    add("plain", rgb, "PNG")
    add("alpha", rgba, "PNG", exif=exif)
    add("palette", palette, "PNG", transparency=3)
    add("bilevel", bilevel, "PNG")
    add("16 bit", grey16, "PNG", transparency=700)
    add("animated", rgb, "PNG", save_all=True, append_images=more)
    add("lossy", rgb, "WEBP", exif=exif)
    add("lossless", rgba, "WEBP", lossless=True)
    add("animated", rgb, "WEBP", save_all=True, append_images=more)
    add("plain", palette, "GIF")
    add("animated", palette, "GIF", save_all=True, append_images=more, transparency=1, disposal=2)
    add("plain", rgb, "BMP")
    add("palette", palette, "BMP")
    add("bilevel", bilevel, "BMP")
    for compression in (None, "packbits", "tiff_lzw", "tiff_adobe_deflate", "jpeg"):
        add(f"{compression}", rgb, "TIFF", compression=compression)
    add("fax", bilevel, "TIFF", compression="group4")
    add("alpha", rgba, "TIFF", compression="tiff_lzw", exif=exif)
    add("16 bit", grey16, "TIFF")
    add("pages", rgb, "TIFF", save_all=True, append_images=more)
    add("big", rgb, "TIFF", big_tiff=True)
    add("plain", rgb, "AVIF", speed=10)
    add("alpha", rgba, "AVIF", speed=10, exif=exif.tobytes())
    for name, image in (("plain", rgb), ("alpha", rgba)):
        file = io.BytesIO()
        pillow_heif.from_pillow(image).save(file, quality=50, exif=exif.tobytes())
        made[f"HEIC {name}"] = file.getvalue()
    return made
