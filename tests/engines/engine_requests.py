"""Requests for a small Qwen-like model, as the gateway would build them."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import socket
from dataclasses import replace

import ml_dtypes
import numpy as np

from pixelgate.engines.engine import EngineRequest, Images, Sampling, Span
from pixelgate.pixels.tensor import Tensor
from pixelgate.testing.strict_layouts import patches
from pixelgate.testing.strict_rules import StrictFacts

PAD, START, END = 900, 901, 902
DTYPES = {"uint8": np.uint8, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
FACTS = StrictFacts(
    model_type="qwen2_5_vl",
    vocab_size=1000,
    image_token_id=PAD,
    layout=patches(2),
    eos_token_ids=(999,),
    device_normalize=True,
    max_context=512,
    max_images=3,
    max_embeddings_per_image=30,
)
BFLOAT16 = replace(FACTS, device_normalize=False)


def picture(grid, dtype="uint8", seed=0):
    """Rows of patches for a grid of (height, width) patches; exact in every dtype."""
    values = np.random.default_rng(seed).integers(0, 256, (grid[0] * grid[1], FACTS.layout.pixels[0]), np.uint8)
    return values if dtype == "uint8" else (values.astype(np.float32) / 16 - 8).astype(DTYPES[dtype])


def identity(*arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def images(grids=((4, 4), (2, 6)), dtype="uint8", first_span=2):
    parts = tuple(picture(grid, dtype, seed) for seed, grid in enumerate(grids))
    spans, offset = [], first_span
    for height, width in grids:
        spans.append(Span(offset, height * width // 4))
        offset += height * width // 4 + 2
    grid_parts = tuple(np.array([[1, *grid]], np.int64) for grid in grids)
    size_parts = tuple(np.array([height * width], np.int64) for height, width in grids)
    return Images(
        tensors=(
            Tensor("pixel_values", dtype, parts, "flat", sizes="patches_per_image"),
            Tensor("image_grid_thw", "int64", grid_parts, "batched", keep_on_cpu=True),
            Tensor("patches_per_image", "int64", size_parts, "batched"),
        ),
        spans=tuple(spans),
        hashes=tuple(identity(*both) for both in zip(grid_parts, parts, strict=True)),
        placeholder_id=PAD,
        plans=(),
    )


def prompt(pictures):
    """Token ids around the spans of ``pictures``: start, placeholders, end for each."""
    ids = [5]
    for span in pictures.spans:
        ids += [START, *[PAD] * span.length, END]
    return (*ids, 6, 7)


def request(dtype=None, *, request_id="r-1", stream=True, grids=((4, 4), (2, 6)), **sampling):
    """A text request, or with ``dtype`` one with pictures."""
    sampling = Sampling(**{"temperature": 0.0, "max_tokens": 64, **sampling})
    if dtype is None:
        return EngineRequest(request_id, (5, 6, 7), sampling, stream=stream)
    pictures = images(grids, dtype)
    return EngineRequest(request_id, prompt(pictures), sampling, pictures, stream)


async def answer(engine, sent):
    return [delta async for delta in engine.generate(sent)]


async def until(condition):
    """Wait for a condition, a function that may be a coroutine's, for at most about five seconds."""
    for _ in range(500):
        met = condition()
        if await met if inspect.isawaitable(met) else met:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition was not met in time")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]
