"""Tensors handed over in shared memory: files in /dev/shm that an engine on the same host reads and unlinks.

The engine must run as root or as the user of this process: nobody else can read the files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the supervisor, which sweeps, loads no arrays
    from numpy.typing import NDArray

DIRECTORY = Path("/dev/shm")
MIN_BYTES = 64 << 10  # of one tensor; below, a file costs more than the copy that it saves

# pixelgate-(namespace of process ids)-(process id)-(its start, in ticks since boot)-(random)
_NAME = re.compile(r"pixelgate-(\d+)-(\d+)-(\d+)-[0-9a-f]{32}")
_ABANDONED_AFTER = 3600.0  # seconds; an engine reads a tensor within seconds

log = logging.getLogger(__name__)


def namespace() -> str:
    """Which /dev/shm this process sees, in the words of engines: the kernel's boot id and the device. Empty: none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return f"{boot}:{DIRECTORY.stat().st_dev}"
    except OSError:
        return ""


class Segments:
    """The files of one request. Thread-safe: a request may be given up while a thread is still writing."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._removed = False
        self._lock = threading.Lock()

    def write(self, parts: Sequence[NDArray[Any]]) -> str:
        """The name of a new file with the bytes of ``parts``. Raises OSError, above all where there is no room."""
        name = f"pixelgate-{_namespace_of_ids()}-{os.getpid()}-{_start(os.getpid())}-{uuid.uuid4().hex}"
        with self._lock:
            self._names.append(name)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(DIRECTORY / name, flags, 0o600)
        try:
            for part in parts:
                # Written and not mapped: where the memory runs out this is an error, and there a signal.
                # As uint8, because bfloat16 has no buffer format.
                left = part.reshape(-1).view("uint8").data
                while left:
                    left = left[os.write(file, left) :]
        finally:
            os.close(file)
            with self._lock:
                removed = self._removed
            if removed:
                self.remove()
        return name

    def unread(self) -> bool:
        """Whether every file is still there, so that the engine has read none."""
        return bool(self._names) and all((DIRECTORY / name).exists() for name in self._names)

    def remove(self) -> None:
        """Unlink what the engine has not, now and when a thread is done writing."""
        with self._lock:
            self._removed = True
            names = list(self._names)
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (DIRECTORY / name).unlink()


def sweep() -> int:
    """Unlink what processes have left that were killed; return how many files that were."""
    swept = 0
    for path in DIRECTORY.glob("pixelgate-*"):
        match = _NAME.fullmatch(path.name)
        # What another user left, or somebody else removed, is not ours to remove.
        with contextlib.suppress(OSError):
            if match and _abandoned(path, *map(int, match.groups())):
                path.unlink()
                swept += 1
    if swept:
        log.info("removed %d tensors in %s that gateways have left there", swept, DIRECTORY)
    return swept


def _abandoned(path: Path, ids: int, process: int, start: int) -> bool:
    if ids != _namespace_of_ids():  # of another container, whose processes cannot be seen
        return time.time() - path.stat().st_mtime > _ABANDONED_AFTER
    return _start(process) != start


def _namespace_of_ids() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _start(process: int) -> int | None:
    """When a process was started, which tells it from a later one of the same id. None where there is no such."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text("ascii", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[19])
