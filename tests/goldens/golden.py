"""The layout of a golden folder, shared by make.py (writes) and check.py (compares).

    index.json                             one row per "<family>/<backend>/<input>": what transformers answered
    <family>/<backend>/<input>.npz         per output K: K.shape, K.dtype, K.sha256, and K.full or samples of it
    tokens.json                            per "<family>/<image>": how many of which token stand for the image
    images/                                the inputs

An input is a file of images/ given as an opened PIL image; "<file>.viapath" is the same given as a path string, and a
row with "images" is a list of opened images in one call, all of one sample where its name begins with "nested". A
row's "options" are those of the call.
sha256 covers the C-order little-endian bytes.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

CHECKPOINTS = Path(__file__).with_name("checkpoints")
COMMITTED = Path(__file__).with_name("data")
FULL = 2048


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def describe(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": sha256(array)}


def pack(outputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The npz entries of one row: enough to see where a difference lies, small enough to commit."""
    entries: dict[str, np.ndarray] = {}
    for name, array in outputs.items():
        flat = array.reshape(-1)
        entries[f"{name}.shape"] = np.array(array.shape, np.int64)
        entries[f"{name}.dtype"] = np.array(array.dtype.name)
        entries[f"{name}.sha256"] = np.array(sha256(array))
        if flat.size <= FULL:
            entries[f"{name}.full"] = array
        else:
            step = max(1, flat.size // 512) | 1
            entries[f"{name}.step"] = np.array(step)
            entries[f"{name}.sample"] = flat[::step][:512]
            entries[f"{name}.first64"], entries[f"{name}.last64"] = flat[:64], flat[-64:]
    return entries


def load_input(folder: Path, name: str, row: dict[str, Any]) -> Any:
    """What the processor is given for a row. Raises FileNotFoundError when an image is missing."""
    images = folder / "images"
    if name.endswith(".viapath"):
        path = images / name.removesuffix(".viapath")
        if not path.is_file():
            raise FileNotFoundError(path)
        return str(path)
    if "images" in row:
        opened = [PIL.Image.open(images / image) for image in row["images"]]
        return [opened] if name.startswith("nested") else opened
    return PIL.Image.open(images / name)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
