"""Processes that a benchmark starts, and what /proc says of them and of all their descendants."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


@asynccontextmanager
async def running(*command: str | Path, **options: object) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process in a group of its own, which is ended with whatever it has started."""
    process = await asyncio.create_subprocess_exec(*map(os.fspath, command), start_new_session=True, **options)
    try:
        yield process
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL to the group for what is left ten seconds later."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), 10)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


def tree(pid: int) -> list[int]:
    """A process and all its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of the tree. That of descendants which have ended is in their parents'."""
    return sum(sum(map(int, fields[11:15])) for each in tree(pid) if (fields := _stat(each))) / _TICK


def memory(pid: int, field: str = "VmHWM") -> int:
    """Bytes, summed over the tree: VmHWM for the peaks since `forget_peaks`, VmRSS for now."""
    return sum(value << 10 for each in tree(pid) for name, value in _status(each) if name == field)


def forget_peaks(pid: int) -> None:
    """Let VmHWM begin anew."""
    for each in tree(pid):
        with suppress(OSError):
            (_PROC / str(each) / "clear_refs").write_text("5")


def threads(pid: int) -> int:
    """Threads of the tree."""
    return sum(value for each in tree(pid) for name, value in _status(each) if name == "Threads")


def open_files(pid: int) -> int:
    """Descriptors of the tree: files, pipes and sockets."""
    count = 0
    for each in tree(pid):
        with suppress(OSError):
            count += sum(1 for _ in (_PROC / str(each) / "fd").iterdir())
    return count


def shared_files(pid: int) -> int:
    """Files that gateways of the tree have in shared memory; their names have the process's id."""
    own = [f"-{each}-" for each in tree(pid)]
    return sum(any(part in file.name for part in own) for file in Path("/dev/shm").glob("pixelgate-*"))


def maps(pid: int, library: str) -> bool:
    """Whether a process of the tree has a library in its memory."""
    for each in tree(pid):
        with suppress(OSError):
            if library in (_PROC / str(each) / "maps").read_text():
                return True
    return False


def available_memory() -> int:
    """Bytes that the machine has left."""
    lines = (_PROC / "meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def _stat(pid: int) -> list[str]:
    """The fields after the command's name, which may hold anything; none for a process that has ended."""
    with suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return []


def _status(pid: int) -> Iterator[tuple[str, int]]:
    with suppress(OSError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            name, _, value = line.partition(":")
            if (first := value.split()[:1]) and first[0].isdigit():
                yield name, int(first[0])
