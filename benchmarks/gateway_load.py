"""The gateway against smg 1.13.0, a peer in Rust: processor time, memory and latency of a request, on loopback.

    python benchmarks/gateway_load.py --smg .venv/smg [--rounds 3] [--only 1080p] [--serve-args='--workers 2']

Both stand in front of the same engine stand-in and get the same requests in alternating order (A B B A); see README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL.Image
from contenders import Contender, Engine, Setup, decoder_of, engine_for, pixelgate, smg
from load import Outcome, body, drive
from pictures import photo
from processes import available_memory, cpu_seconds, forget_peaks, memory

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from goldens.tokenizers_of import complete

VGA, FULL_HD, TWELVE = (480, 640), (1080, 1920), (3000, 4000)
WARM_UP = 4  # requests of a gateway, once a row
REQUESTS = {(): 400, VGA: 48, FULL_HD: 20, TWELVE: 5}  # of a measurement, by the size of the pictures


@dataclass(frozen=True)
class Row:
    """A case. ``size`` is (height, width), () for text alone; ``again``: the same picture in every request."""

    title: str
    dtype: str
    size: tuple[int, ...] = ()
    concurrency: int = 1
    pictures: int = 1
    again: bool = False
    family: str = "qwen3_vl"
    runtime: str = "vllm"

    @property
    def requests(self) -> int:
        """Requests of one measurement, at least two for each client."""
        return max(REQUESTS[self.size] // self.pictures, 2 * self.concurrency)


def _pictures_in(dtype: str) -> Iterator[Row]:
    yield Row(f"640x480 {dtype}", dtype, VGA)
    yield Row(f"640x480 {dtype}, c=16", dtype, VGA, 16)
    yield Row(f"4 of 640x480 {dtype}", dtype, VGA, pictures=4)
    yield Row(f"1920x1080 {dtype}", dtype, FULL_HD)
    yield Row(f"1920x1080 {dtype}, c=16", dtype, FULL_HD, 16)
    yield Row(f"4000x3000 {dtype}", dtype, TWELVE)


ROWS = [
    Row("text", "uint8"),
    Row("text, c=16", "uint8", concurrency=16),
    *_pictures_in("uint8"),
    *_pictures_in("bfloat16"),
    Row("1920x1080 uint8, again", "uint8", FULL_HD, again=True),
    Row("1920x1080 LLaVA 1.5 bfloat16", "bfloat16", FULL_HD, family="llava15_clip"),
    Row("1920x1080 LLaVA-NeXT float32, SGLang", "float32", FULL_HD, family="llava_next", runtime="sglang"),
]
NAMES = {"qwen3_vl": "qwen3-vl", "llava15_clip": "llava-1.5-7b-hf", "llava_next": "llava-v1.6-mistral-7b-hf"}


@dataclass
class Measured:
    """One gateway's figures in a row, one entry a round: processor seconds a request, and latencies."""

    cpu: list[float] = field(default_factory=list)
    peak: int = 0
    all: Outcome = field(default_factory=Outcome)


