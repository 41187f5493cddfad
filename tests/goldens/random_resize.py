"""Random resizes against the real libraries, at every level.

    python tests/goldens/random_resize.py [--cases N] [--seed N]

Compares with the installed Pillow, torchvision and torch, on bytes; run it where tests/goldens/requirements.txt is
installed. A case is one pair of shapes with one filter of one library. Exit status 1 when a result differs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

from goldens.cases import FLOAT_TABLE, PILLOW_FILTERS, TORCHVISION_FILTERS
from pixelgate.pixels import binding, kernels
from pixelgate.pixels.resample import Resample

LIMITS = (16, 64, 300, 1000)


def expected(image: np.ndarray, size: tuple[int, int]) -> dict[tuple[str, str], np.ndarray]:
    """What each library makes of the picture, by (semantics, filter)."""
    height, width = size
    opened = PIL.Image.fromarray(image)
    # channels last: the contiguous kernel of torch 2.14 refuses 1x1 outputs
    tensor = torch.from_numpy(image).permute(2, 0, 1)
    results = {}
    for kind in PILLOW_FILTERS:
        results["pillow", kind] = np.asarray(opened.resize((width, height), PIL.Image.Resampling[kind.upper()]))
    for kind in TORCHVISION_FILTERS:
        mode = InterpolationMode("nearest-exact" if kind == "nearest" else kind)
        # transformers hands over planes, and nearest has kernels of its own for them
        given = tensor.contiguous() if kind == "nearest" else tensor
        out = functional.resize(given, [height, width], mode, antialias=kind != "nearest")
        results["torchvision", kind] = out.permute(1, 2, 0).contiguous().numpy()
    return results


def float_bicubic(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    floats = torch.from_numpy(np.stack([FLOAT_TABLE[c][image[:, :, c]] for c in range(3)]))
    return torch.nn.functional.interpolate(floats[None], size, mode="bicubic", align_corners=False)[0].numpy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(arguments.seed)
    cases: Counter[str] = Counter()
    wrong: list[str] = []
    number = 0
    while cases.total() < arguments.cases:
        limit = LIMITS[number % len(LIMITS)]
        height, width, *size = (int(side) for side in rng.integers(1, limit + 1, 4))
        image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        if number % 3 == 0:
            image = np.where(image < 128, 0, 255).astype(np.uint8)
        number += 1
        target = (size[0], size[1])
        for (semantics, kind), result in expected(image, target).items():
            cases[semantics] += 1
            for level in binding.available_levels():
                got = kernels.resize(image, target, Resample(kind, semantics), level=level)
                if got.tobytes() != result.tobytes():
                    wrong.append(f"{semantics} {kind} {level}: {height}x{width} to {target[0]}x{target[1]}")
        if limit < LIMITS[-1]:
            cases["torch float32 bicubic"] += 1
            if kernels.bicubic_f32(image, target, FLOAT_TABLE).tobytes() != float_bicubic(image, target).tobytes():
                wrong.append(f"float32 bicubic: {height}x{width} to {target[0]}x{target[1]}")
    for name, count in sorted(cases.items()):
        print(f"{count:6d}  {name}")
    print(f"{cases.total()} cases at levels {', '.join(binding.available_levels())}: {len(wrong)} differ", *wrong[:10])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
