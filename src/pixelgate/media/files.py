"""The one place that opens a file for a client: regular files below the one directory that the policy names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pixelgate.errors import MediaError, TooLargeError
from pixelgate.media.policy import MediaPolicy
from pixelgate.media.source import FileSource


def read(source: FileSource, policy: MediaPolicy) -> bytes:
    """The file's bytes; work for a thread.

    Raises MediaError with one message for a file that is missing, outside the root, unreadable or no regular file, so
    that nobody learns which files exist; TooLargeError above ``policy.max_bytes``.
    """
    try:
        data = _read(source.path, policy)
    except (OSError, ValueError, RuntimeError):  # pathlib says RuntimeError of links in a circle
        data = None
    if data is None:
        raise MediaError("the picture's file cannot be read")
    if len(data) > policy.max_bytes:
        raise TooLargeError(f"the picture is larger than the limit of {policy.max_bytes} bytes")
    return data


def _read(path: str, policy: MediaPolicy) -> bytes | None:
    root, where = Path(policy.local_root).resolve(strict=True), Path(path).resolve(strict=True)
    if not where.is_relative_to(root) or not where.is_file():
        return None
    # What was put there since must not block and not be a link.
    handle = os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(handle, "rb") as file:  # noqa: PTH123 -- a descriptor, not a path
        # The path may have changed since it was resolved: what counts is which file is open.
        opened = Path(f"/proc/self/fd/{handle}").resolve(strict=True)
        if not opened.is_relative_to(root) or not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        return file.read(policy.max_bytes + 1)
