"""Random plans through execute(), at every level: no level may differ, and under sanitizers nothing may complain.

    python tests/fuzz/fuzz_kernels.py [--seconds S] [--seed N]

Sizes are 1 to 3000; pictures are parts of larger arrays with odd strides, or end exactly where their memory ends;
windows, canvases and tiles are random. `make sanitize` runs it on kernels built with AddressSanitizer and UBSan.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from pixelgate.pixels import binding, kernels
from pixelgate.pixels.affine import Affine
from pixelgate.pixels.kernels import Window
from pixelgate.pixels.plan import Canvas, FloatView, ImagePlan, Patches, Tiles, View, execute
from pixelgate.pixels.resample import Resample

FILTERS = {
    "pillow": ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"),
    "torchvision": ("nearest", "bilinear", "bicubic", "lanczos"),
}
LARGEST = 3000
MOST_PIXELS = 200_000


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def number(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high + 1))

    def size(self) -> tuple[int, int]:
        """One side anything, the other such that the whole stays affordable; small sizes often."""
        long = self.number(1, (8, 70, 700, LARGEST)[self.number(0, 3)])
        short = self.number(1, max(1, min(LARGEST, MOST_PIXELS // long)))
        short = min(short, self.number(1, 300))
        return (long, short) if self.number(0, 1) else (short, long)

    def image(self) -> np.ndarray:
        height, width = self.size()
        channels = self.number(3, 4)
        if self.number(0, 1):
            memory = self.rng.integers(0, 256, height * width * channels, dtype=np.uint8)
            image = memory.reshape(height, width, channels)
        else:
            wide = self.rng.integers(0, 256, (height, width + self.number(1, 9), channels), dtype=np.uint8)
            image = wide[:, self.number(0, 1) :][:, :width]
        return np.where(image < 128, 0, 255).astype(np.uint8) if self.number(0, 3) == 0 else image

    def resample(self) -> Resample:
        semantics = ("pillow", "torchvision")[self.number(0, 1)]
        kinds = FILTERS[semantics]
        order = ("13", "12.2", "12.1")[self.number(0, 2)]
        return Resample(kinds[self.number(0, len(kinds) - 1)], semantics, order)

    def affine(self) -> Affine:
        rule = ("pil", "torchvision")[self.number(0, 1)]
        mean, std = self.rng.random(3), self.rng.random(3) + 0.1
        factor = (1 / 255, 1 / 127.5, 1.0)[self.number(0, 2)]
        return Affine(rule, tuple(map(float, mean)), tuple(map(float, std)), factor)

    def patches(self, image: np.ndarray) -> ImagePlan:
        patch, merge = self.number(1, 20), self.number(1, 3)
        block = patch * merge
        rows, columns = (max(1, min(self.number(1, 12), 400 // block)) for _ in range(2))
        view = View((rows * block, columns * block), self.resample())
        layout = Patches(patch, merge, self.number(1, 3))
        return ImagePlan(*image.shape[:2], (view,), layout, self.affine(), tokens=0)

    def tiles(self, image: np.ndarray) -> ImagePlan:
        resize = self.size()
        top, left = self.number(0, resize[0] - 1), self.number(0, resize[1] - 1)
        crop = Window(top, left, self.number(1, resize[0] - top), self.number(1, resize[1] - left))
        tile = self.number(1, 90), self.number(1, 90)
        offset = self.number(0, 5), self.number(0, 5)
        height, width = (
            -(-(o + side) // t) * t for o, side, t in zip(offset, (crop.height, crop.width), tile, strict=True)
        )
        fill = tuple(self.number(0, 255) for _ in range(3))
        pad = Canvas(*offset, height, width, fill)
        view = View(resize, self.resample(), crop=crop, pad=pad, tile=tile, transpose=bool(self.number(0, 1)))
        views = (FloatView(tile, view), view) if self.number(0, 2) == 0 else (view,)
        return ImagePlan(*image.shape[:2], views, Tiles(), self.affine(), tokens=0)

    def out(self, plan: ImagePlan, dtype: str, template: np.ndarray) -> np.ndarray:
        """Memory that ends with the output, or for tiles one with gaps inside."""
        if isinstance(plan.layout, Tiles) and self.number(0, 1):
            tiles, _, height, width = plan.shape
            larger = np.zeros((tiles, 4, height + 1, width + 2), template.dtype)
            return larger[:, 1:, 1:, 2:]
        return np.empty(plan.shape, template.dtype)

    def step(self) -> None:
        image = self.image()
        plan = self.patches(image) if self.number(0, 1) else self.tiles(image)
        float_view = any(isinstance(view, FloatView) for view in plan.views)
        dtypes = ("float32", "bfloat16", "float16") if float_view else ("float32", "bfloat16", "float16", "uint8")
        dtype = dtypes[self.number(0, len(dtypes) - 1)]
        expected = execute(plan, image, dtype=dtype, level="portable")
        for level in binding.available_levels():
            out = self.out(plan, dtype, expected)
            if execute(plan, image, out, dtype=dtype, level=level).tobytes() != expected.tobytes():
                raise SystemExit(f"level {level} differs from portable: {plan}, {dtype}, strides {image.strides}")
        size, resample = self.size(), self.resample()
        results = {kernels.resize(image, size, resample, level=level).tobytes() for level in binding.available_levels()}
        if len(results) != 1:
            raise SystemExit(f"levels differ: {image.shape} to {size} with {resample}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fuzzer = Fuzzer(arguments.seed)
    end = time.monotonic() + arguments.seconds
    steps = 0
    while time.monotonic() < end:
        fuzzer.step()
        steps += 1
    print(f"{steps} random plans, levels {', '.join(binding.available_levels())} equal")


if __name__ == "__main__":
    main()
