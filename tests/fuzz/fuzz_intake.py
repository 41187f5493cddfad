"""Damaged pictures through the whole intake, as a gateway takes them: from a data: URL to rows of pixels.

    python tests/fuzz/fuzz_intake.py [--files N | --seconds S] [--seed N] [--keep FOLDER]

Every picture must end in rows of the size that its header said, or in an error of our own with nothing of a library in
it, before the deadline; memory must not grow. A file that breaks this is kept in FOLDER, where "current" is the one
being worked on, should everything end with it. A decoder process that dies is counted, not an error: that is what it is
for. guided_intake.py beside this file looks for new ways through the code instead.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import faulthandler
import logging
import os
import random
import re
import sys
import time
import warnings
from pathlib import Path

from seeds import pictures

from pixelgate.errors import DecodeError, MediaError, TooLargeError
from pixelgate.media import decode, formats, source
from pixelgate.media.isolation import Isolation
from pixelgate.media.policy import MediaPolicy

POLICY = MediaPolicy(max_pixels=4_000_000, max_bytes=1 << 20, decode_timeout=5)
LEAK = re.compile(r"\b0x[0-9a-f]{4,}|object at|Traceback|Error\b|/usr|PIL|numpy|libtiff")
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


class Mutator:
    """Damages seeds; the same number gives the same files."""

    def __init__(self, seeds: list[bytes], number: int) -> None:
        self.seeds = seeds
        self.random = random.Random(number)

    def next(self) -> bytes:
        pick = self.random
        data = bytearray(pick.choice(self.seeds))
        for _ in range(pick.choice((1, 1, 1, 2, 3, 6))):
            pick.choice((self.flip, self.number, self.cut, self.splice, self.repeat, self.remove, self.blank))(data)
        return bytes(data)

    def place(self, data: bytearray) -> int:
        """Anywhere, but rather in the header."""
        size = len(data) or 1
        return self.random.randrange(min(size, self.random.choice((32, 128, 600, size, size))))

    def flip(self, data: bytearray) -> None:
        for _ in range(self.random.choice((1, 2, 8, 32)) if data else 0):
            data[self.place(data)] ^= 1 << self.random.randrange(8)

    def number(self, data: bytearray) -> None:
        at, width = self.place(data), self.random.choice((1, 2, 4))
        value = self.random.choice(NUMBERS) & (1 << 8 * width) - 1
        data[at : at + width] = value.to_bytes(width, self.random.choice(("little", "big")))

    def cut(self, data: bytearray) -> None:
        del data[self.random.randrange(len(data) + 1) :]

    def splice(self, data: bytearray) -> None:
        other = self.random.choice(self.seeds)
        head = self.random.randrange(min(len(other), self.random.choice((16, 64, len(other)))))
        data[: self.place(data)] = other[:head]

    def repeat(self, data: bytearray) -> None:
        at, length = self.place(data), self.random.randrange(1, 200)
        data[at:at] = data[at : at + length] * self.random.choice((1, 2, 30))

    def remove(self, data: bytearray) -> None:
        at = self.place(data)
        del data[at : at + self.random.randrange(1, 60)]

    def blank(self, data: bytearray) -> None:
        at, length = self.place(data), self.random.randrange(1, 100)
        data[at : at + length] = bytes((self.random.choice((0, 255)),)) * length


async def intake(data: bytes, isolation: Isolation) -> str:
    """What became of a picture: "decoded" or the kind of its refusal. Raises AssertionError for what must not be."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    try:
        where = source.parse(url, POLICY)
        assert isinstance(where, source.DataSource)
        received = source.payload(where, POLICY)
        assert received == data
        if isolation.takes(received):
            header = await isolation.header(received)
            rows = await isolation.rows(received)
        else:
            header = decode.header(received, POLICY)
            rows = decode.decode_rows(received, POLICY)
    except (DecodeError, MediaError, TooLargeError) as error:
        if LEAK.search(error.message) or len(error.message) > 300:
            raise AssertionError(f"unfit for a client: {error.message}") from error
        return "broke the decoder" if "broke down" in error.message else type(error).__name__
    assert (header.height, header.width) == rows.shape[:2]
    assert rows.shape[2] in (3, 4)
    return "decoded"


def memory() -> float:
    """MiB of this process and of those it started."""
    own = [child for file in Path("/proc/self/task").glob("*/children") for child in file.read_text().split()]
    pages = [int(Path(f"/proc/{process}/statm").read_text().split()[1]) for process in ("self", *own)]
    return sum(pages) * os.sysconf("SC_PAGESIZE") / (1 << 20)


async def fuzz(arguments: argparse.Namespace) -> int:
    seeds = pictures()
    mutator = Mutator(list(seeds.values()), arguments.seed)
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    keep: Path | None = arguments.keep
    wrong = count = 0
    slowest, warm = 0.0, 0.0
    start = time.monotonic()
    async with Isolation(POLICY, 1) as isolation:
        for name, data in seeds.items():
            assert await intake(data, isolation) == "decoded", name
        while count < arguments.files and time.monotonic() - start < arguments.seconds:
            data = mutator.next()
            if keep:
                (keep / "current").write_bytes(data)
            began = time.monotonic()
            try:
                outcome = await intake(data, isolation)
            except Exception as error:
                outcome = "WRONG"
                print(f"file {count}: {error!r}", flush=True)
            taken = time.monotonic() - began
            if outcome in ("WRONG", "broke the decoder") or taken > 2 * POLICY.decode_timeout:
                wrong += outcome != "broke the decoder"
                if keep:
                    (keep / f"{outcome.replace(' ', '-')}-{arguments.seed}-{count}").write_bytes(data)
            slowest = max(slowest, taken)
            counts[str(formats.sniff(data)), outcome] += 1
            count += 1
            if count == min(1000, arguments.files // 2):
                warm = memory()
    for (kind, outcome), number in sorted(counts.items()):
        print(f"{kind:12s} {outcome:20s} {number:6d}")
    growth = memory() - warm if warm else 0.0
    print(f"{count} files in {time.monotonic() - start:.0f} s, slowest {slowest:.2f} s, {wrong} wrong")
    print(f"{memory():.0f} MiB, {growth:+.1f} MiB since the first {min(1000, arguments.files // 2)} files")
    return 1 if wrong or growth > 0.05 * warm + 8 else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=sys.maxsize)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    faulthandler.enable()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    return asyncio.run(fuzz(arguments))


if __name__ == "__main__":
    sys.exit(main())
