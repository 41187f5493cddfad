"""The pictures and the chat requests that all sides are asked about: pixelgate, the engine itself, and transformers."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "llava_next", "pixtral", "mistral3")
WITH_MASKS = ("pixtral", "mistral3")  # some tokens of a picture of theirs have no embedding
ANSWER = 16  # tokens

# pictures (and texts) of a user's message, by name
CHATS: dict[str, tuple[str, ...]] = {
    "no picture": ("Is there a picture?",),
    "one picture": ("@scene", "Describe the image."),
    "another picture": ("@turned", "Describe the image."),
    "text first": ("Look: ", "@wide", "and say what it is."),
    "two of one size": ("@scene", "or", "@turned", "?"),
    "two of different size": ("@scene", "or", "@wide", "?"),
    "the same twice": ("@scene", "@scene", "Is there a difference?"),
}
DIFFERENT = "two of different size"


def pictures() -> dict[str, bytes]:
    """PNG files, the same on every run."""
    noise = np.random.default_rng(7)
    scene = np.zeros((210, 300, 3), np.uint8)
    scene[..., 0] = np.linspace(10, 240, 300)
    scene[..., 1] = np.linspace(250, 0, 210)[:, None]
    scene[..., 2] = noise.integers(0, 80, (210, 300))
    scene[70:160, 40:130] = (30, 40, 220)
    wide = noise.integers(0, 256, (10, 33, 3), np.uint8).repeat(10, 0).repeat(10, 1)
    return {"scene": _png(scene), "turned": _png(scene[::-1, ::-1]), "wide": _png(wide)}


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(file, "PNG")
    return file.getvalue()


PICTURES = pictures()


def named(chat: Sequence[str]) -> list[str]:
    """The names of the pictures of a chat."""
    return [part[1:] for part in chat if part.startswith("@")]


def messages(chat: Sequence[str]) -> list[dict[str, object]]:
    """A chat in OpenAI's form."""
    content: list[dict[str, object]] = []
    for part in chat:
        if part.startswith("@"):
            url = "data:image/png;base64," + base64.b64encode(PICTURES[part[1:]]).decode()
            content.append({"type": "image_url", "image_url": {"url": url}})
        else:
            content.append({"type": "text", "text": part})
    return [{"role": "user", "content": content}]
