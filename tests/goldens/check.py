"""Compare pixelgate with a folder of goldens, on bytes.

    python tests/goldens/check.py DIR [family ...]

Every row of DIR/index.json (and of DIR/tokens.json, where there is one) is checked whose family pixelgate supports;
with families named, of those alone. Nothing is skipped: a missing image or npz is a failure. Rows of other families
and of video are counted and printed as not covered. Exit status 1 when a row is not equal.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import pixelgate
from goldens import golden
from pixelgate.errors import PixelgateError

FAMILIES = tuple(sorted(path.name for path in golden.CHECKPOINTS.iterdir()))
BACKENDS = ("torchvision", "pil", "remote")
# transformers hands 16-bit values on unscaled here; pixelgate's own policy for 16 bit applies instead
SIXTEEN_BIT_PATH = ("torchvision", "i16_200x150.png.viapath")


@cache
def processor(family: str, backend: str | None = None, rgb: str = "hf") -> pixelgate.Processor:
    return pixelgate.load(golden.CHECKPOINTS / family, backend=backend, rgb=rgb)


def rounded_to_bfloat16(array: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to nearest with ties to even, written independently of the package."""
    bits = array.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def check_row(folder: Path, key: str, row: dict[str, Any]) -> Iterator[str]:
    """The differences of one row, in words."""
    family, backend, name = key.split("/")
    images = golden.load_input(folder, name, row)
    process = processor(family, backend).with_options(**row.get("options", {}))
    if row["status"] == "error":
        try:
            process(images)
        except PixelgateError:
            return
        yield f"transformers raises {row['error']}, pixelgate does not"
        return
    inputs = process(images)
    if (backend, name) == SIXTEEN_BIT_PATH:
        ours = process(pixelgate.decode(images))
        if ours["pixel_values"].tobytes() != inputs["pixel_values"].tobytes():
            yield "a 16-bit path is not decoded by the documented policy"
        return
    if set(inputs) != set(row["outputs"]):
        yield f"outputs are {sorted(inputs)}, not {sorted(row['outputs'])}"
        return
    with np.load(folder / f"{key}.npz") as stored:
        for output, expected in row["outputs"].items():
            got = inputs[output]
            if golden.describe(got) != expected:
                yield f"{output}: {golden.describe(got)} instead of {expected}{first_difference(got, stored, output)}"
            if str(stored[f"{output}.sha256"]) != expected["sha256"]:
                yield f"{output}: the npz and index.json disagree"
    half = process(images, dtype="bfloat16")[process.family.pixels_name]
    single = process(images, dtype="float32")[process.family.pixels_name]
    if half.view(np.uint16).tobytes() != rounded_to_bfloat16(single).tobytes():
        yield "bfloat16 is not float32 rounded to nearest even"


def first_difference(got: np.ndarray, stored: Any, output: str) -> str:
    flat = got.reshape(-1)
    if f"{output}.full" in stored:
        expected, where = stored[f"{output}.full"].reshape(-1), np.arange(stored[f"{output}.full"].size)
    else:
        expected = stored[f"{output}.sample"]
        where = np.arange(expected.size) * int(stored[f"{output}.step"])
    if expected.size == 0 or where[-1] >= flat.size:
        return ""
    wrong = np.flatnonzero(flat[where] != expected)
    return f"; first sample off at {where[wrong[0]]}" if wrong.size else "; no sampled value differs"


def check_tokens(folder: Path, key: str, row: dict[str, Any]) -> Iterator[str]:
    family, name = key.split("/")
    process = processor(family)
    with golden.load_input(folder, name, {}) as image:
        width, height = image.size
    try:
        plan = process.plan(height=height, width=width)
    except PixelgateError:
        if "error" not in row:
            yield "refused, but transformers takes it"
        return
    runs = process.family.expansion(plan)
    counts: Counter[str] = Counter()
    for token, count in runs:
        counts[token] += count
    # rows that come from a count of the image processor name no token of the tokenizer
    expected = {process.family.embedded if t == "<image>" else t: n for t, n in row.get("counts", {}).items()}
    if counts != expected:
        yield f"expands to {dict(counts)} instead of {expected}"
    if plan.tokens != counts[process.family.embedded]:
        yield f"the plan says {plan.tokens} tokens, its expansion {counts[process.family.embedded]}"
    if "sha256" in row and hashlib.sha256("".join(t * n for t, n in runs).encode()).hexdigest() != row["sha256"]:
        yield "the expansion has the right tokens in another order"


def check_sweep(sweep: dict[str, Any]) -> Iterator[str]:
    """Resized (height, width), or the token count, over many sizes; null where transformers refuses."""
    for family in set(FAMILIES) & set(sweep):
        for (height, width), expected in zip(sweep["sizes"], sweep[family], strict=True):
            try:
                plan = processor(family).plan(height=height, width=width)
                got = plan.tokens if isinstance(expected, int) else list(plan.views[0].resize)
            except PixelgateError:
                got = None
            if got != expected:
                yield f"{family} {height}x{width}: {got} instead of {expected}"


def check(folder: Path, families: tuple[str, ...] = FAMILIES) -> tuple[Counter[str], list[str]]:
    """Counts of what was checked, and a line per difference."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for key, row in golden.read_json(folder / "index.json").items():
        family, backend, _ = key.split("/")
        if family not in families or backend not in BACKENDS:
            counts["not covered"] += 1
            continue
        counts[f"{family}/{backend}"] += 1
        try:
            failures += [f"{key}: {difference}" for difference in check_row(folder, key, row)]
        except (OSError, KeyError, PixelgateError) as failure:
            failures.append(f"{key}: {type(failure).__name__}: {failure}")
    if (folder / "tokens.json").is_file():
        for key, row in golden.read_json(folder / "tokens.json").items():
            if key == "__sweep__":
                counts["sweep"] += 1
                failures += [f"sweep: {difference}" for difference in check_sweep(row)]
            elif key.split("/")[0] in families and "/video/" not in key:
                counts["tokens"] += 1
                failures += [f"tokens of {key}: {difference}" for difference in check_tokens(folder, key, row)]
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("family", nargs="*", choices=[[], *FAMILIES], help="default: all that are supported")
    arguments = parser.parse_args()
    counts, failures = check(arguments.folder, tuple(arguments.family) or FAMILIES)
    for name, count in sorted(counts.items()):
        print(f"{count:5d}  {name}")
    for failure in failures:
        print("NOT EQUAL", failure)
    print(f"{sum(counts.values()) - counts['not covered']} checked, {len(failures)} differences")
    return 1 if failures or not any(counts[f"{f}/{b}"] for f in FAMILIES for b in BACKENDS) else 0


if __name__ == "__main__":
    sys.exit(main())
