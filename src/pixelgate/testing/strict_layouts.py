"""How each family's tensors lie in a request, and what they say of the prompt.

The arithmetic is that of the models in vLLM, on the tensors that arrived; nothing of it is shared with the code that is
tested with it.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import CheckpointError

Shape = tuple[int | None, ...]
Runs = list[tuple[bool, int]]
"""A span: whether it receives embeddings, and for how many tokens in a row."""


class Refused(Exception):
    """The request breaks a rule; the message says which."""


@dataclass(frozen=True)
class Small:
    """A tensor besides the pixels: its shape for one image, None for any length; ``cpu``: it is read on the host."""

    shape: Shape
    dtype: str = "int64"
    cpu: bool = True


@dataclass(frozen=True)
class Layout(ABC):
    """``pixels`` is the shape of an image's pixels, or of a row of them where the images lie one after the other.

    In that case ``sizes`` names the tensor with each image's rows.
    """

    pixels: Shape
    small: Mapping[str, Small] = field(default_factory=dict)
    sizes: str | None = None
    key: str = "pixel_values"

    @abstractmethod
    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """The span of every image, from the shape of all pixels and the other tensors. Raises Refused."""


@dataclass(frozen=True)
class Patches(Layout):
    """Qwen: patches in rows, merged to tokens."""

    merge: int = 2

    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """As many tokens as merged patches."""
        grids, sizes = small["image_grid_thw"], small["patches_per_image"]
        for (t, h, w), size in zip(grids.tolist(), sizes.tolist(), strict=True):
            need(t == 1 and h > 0 and w > 0, f"the grid {t}x{h}x{w} is not that of an image")
            need(h % self.merge == 0 and w % self.merge == 0, f"the grid {t}x{h}x{w} cannot be merged")
            need(size == t * h * w, f"patches_per_image {size} is not the product of the grid {t}x{h}x{w}")
        return [[(True, size // self.merge**2)] for size in sizes.tolist()]


def patches(patch: int, merge: int = 2, temporal: int = 2) -> Patches:
    """Qwen's layout for patches of ``patch`` pixels."""
    small = {"image_grid_thw": Small((3,)), "patches_per_image": Small((), cpu=False)}
    return Patches((3 * temporal * patch**2,), small, "patches_per_image", merge=merge)


@dataclass(frozen=True)
class Crop(Layout):
    """LLaVA 1.5: one tile, always as many tokens."""

    tokens: int = 0

    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """The same for every image."""
        return [[(True, self.tokens)]] * pixels[0]


