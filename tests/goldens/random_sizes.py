"""Shapes and tokens of pictures of random sizes, beside those of the real transformers.

    python tests/goldens/random_sizes.py [--count N] [--seed S] [family ...]

For every family and N sizes (default 2000): the shape of every output of the image processor, and what its processor
puts into the prompt, must be what our plan says without a picture. What LLaVA 1.5 would enlarge beyond our bound
before it crops is counted apart. Needs what make.py needs. Exit status 1 on a difference.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

import pixelgate
from goldens import golden, make
from pixelgate.errors import ImageRefusedError, PixelgateError
from pixelgate.pixels.kernels import MAX_SIDE

LARGEST = 2500
EDGE = 336  # the shorter side that LLaVA 1.5 resizes to


def sizes(count: int, seed: int) -> Iterator[tuple[int, int]]:
    """(height, width): half of them by magnitude, half evenly; extreme ratios and multiples of patches among them."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        by_magnitude = np.exp(rng.uniform(0, np.log(LARGEST), 2))
        height, width = (int(v) for v in (by_magnitude if number % 2 else rng.integers(1, LARGEST, 2)))
        if number % 10 == 0:
            height, width = (int(v) * int(rng.choice([14, 16, 28, 32, 336])) for v in rng.integers(1, 8, 2))
        yield height, width


def theirs(processor, speaker, height: int, width: int) -> dict | None:
    """Shapes, and the placeholder text by counts and hash; None where transformers refuses."""
    try:
        outputs = make.run(processor, PIL.Image.new("RGB", (width, height)))
    except (ValueError, RuntimeError, TypeError, ZeroDivisionError):
        return None
    found: dict = {name: value.shape for name, value in outputs.items()}
    if speaker is None:
        found["tokens"] = int(outputs["num_img_tokens"][0])
    else:
        found["text"] = make.replaced(speaker, outputs)["sha256"]
    return found


def ours(processor: pixelgate.Processor, height: int, width: int, *, counted: bool) -> dict | None:
    try:
        plan = processor.plan(height=height, width=width)
    except ImageRefusedError:
        return None
    family = processor.family
    found: dict = {family.pixels_name: family.collate([plan]).shape}
    found |= {name: value.shape for name, value in family.outputs([plan], [1]).items()}
    if counted:
        found["tokens"] = plan.tokens
    else:
        text = "".join(token * count for token, count in family.expansion(plan))
        found["text"] = hashlib.sha256(text.encode()).hexdigest()
    return found


def beyond_bound(height: int, width: int) -> bool:
    return EDGE * max(height, width) / min(height, width) > MAX_SIDE


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    different = 0
    for checkpoint in sorted(golden.CHECKPOINTS.iterdir()):
        if arguments.family and checkpoint.name not in arguments.family:
            continue
        backend, processor = next(iter(make.processors(checkpoint).items()))
        mine = pixelgate.load(checkpoint, backend=backend)
        counted = "num_img_tokens" in mine.family.outputs([mine.plan(height=99, width=99)], [1])
        speaker = None if counted else make.speaker(checkpoint, processor)
        equal = refused = bounded = 0
        for height, width in sizes(arguments.count, arguments.seed):
            expected, found = theirs(processor, speaker, height, width), ours(mine, height, width, counted=counted)
            if expected == found:
                equal, refused = equal + 1, refused + (found is None)
            elif found is None and mine.checkpoint.model_type == "llava" and beyond_bound(height, width):
                bounded += 1
            else:
                different += 1
                print(f"NOT EQUAL {checkpoint.name} {width}x{height}: {found} instead of {expected}")
        print(
            f"{equal:5d} equal, {refused} of them refused by both, {bounded} beyond our bound: {checkpoint.name}",
            flush=True,
        )
    return 1 if different else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PixelgateError as failure:
        sys.exit(failure.message)