class Photos:
    """Photos of one size that all differ: one scene, moved by whole blocks, encoded anew, so they cost the same."""

    def __init__(self) -> None:
        self._scenes: dict[tuple[int, ...], np.ndarray] = {}
        self._taken = 0

    def take(self, size: tuple[int, ...], count: int) -> list[bytes]:
        """``count`` of (height, width) that were never taken before."""
        if size not in self._scenes:
            with PIL.Image.open(io.BytesIO(photo(*size))) as scene:
                self._scenes[size] = np.asarray(scene)
        return [self._next(self._scenes[size]) for _ in range(count)]

    def _next(self, scene: np.ndarray) -> bytes:
        self._taken += 1
        down, right = divmod(self._taken, scene.shape[1] // 8)
        file = io.BytesIO()
        PIL.Image.fromarray(np.roll(scene, (8 * down, 8 * right), (0, 1))).save(file, "JPEG", quality=85)
        return file.getvalue()


def bodies(row: Row, model: str, photos: Photos, count: int) -> list[bytes]:
    """The requests of one measurement."""
    if not row.size:
        return [body(model, [])] * count
    if row.again:
        return [body(model, photos.take(row.size, row.pictures))] * count
    return [body(model, photos.take(row.size, row.pictures)) for _ in range(count)]


async def measure(row: Row, contender: Contender, requests: list[bytes], into: Measured) -> float:
    """Processor seconds of all ``requests``."""
    before = cpu_seconds(contender.pid)
    outcome = await drive(contender.url, requests, row.concurrency)
    spent = cpu_seconds(contender.pid) - before
    into.all.seconds += outcome.seconds
    into.all.errors += outcome.errors
    return spent


async def compare(row: Row, sides: list[Contender], rounds: int, photos: Photos, model: str) -> list[Measured]:
    """A B B A, ``rounds`` times. No picture is seen twice by a side, unless the row is about that."""
    found = [Measured() for _ in sides]
    kept = bodies(row, model, photos, row.requests) if row.again else None
    for side in sides:
        await drive(side.url, bodies(row, model, photos, WARM_UP) if kept is None else kept[:WARM_UP], 1)
        forget_peaks(side.pid)
    for _ in range(rounds):
        spent = [0.0] * len(sides)
        for order in (range(len(sides)), reversed(range(len(sides)))):
            requests = kept or await asyncio.to_thread(bodies, row, model, photos, row.requests)
            for i in order:
                spent[i] += await measure(row, sides[i], requests, found[i])
        for each, seconds in zip(found, spent, strict=True):
            each.cpu.append(seconds / (2 * row.requests))
    for each, side in zip(found, sides, strict=True):
        each.peak = memory(side.pid)
    return found


async def sent(row: Row, sides: list[Contender], engine: Engine, photos: Photos, model: str) -> str:
    """What the sides send for one request: whether it is the same."""
    [request] = bodies(row, model, photos, 1)
    told = []
    for side in sides:
        outcome = await drive(side.url, [request], 1)
        if outcome.errors:
            return f"{side.name} refuses: {next(iter(outcome.errors))}"
        told.append(await engine.told())
    if len(told) < 2:
        return ""
    ours, theirs = told
    tensors = [each["tensors"].get("pixel_values") for each in told]
    words = [] if tensors[0] == tensors[1] else [f"pixels differ ({_shape(tensors[0])}, {_shape(tensors[1])})"]
    if ours["ids"] != theirs["ids"]:
        words.append(f"prompts differ ({ours['tokens']} and {theirs['tokens']} tokens)")
    return ", ".join(words) or "the same"


def _shape(tensor: list | None) -> str:
    return "none" if tensor is None else f"{tensor[0]} {'x'.join(map(str, tensor[1]))}"


@asynccontextmanager
async def standing(row: Row, setup: Setup, folder: Path) -> AsyncIterator[tuple[Engine, list[Contender]]]:
    """An engine for the row, and both gateways, begun anew for each row so that none has another row's memory."""
    async with (
        engine_for(row.runtime, folder, row.dtype) as engine,
        pixelgate(setup, engine, folder.parent) as ours,
        smg(setup, engine, folder.parent) as theirs,
    ):
        yield engine, [ours, theirs]


def show(row: Row, sides: list[Contender], found: dict[str, Measured], note: str) -> None:
    """A line for each side, and the ratio of ours to theirs."""
    for side in sides:
        if side.missing:
            print(f"{row.title:38} {side.name:10} not run: {side.missing}")
            continue
        measured = found[side.name]
        if not measured.all.seconds:
            print(
                f"{row.title:38} {side.name:10} not run: {next(iter(measured.all.errors), 'no request was answered')}"
            )
            continue
        cpu, seconds = 1000 * statistics.median(measured.cpu), measured.all
        line = f"{row.title:38} {side.name:10} {cpu:8.2f} {1000 * seconds.median:9.1f} {1000 * seconds.at(0.99):9.1f}"
        print(f"{line} {measured.peak / (1 << 20):9.0f} {_ratio(side, found)}  {note}")
        if seconds.errors:
            print(f"{'':38} {dict(seconds.errors)}")
    sys.stdout.flush()


def _ratio(side: Contender, found: dict[str, Measured]) -> str:
    if side.name != "pixelgate" or "smg" not in found:
        return f"{'':18}"
    ratios = [ours / theirs for ours, theirs in zip(found["pixelgate"].cpu, found["smg"].cpu, strict=True) if theirs]
    return f"{statistics.median(ratios):5.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else f"{'':18}"


async def run(row: Row, setup: Setup, checkpoint: Path | None, rounds: int, photos: Photos) -> bool:
    """Measure and print a row. Returns whether every request was answered."""
    with tempfile.TemporaryDirectory(prefix="gateway-load-") as scratch:
        folder = Path(scratch) / NAMES[row.family]
        if checkpoint and row.family == "qwen3_vl":
            shutil.copytree(checkpoint, folder)
        else:
            complete(row.family, folder)
        async with standing(row, setup, folder) as (engine, sides):
            up = [side for side in sides if not side.missing]
            note = await sent(row, up, engine, photos, folder.name)
            if "refuses" in note:
                print(f"{row.title:38} {'':10} not run: {note}")
                return False
            measured = await compare(row, up, rounds, photos, folder.name)
            found = dict(zip([side.name for side in up], measured, strict=True))
            show(row, sides, found, note)
            for side in up:
                if side.name == "smg" and row.size and (decoder := decoder_of(side)) != "libturbojpeg":
                    print(f"{'':38} smg decodes with {decoder}")
            return not any(each.all.errors for each in measured)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smg", type=Path, help="an environment with smg==1.13.0; without it only ours is measured")
    parser.add_argument(
        "--checkpoint", type=Path, help="a Qwen3-VL directory (default: the test suite's, made complete)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A (default: %(default)s)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="rows whose title has this; may be repeated")
    parser.add_argument("--serve-args", default="", help="further arguments of pixelgate serve, in one word")
    parser.add_argument("--smg-args", default="", help="further arguments of smg launch, in one word")
    arguments = parser.parse_args()
    setup = Setup(arguments.smg, shlex.split(arguments.serve_args), shlex.split(arguments.smg_args))
    photos, good = Photos(), True
    columns = f"{'CPU ms':>8} {'p50 ms':>9} {'p99 ms':>9} {'peak MiB':>9} {'CPU, ours / smg':18}  sent"
    print(f"{'per request':38} {'':10} {columns}")
    for row in ROWS:
        if not arguments.only or any(text in row.title for text in arguments.only):
            good &= await run(row, setup, arguments.checkpoint, arguments.rounds, photos)
    print(f"{available_memory() / (1 << 30):.1f} GiB of memory are left")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