@dataclass(frozen=True)
class AnyRes(Layout):
    """LLaVA-NeXT and LLaVA-OneVision: a base tile and tiles of the best canvas, without what was padded."""

    tile: int = 0
    grid: int = 0
    base: int = 0
    canvases: tuple[tuple[int, int], ...] = ()
    most_tiles: float = math.inf

    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """By the original size of each image."""
        found: list[Runs] = []
        for height, width in small["image_sizes"].tolist():
            need(height > 0 and width > 0, f"image_sizes has {height}x{width}")
            canvas = max(self.canvases, key=lambda size: self._fit(height, width, size))
            rows, columns = canvas[0] // self.tile, canvas[1] // self.tile
            need(
                pixels[1] > rows * columns,
                f"{pixels[1]} tiles are too few for {height}x{width} on {canvas[0]}x{canvas[1]}",
            )
            found.append([(True, self.base + self._kept(height, width, rows * self.grid, columns * self.grid))])
        return found

    @staticmethod
    def _fit(height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        return effective, effective - canvas[0] * canvas[1]

    def _kept(self, height: int, width: int, rows: int, columns: int) -> int:
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.most_tiles * self.grid**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows


@dataclass(frozen=True)
class Rows(Layout):
    """Pixtral and Mistral 3: rows of patches, each with a token behind it."""

    patch: int = 0

    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """By the size of the pixels, which all images of a request share."""
        height, width = pixels[2:]
        whole = height % self.patch == 0 and width % self.patch == 0
        need(whole, f"pixels of {height}x{width} are no whole patches of {self.patch}")
        return [[(True, width // self.patch), (False, 1)] * (height // self.patch)] * pixels[0]


@dataclass(frozen=True)
class Tiles(Layout):
    """Llama 4: tiles in rows, then the whole image in one, with tokens around and between."""

    tokens: int = 0

    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """By the rows and columns of tiles."""
        found: list[Runs] = []
        for (rows, columns), count in zip(
            small["aspect_ratios"].tolist(), small["patches_per_image"].tolist(), strict=True
        ):
            several = rows * columns > 1
            need(count == rows * columns + several, f"{count} tiles are not those of a canvas of {rows}x{columns}")
            # a separator or an end stands behind every tile
            tile = (True, self.tokens)
            tiled = [tile, (False, 1)] * (rows * columns * several)
            found.append([(False, 1), *tiled, (False, 1), tile, (False, 1)])
        return found


@dataclass(frozen=True)
class Phi3(Layout):
    """Phi-3-vision: tiles of 12x12 tokens, a token behind every row and one between the two views."""

    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """By the size of each image's canvas."""
        found: list[Runs] = []
        for height, width in small["image_sizes"].tolist():
            need(height > 0 and height % 336 == 0 and width > 0 and width % 336 == 0, f"a canvas of {height}x{width}")
            rows, columns = height // 336, width // 336
            need(pixels[1] > rows * columns, f"{pixels[1]} tiles are too few for a canvas of {height}x{width}")
            found.append([(True, 12 * rows * (12 * columns + 1) + 1 + 12 * 13)])
        return found


@dataclass(frozen=True)
class Phi4(Layout):
    """Phi-4-multimodal: what the attention mask keeps of tiles of 16x16 tokens, and a token behind every row."""

    tile: int = 448

    def runs(self, pixels: Sequence[int], small: Mapping[str, NDArray[Any]]) -> list[Runs]:
        """By the masks of each image's tiles."""
        found: list[Runs] = []
        masks = small["image_attention_mask"]
        need(masks.shape[1] == pixels[1], f"{masks.shape[1]} masks for {pixels[1]} tiles")
        for mask, size, count in zip(
            masks, small["image_sizes"].tolist(), small["num_img_tokens"].tolist(), strict=True
        ):
            rows, columns = (side // self.tile for side in size)
            need(rows > 0 and columns > 0, f"a canvas of {size[0]}x{size[1]}")
            need(len(mask) > rows * columns, f"{len(mask)} tiles are too few for a canvas of {size[0]}x{size[1]}")
            half = mask[1 : 1 + rows * columns, ::2, ::2].reshape(rows, columns, 16, 16).transpose(0, 2, 1, 3)
            kept = half.reshape(rows * 16, columns * 16)
            tokens = 16 * 17 + 1 + int(kept.sum()) + int(kept[:, 0].sum())
            need(count == tokens, f"num_img_tokens is {count}, but the mask keeps {tokens}")
            found.append([(True, tokens)])
        return found


_SIZES = {"image_sizes": Small((2,))}


def layout(config: Mapping[str, Any], image_processor: Mapping[str, Any], processor: Mapping[str, Any]) -> Layout:
    """The layout of a checkpoint, by its configuration files. Raises CheckpointError."""
    kind, vision = config.get("model_type"), config.get("vision_config", {})
    try:
        if "Pixtral" in str(image_processor.get("image_processor_type")):
            patch = processor["patch_size"] * processor.get("spatial_merge_size", 1)
            return Rows((3, None, None), patch=patch)
        match kind:
            case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl":
                names = ("patch_size", "merge_size", "temporal_patch_size")
                return patches(*(image_processor[name] for name in names))
            case "llava":
                side, grid = vision["image_size"], vision["image_size"] // vision["patch_size"]
                return Crop((3, side, side), tokens=grid**2 + (config["vision_feature_select_strategy"] == "full"))
            case "llava_next" | "llava_onevision":
                side, grid = vision["image_size"], vision["image_size"] // vision["patch_size"]
                canvases = tuple((height, width) for height, width in image_processor["image_grid_pinpoints"])
                most = int(processor["vision_aspect_ratio"].split("_")[-1]) if kind == "llava_onevision" else math.inf
                common = {"tile": side, "grid": grid, "base": grid**2, "canvases": canvases, "most_tiles": most}
                return AnyRes((None, 3, side, side), _SIZES, **common)
            case "llama4":
                side = vision["image_size"]
                small = {"patches_per_image": Small(()), "aspect_ratios": Small((2,))}
                return Tiles(
                    (3, side, side), small, "patches_per_image", tokens=(side // vision["patch_size"]) ** 2 // 4
                )
            case "phi3_v":
                return Phi3((image_processor["num_crops"] + 1, 3, 336, 336), _SIZES)
            case "phi4mm" | "phi4_multimodal":
                key = "input_image_embeds" if kind == "phi4mm" else "image_pixel_values"
                mask = Small((None, 32, 32), "float32", cpu=False)
                small = {**_SIZES, "image_attention_mask": mask, "num_img_tokens": Small(())}
                return Phi4((None, 3, 448, 448), small, key=key)
    except KeyError as missing:
        raise CheckpointError(f"The checkpoint does not say its {missing.args[0]}.") from None
    raise CheckpointError(f"There are no rules for model_type {kind!r}.")


def need(condition: Any, otherwise: str) -> None:
    """Raise Refused unless ``condition``."""
    if not condition:
        raise Refused(otherwise)


def read(directory: Path, name: str, *, optional: bool = False) -> Mapping[str, Any]:
    """A JSON object of a checkpoint. Raises CheckpointError."""
    if optional and not (directory / name).is_file():
        return {}
    try:
        content = json.loads((directory / name).read_text())
    except (OSError, ValueError):
        raise CheckpointError(f"{directory / name} is missing or no JSON.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{directory / name} is no JSON object.")
    return content


def values(tensor: Any) -> NDArray[Any]:
    """The values of a tensor besides the pixels."""
    return np.frombuffer(tensor.inline, "<i8" if tensor.dtype == "int64" else "<f4").reshape(tensor.shape)
