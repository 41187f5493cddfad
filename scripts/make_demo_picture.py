"""Draws the demo picture, src/pixelgate/demo/receipt.jpg: a till receipt on a table, as a phone would see it.

The picture is committed; run this only to change it. The same Pillow and numpy give the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont

TARGET = Path(__file__).parents[1] / "src" / "pixelgate" / "demo" / "receipt.jpg"

HEIGHT, WIDTH = 1056, 1408
PAPER_HEIGHT, PAPER_WIDTH = 960, 700
# Corners of the paper in the picture, clockwise from the top left, as (x, y).
CORNERS = ((388, 70), (1046, 34), (1092, 1002), (352, 1026))

HEADER = (("Paper Boat Bakery", 62), ("12 Harbour Street", 36))
ITEMS = (
    ("2 Croissants", "5.60"),
    ("1 Rye bread", "4.20"),
    ("3 Oat cookies", "4.50"),
    ("1 Flat white", "3.40"),
)
TOTAL = ("Total EUR", "17.70")
FOOTER = "Thank you, come again!"

INK = (52, 50, 58)
Floats = NDArray[np.float32]


def noise(rng: np.random.Generator, height: int, width: int, cell_height: int, cell_width: int) -> Floats:
    """Smooth noise about 0 with standard deviation 1, float32 [height, width]; one cell is one wave long."""
    small = rng.standard_normal((height // cell_height + 3, width // cell_width + 3)).astype(np.float32)
    smooth = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
    normal: Floats = (smooth - smooth.mean()) / smooth.std()
    return normal


def table(rng: np.random.Generator) -> Floats:
    """A table of oak boards, float32 [HEIGHT, WIDTH, 3] in 0..255."""
    board_height = 236
    y = np.arange(HEIGHT)
    board = (y + 90) // board_height
    grain = np.empty((HEIGHT, WIDTH), np.float32)
    for number in np.unique(board):
        rows = y[board == number]
        long = noise(rng, len(rows), WIDTH, 34, 520)
        fibres = noise(rng, len(rows), WIDTH, 3, 190)
        rings = np.sin(6.0 * long + 0.11 * (rows - rows[0])[:, None])
        grain[rows] = 7.0 * rings + 5.0 * fibres + 6.0 * rng.standard_normal()
    gap = np.abs((y + 90) % board_height - board_height / 2) > board_height / 2 - 2.5
    grain[gap] -= 52.0
    return np.array([139, 101, 66], np.float32) + grain[..., None] * np.array([1.0, 0.9, 0.72], np.float32)


def paper() -> Image.Image:
    """The printed receipt, flat and clean."""
    sheet = Image.new("RGB", (PAPER_WIDTH, PAPER_HEIGHT), (243, 241, 235))
    draw = ImageDraw.Draw(sheet)
    left, right, y = 62, PAPER_WIDTH - 62, 72
    for text, size in HEADER:
        draw.text((PAPER_WIDTH / 2, y), text, INK, ImageFont.load_default(size), anchor="ma")
        y += round(size * 1.45)
    y += 34
    font = ImageFont.load_default(42)
    for name, price in (*ITEMS, TOTAL):
        if (name, price) == TOTAL:
            draw.line((left, y + 4, right, y + 4), INK, 3)
            y, font = y + 36, ImageFont.load_default(52)
        draw.text((left, y), name, INK, font, anchor="la")
        draw.text((right, y), price, INK, font, anchor="ra")
        y += 96
    draw.text((PAPER_WIDTH / 2, y + 52), FOOTER, INK, ImageFont.load_default(38), anchor="ma")
    return sheet


def crumpled(sheet: Image.Image, rng: np.random.Generator) -> Image.Image:
    """The sheet with uneven print, soft waves and one fold."""
    pixels = np.asarray(sheet, np.float32)
    ink = (243 - pixels[..., :1]) / 255
    worn = 1.0 + 0.06 * noise(rng, PAPER_HEIGHT, PAPER_WIDTH, 40, 60)[..., None]
    waves = 2.4 * noise(rng, PAPER_HEIGHT, PAPER_WIDTH, 260, 420) + 1.1 * noise(rng, PAPER_HEIGHT, PAPER_WIDTH, 3, 3)
    from_fold = np.arange(PAPER_HEIGHT) - 0.47 * PAPER_HEIGHT
    fold = 9.0 * np.exp(-((from_fold / 5) ** 2)) - 11.0 * np.exp(-(((from_fold - 12) / 26) ** 2))
    shaded = pixels + 24.0 * ink * worn + waves[..., None] + fold[:, None, None]
    return Image.fromarray(shaded.clip(0, 255).astype(np.uint8))


def laid_out(sheet: Image.Image) -> Image.Image:
    """The sheet in perspective, its corners at CORNERS; black around it."""
    rectangle = ((0, 0), (PAPER_WIDTH, 0), (PAPER_WIDTH, PAPER_HEIGHT), (0, PAPER_HEIGHT))
    rows, values = [], []
    for (x, y), (u, v) in zip(CORNERS, rectangle, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    coefficients = np.linalg.solve(np.array(rows, np.float64), np.array(values, np.float64)).tolist()
    return sheet.transform((WIDTH, HEIGHT), Image.Transform.PERSPECTIVE, coefficients, Image.Resampling.BICUBIC)


def photograph() -> Image.Image:
    """The whole scene, lit from the top left, a little soft and grainy."""
    rng = np.random.default_rng(20261130)
    scene = Image.fromarray(table(rng).clip(0, 255).astype(np.uint8))
    sheet = laid_out(crumpled(paper(), rng))
    outline = laid_out(Image.new("L", (PAPER_WIDTH, PAPER_HEIGHT), 255))

    shadow = ImageChops.offset(outline, 12, 16).filter(ImageFilter.GaussianBlur(14)).point(lambda v: v * 0.62)
    scene.paste((28, 18, 12), mask=shadow)
    edge = outline.filter(ImageFilter.MinFilter(5)).filter(ImageFilter.GaussianBlur(1.2))
    scene.paste(sheet, mask=edge)

    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float32)
    light = 1.1 - 0.34 * np.hypot(x - 0.28 * WIDTH, y - 0.18 * HEIGHT) / np.hypot(WIDTH, HEIGHT)
    warm = np.array([1.01, 0.985, 0.93], np.float32)
    pixels = np.asarray(scene.filter(ImageFilter.GaussianBlur(0.7)), np.float32) * light[..., None] * warm
    pixels += rng.normal(0, 2.6, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


if __name__ == "__main__":
    photograph().save(TARGET, quality=88)
    print(f"{TARGET.name}: {TARGET.stat().st_size:,} bytes")
