"""From encoded pictures to tensors, one thread: pixelgate's levels against named peers, paired.

    python benchmarks/preprocess.py [--rounds N] [--keep-memory]

All contenders take turns in every round of one process, so that a busy machine is busy for all of them. A figure is the
smallest processor time over the rounds. Results are compared on bytes before anything is timed.
README.md in this folder says what each table measures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import platform
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import peers
import PIL.Image
from peers import Contender
from pictures import photo, screenshot

import pixelgate
from pixelgate.media import fast
from pixelgate.pixels import binding
from pixelgate.pixels.kernels import Window
from pixelgate.pixels.plan import ImagePlan, Tiles, View, execute
from pixelgate.process import keep_memory

JPEGS = {"640x480": (480, 640), "1920x1080": (1080, 1920), "4000x3000": (3000, 4000)}
LEVELS = tuple(reversed(binding.LEVELS))
FAST = dict(fast.DECODERS)
Outputs = dict[tuple[int, ...], np.ndarray]
OUTPUTS: Outputs = {}


def use_fast_decoders(wanted: bool) -> None:
    fast.DECODERS.clear()
    fast.DECODERS.update(FAST if wanted else {})


def output(outputs: Outputs, shape: tuple[int, ...]) -> np.ndarray:
    """Memory that is used again."""
    if shape not in outputs:
        outputs[shape] = np.empty(shape, np.float32)
    return outputs[shape]


def ours(backend: str, level: str, *, fast_decoders: bool = False, outputs: Outputs = OUTPUTS) -> Contender:
    """The library from bytes to tensor, into memory that is used again."""
    processor = pixelgate.load(peers.CHECKPOINT, backend=backend)

    def run(data: bytes) -> np.ndarray:
        use_fast_decoders(fast_decoders)
        image = processor.rgb(data)
        plan = processor.plan(height=image.shape[0], width=image.shape[1])
        return execute(plan, image, output(outputs, plan.shape), level=level)

    return run


def floor(backend: str, *, fast_decoders: bool = False, outputs: Outputs = OUTPUTS) -> Contender:
    """What is left if resizing and normalising cost nothing: decode, and write as many bytes as the tensor has."""
    processor = pixelgate.load(peers.CHECKPOINT, backend=backend)

    def run(data: bytes) -> np.ndarray:
        use_fast_decoders(fast_decoders)
        image = processor.rgb(data)
        out = output(outputs, processor.plan(height=image.shape[0], width=image.shape[1]).shape)
        out.fill(0)
        return out

    return run


def available(make: Callable[[], Contender]) -> Contender | None:
    try:
        return make()
    except ImportError:
        return None


def measure(runs: dict[str, Callable[[], object]], rounds: int, *, repeat: int = 1) -> dict[str, float]:
    """Smallest processor milliseconds of each, called ``repeat`` times in each of its turns."""
    best = dict.fromkeys(runs, float("inf"))
    for number in range(rounds + 1):
        for name, run in runs.items():
            for _ in range(repeat):
                start = time.process_time()  # of all threads: one peer works on a thread of its own
                run()
                if number:  # the first round warms up
                    best[name] = min(best[name], (time.process_time() - start) * 1e3)
    return best


def require_equal(runs: dict[str, Contender], data: bytes) -> None:
    results = {name: run(data).tobytes() for name, run in runs.items()}
    first = next(iter(results))
    for name, result in results.items():
        if result != results[first]:
            raise SystemExit(f"{name} does not equal {first}: nothing is measured")


def ratio(peer: float | None, own: float) -> str:
    return f"{peer / own:9.1f}x" if peer is not None else f"{'not run':>10s}"


def against_peers(name: str, data: bytes, rounds: int, *, repeat: int = 1) -> None:
    """One picture: every level, and both kinds of decoders, against every peer."""
    rivals = {
        "torchvision": {
            "transformers torchvision": available(lambda: peers.transformers("torchvision")),
            "the same, own decoder": available(lambda: peers.transformers("torchvision", own_decoder=True)),
            "hf-processors-rs": available(lambda: peers.hf_processors_rs("torchvision")),
        },
        "pil": {"transformers pil": available(lambda: peers.transformers("pil"))},
    }
    runs: dict[str, Contender] = {}
    for backend, found in rivals.items():
        group = {rival: run for rival, run in found.items() if run is not None}
        for level in binding.available_levels():
            group[f"{level} {backend}"] = ours(backend, level)
        group[f"fast {backend}"] = ours(backend, binding.default_level(), fast_decoders=True)
        require_equal(group, data)
        group[f"floor {backend}"] = floor(backend)
        group[f"fast floor {backend}"] = floor(backend, fast_decoders=True)
        runs |= group
    best = measure({key: partial(run, data) for key, run in runs.items()}, rounds, repeat=repeat)
    for rival in (*rivals["torchvision"], *rivals["pil"]):
        figure = f"{best[rival]:9.2f}" if rival in best else f"{'not run':>9s}"
        print(f"{name:18s}{rival:38s}{figure}")
    own = [(level, f"pixelgate {level}") for level in LEVELS]
    own.append(("fast", f"pixelgate {binding.default_level()}, pixelgate[fast]"))
    own += [("floor", "decode and write alone"), ("fast floor", "decode and write alone, pixelgate[fast]")]
    for key, title in own:
        if f"{key} pil" not in best:
            print(f"{name:18s}{title:38s}{'not run':>9s}")
            continue
        torchvision, pil = best[f"{key} torchvision"], best[f"{key} pil"]
        print(f"{name:18s}{title:38s}{torchvision:9.2f}", end="")
        print(ratio(best.get("transformers pil"), pil), end="")
        for rival in rivals["torchvision"]:
            print(ratio(best.get(rival), torchvision), end="")
        print(flush=True)


def crop_against_decode(rounds: int) -> None:
    """12 megapixels to LLaVA's 336x336 crop, over decoding alone."""
    data = photo(3000, 4000)
    affine = pixelgate.load(peers.CHECKPOINT).family.steps.affine
    resample = pixelgate.load(peers.CHECKPOINT).family.steps.resample
    view = View((336, 448), resample, crop=Window(0, 56, 336, 336))
    plan = ImagePlan(3000, 4000, (view,), Tiles(), affine, tokens=576)
    out = np.empty(plan.shape, np.float32)
    processor = pixelgate.load(peers.CHECKPOINT)

    def decode() -> object:
        image = PIL.Image.open(io.BytesIO(data))
        return image.load()

    use_fast_decoders(False)
    runs: dict[str, Callable[[], object]] = {"decode": decode}
    for level in binding.available_levels():
        runs[level] = lambda level=level: execute(plan, processor.rgb(data), out, level=level)
    best = measure(runs, rounds)
    for level in binding.available_levels():
        share = best[level] / best["decode"]
        print(f"4000x3000 to LLaVA's 336, {level:9s} {best[level]:8.2f} ms, {share:.2f} of decoding alone")


