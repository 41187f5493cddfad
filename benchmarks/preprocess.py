"""JPEG bytes to the float32 tensor of Qwen2.5-VL, one thread: pixelgate's levels against transformers, paired.

    python benchmarks/preprocess.py [--rounds N]

All contenders take turns in every round of one process, so that a busy machine is busy for all of them. A figure is the
smallest of its rounds: processor seconds of this thread, and wall-clock seconds. Results are compared on bytes first.
A contender whose package or instruction set is missing is printed as "not run".
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import platform
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
from pictures import photo

import pixelgate
from pixelgate.pixels import binding
from pixelgate.pixels.plan import execute

CHECKPOINT = Path(__file__).parents[1] / "tests" / "goldens" / "checkpoints" / "qwen2_5_vl"
SIZES = {"640x480": (480, 640), "1920x1080": (1080, 1920), "4000x3000": (3000, 4000)}
BACKENDS = ("torchvision", "pil")
Contender = Callable[[bytes], np.ndarray]


def ours(backend: str, level: str) -> Contender:
    processor = pixelgate.load(CHECKPOINT, backend=backend)
    reused: dict[tuple[int, ...], np.ndarray] = {}

    def run(data: bytes) -> np.ndarray:
        image = processor.rgb(data)
        plan = processor.plan(height=image.shape[0], width=image.shape[1])
        out = reused.setdefault(plan.shape, np.empty(plan.shape, np.float32))
        return execute(plan, image, out, level=level)

    return run


def transformers_peer(backend: str) -> Contender:
    """transformers with a picture opened by Pillow, as its users do."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    torch.set_num_threads(1)
    checkpoint = pixelgate.load(CHECKPOINT).checkpoint
    cls = Qwen2VLImageProcessorPil if backend == "pil" else Qwen2VLImageProcessor
    processor = cls(**{k: v for k, v in checkpoint.preprocessor.items() if not k.endswith(("_type", "_class"))})

    def run(data: bytes) -> np.ndarray:
        image = PIL.Image.open(io.BytesIO(data))
        return processor(image, return_tensors="pt")["pixel_values"].numpy()

    return run


def contenders(backend: str) -> dict[str, Contender | None]:
    found: dict[str, Contender | None] = {}
    try:
        found[f"transformers {backend}"] = transformers_peer(backend)
    except ImportError:
        found[f"transformers {backend}"] = None
    for level in binding.LEVELS:
        found[f"pixelgate {level}"] = ours(backend, level) if level in binding.available_levels() else None
    return found


def measure(runs: dict[str, Contender], data: bytes, rounds: int) -> dict[str, tuple[float, float]]:
    """Smallest (processor, wall-clock) seconds of each, after a first run that is compared on bytes."""
    results = {name: run(data).copy() for name, run in runs.items()}
    first = next(iter(results.values()))
    for name, result in results.items():
        if result.tobytes() != first.tobytes():
            raise SystemExit(f"{name} does not equal {next(iter(results))}: nothing is measured")
    best = dict.fromkeys(runs, (float("inf"), float("inf")))
    for _ in range(rounds):
        for name, run in runs.items():
            cpu, wall = time.thread_time(), time.perf_counter()
            run(data)
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
            best[name] = (min(best[name][0], cpu), min(best[name][1], wall))
    return best


def versions() -> str:
    names = ("pixelgate", "numpy", "pillow", "transformers", "torch", "torchvision")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    print(f"{platform.machine()}, levels {', '.join(binding.available_levels())}; {versions()}")
    print("smallest of the rounds, one thread; ratio: transformers' processor time over ours\n")
    print(f"{'picture':11s}{'contender':28s}{'cpu ms':>9s}{'wall ms':>9s}{'ratio':>8s}")
    for backend in BACKENDS:
        found = contenders(backend)
        runs = {name: run for name, run in found.items() if run is not None}
        peer = f"transformers {backend}"
        for size, (height, width) in SIZES.items():
            best = measure(runs, photo(height, width), max(3, rounds * 1080 * 1920 // max(height * width, 1080 * 1920)))
            for name in found:
                if name not in best:
                    print(f"{size:11s}{name:28s}{'not run':>18s}")
                    continue
                cpu, wall = best[name]
                ratio = f"{best[peer][0] / cpu:7.1f}x" if peer in best and name != peer else ""
                print(f"{size:11s}{name:28s}{cpu * 1e3:9.2f}{wall * 1e3:9.2f}{ratio}", flush=True)
        print()


if __name__ == "__main__":
    main()
