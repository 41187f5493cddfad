"""Compare two golden folders: `python tests/goldens/compare.py NEW KEPT`. Exit status 1 when a result differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> int:
    new, kept = (Path(argument) for argument in sys.argv[1:3])
    differences = 0
    for name in ("index.json", "tokens.json", "resize.json"):
        ours, theirs = (json.loads((folder / name).read_text("utf-8")) for folder in (new, kept))
        keys = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
        differences += len(keys)
        print(f"{name}: {len(theirs)} entries, {len(keys)} differ", *keys[:10])
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