def after_decode(rounds: int) -> None:
    """Nanoseconds per output pixel, from the decoded picture to the tensor, output used again."""
    use_fast_decoders(False)
    for name, (height, width) in JPEGS.items():
        for backend in ("torchvision", "pil"):
            processor = pixelgate.load(peers.CHECKPOINT, backend=backend)
            image = processor.rgb(photo(height, width))
            plan = processor.plan(height=height, width=width)
            out = np.empty(plan.shape, np.float32)
            levels = binding.available_levels()
            best = measure({level: partial(execute, plan, image, out, level=level) for level in levels}, rounds)
            new_height, new_width = plan.views[0].resize
            for level, milliseconds in best.items():
                each = milliseconds * 1e6 / (new_height * new_width)
                print(f"after decoding, {name:10s} {backend:12s} {level:9s} {each:6.2f} ns per output pixel")


def two_threads(rounds: int) -> None:
    """Pictures per second of two threads over one; wall clock, so only meaningful on two idle cores.

    Beside it what the machine gives: two threads that only decode and write, and two that only write.
    """
    PIL.Image.core.set_blocks_max(2)  # one for each thread
    data = photo(1080, 1920)
    level = binding.default_level()
    memories: tuple[Outputs, Outputs] = ({}, {})
    kinds: dict[str, list[Callable[[], object]]] = {
        f"pixelgate {level}": [partial(ours("torchvision", level, outputs=memory), data) for memory in memories],
        "decode and write alone": [partial(floor("torchvision", outputs=memory), data) for memory in memories],
    }
    for run in kinds[f"pixelgate {level}"]:
        run()
    kinds["write alone"] = [partial(next(iter(memory.values())).fill, 0) for memory in memories]

    def timed(work: list[Callable[[], object]]) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(work)) as pool:
            list(pool.map(lambda run: [run() for _ in range(10)], work))
        return len(work) * 10 / (time.perf_counter() - start)

    best = {name: [0.0, 0.0] for name in kinds}
    for _ in range(rounds):
        for name, work in kinds.items():
            for number in (1, 2):
                best[name][number - 1] = max(best[name][number - 1], timed(work[:number]))
    for name, (one, two) in best.items():
        print(f"two threads, {name:24s}{two / one:5.2f} of one ({one:.0f} and {two:.0f} of 1920x1080 a second)")


def versions() -> str:
    found = []
    for name in ("pixelgate", "numpy", "pillow", "transformers", "torch", "torchvision", "hf-processors-rs"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join((*found, *fast.VERSIONS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep-memory", action="store_true", help="malloc keeps freed memory, for the peers as well")
    arguments = parser.parse_args()
    rounds = arguments.rounds
    warnings.simplefilter("ignore")
    PIL.Image.core.set_block_size(64 << 20)
    PIL.Image.core.set_blocks_max(1)
    if arguments.keep_memory:
        keep_memory()
    print(f"{platform.machine()}, levels {', '.join(binding.available_levels())}\n{versions()}\n")
    print(
        f"{'picture':18s}{'contender':38s}{'cpu ms':>9s}{'tf pil':>10s}{'tf tv':>10s}{'tf tv own':>10s}{'hf-p-rs':>10s}"
    )
    for name, (height, width) in JPEGS.items():
        megapixels = height * width / 1e6
        turns = max(4, rounds if megapixels < 3 else rounds // 3)
        # a small picture is over before the caches have forgotten the contender before it
        against_peers(f"{name} JPEG", photo(height, width), turns, repeat=6 if megapixels < 1 else 1)
    against_peers("1920x1080 PNG", screenshot(1080, 1920), rounds)
    print()
    crop_against_decode(rounds)
    print()
    after_decode(rounds)
    print()
    two_threads(5)


if __name__ == "__main__":
    main()
