"""Image processors that live in checkpoints' own code, restated with the library calls they make.

Phi-3-vision and Phi-3.5-vision (``image_processing_phi3_v.py``) and Phi-4-multimodal (``processing_phi4mm.py``): Pillow
resizes, torchvision's ToTensor and Normalize, torch's bicubic interpolation. Needs torch and torchvision.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import functional
from transformers.image_transforms import convert_to_rgb


def _normalised(image: Image.Image, mean: list[float], std: list[float]) -> torch.Tensor:
    return functional.normalize(functional.to_tensor(image), mean, std)


def _tiles(image: torch.Tensor, side: int) -> torch.Tensor:
    """The whole in one tile, then [n, 3, side, side] row by row."""
    whole = torch.nn.functional.interpolate(image[None].float(), (side, side), mode="bicubic").to(image.dtype)
    cut = image.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4).reshape(-1, 3, side, side)
    return torch.cat([whole, cut])


def _filled(tiles: torch.Tensor, most: int, value: float = 0.0) -> torch.Tensor:
    gap = torch.full((most - len(tiles), *tiles.shape[1:]), value, dtype=tiles.dtype)
    return torch.cat([tiles, gap])


class Phi3V:
    """``Phi3VImageProcessor``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.mean, self.std, self.crops = config["image_mean"], config["image_std"], config["num_crops"]

    def _transformed(self, image: Image.Image) -> Image.Image:
        upright = image.width < image.height
        if upright:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio = image.width / image.height
        scale = 1
        while scale * np.ceil(scale / ratio) <= self.crops:
            scale += 1
        scale -= 1
        width = int(scale * 336)
        height = int(width / ratio)
        image = functional.resize(image, [height, width])  # bilinear is its default
        target = int(np.ceil(height / 336) * 336)
        top = int((target - height) / 2)
        image = functional.pad(image, [0, top, 0, target - height - top], fill=[255, 255, 255])
        return image.transpose(Image.Transpose.TRANSPOSE) if upright else image

    def __call__(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        pixels, sizes, tokens = [], [], []
        for given in images:
            image = _normalised(self._transformed(convert_to_rgb(given)), self.mean, self.std)
            height, width = image.shape[1:]
            pixels.append(_filled(_tiles(image, 336), self.crops + 1))
            sizes.append([height, width])
            tokens.append((height // 336 * (width // 336) + 1) * 144 + 1 + (height // 336 + 1) * 12)
        return {
            "pixel_values": torch.stack(pixels),
            "image_sizes": torch.tensor(sizes),
            "num_img_tokens": torch.tensor(tokens),
        }


class Phi4MM:
    """``Phi4MMImageProcessor``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.most = config["dynamic_hd"]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        columns, rows = math.ceil(width / 448.0), math.ceil(height / 448.0)
        if columns * rows <= self.most:
            return columns, rows
        numbers = range(1, self.most + 1)
        every = {(i, j) for n in numbers for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= self.most}
        best, least = (1, 1), float("inf")
        for ratio in sorted(every, key=lambda r: r[0] * r[1]):
            off = abs(width / height - ratio[0] / ratio[1])
            if off < least:
                best, least = ratio, off
            elif off == least and width * height > 0.5 * 448 * 448 * ratio[0] * ratio[1]:
                best = ratio
        return best

    def _one(self, given: Image.Image) -> tuple[torch.Tensor, torch.Tensor, list[int], int]:
        image = given.convert("RGB")
        columns, rows = self._grid(*image.size)
        across, down = columns * 448 / image.width, rows * 448 / image.height
        if across < down:
            width, height = columns * 448, int(image.height * across)
        else:
            width, height = int(image.width * down), rows * 448
        right, below = columns * 448 - width, rows * 448 - height
        mask = torch.ones(rows * 32, columns * 32)
        if right >= 14:
            mask[:, -(right // 14) :] = 0
        if below >= 14:
            mask[-(below // 14) :, :] = 0
        if min(width, height) < 10:
            raise ValueError(f"the aspect ratio is very extreme {(width, height)}")
        image = functional.pad(functional.resize(image, [height, width]), [0, 0, right, below], fill=[255, 255, 255])
        tiles = _tiles(_normalised(image, [0.5] * 3, [0.5] * 3), 448)
        masks = mask.reshape(rows, 32, columns, 32).transpose(1, 2).reshape(-1, 32, 32)
        kept = mask[::2, ::2]
        tokens = 256 + 1 + int(kept.sum()) + int(kept[:, 0].sum()) + 16
        return tiles, torch.cat([torch.ones(1, 32, 32), masks]), [rows * 448, columns * 448], tokens

    def __call__(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        tiles, masks, sizes, tokens = zip(*[self._one(image) for image in images], strict=True)
        most = max(map(len, tiles))
        return {
            "input_image_embeds": torch.stack([_filled(t, most) for t in tiles]),
            "image_sizes": torch.tensor(sizes),
            "image_attention_mask": torch.stack([_filled(m, most, 1.0) for m in masks]),
            "num_img_tokens": torch.tensor(tokens),
        }


PROCESSORS = {"Phi3VImageProcessor": Phi3V, "Phi4MMImageProcessor": Phi4MM}
