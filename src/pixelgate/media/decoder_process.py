"""What runs in a decoder process: one picture after the other, under limits that the kernel enforces.

Started by `isolation` as ``python -m pixelgate.media.decoder_process DESCRIPTOR`` with one end of a socket pair. It
ends when the other end closes, and is killed when it takes too long; it opens no file and no connection.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

import numpy as np
from PIL import AvifImagePlugin

from pixelgate.errors import DecodeError, RequestError, TooLargeError
from pixelgate.media import decode as decoder
from pixelgate.media.policy import MediaPolicy
from pixelgate.process import keep_memory

READY = b"\1"
JOB = struct.Struct("<BBQ")
"""What is asked for (an index of WORK), the backend (one of BACKENDS), and the bytes of the picture that follows."""

ANSWER = struct.Struct("<BBII")
"""Status, channels, height, width; rows of so many channels follow. A status above 0 is a position in ERRORS, counted
from 1, and a message of "width" bytes follows."""

WORK = ("header", "rows")
BACKENDS: tuple[decoder.Backend, ...] = ("torchvision", "pil")
ERRORS: tuple[type[RequestError], ...] = (DecodeError, TooLargeError)
LENGTH = struct.Struct("<Q")

_OPEN_FILES = 32


def main() -> None:
    """Serve the socket whose descriptor is the first argument, until its other end is closed."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which asks the gateway what it is doing
    channel = socket.socket(fileno=int(sys.argv[1]))
    with contextlib.suppress(EOFError, ConnectionError):  # the gateway is gone, and nobody wants the answer
        (length,) = LENGTH.unpack(receive(channel, LENGTH.size))
        policy: MediaPolicy = pickle.loads(receive(channel, length))
        confine(policy)
        channel.sendall(READY)
        while True:
            serve_one(channel, policy)


def serve_one(channel: socket.socket, policy: MediaPolicy) -> None:
    """Wait for one picture and answer it. Raises EOFError when there will be no more."""
    work, backend, length = JOB.unpack(receive(channel, JOB.size))
    # The gateway kills what takes too long; this is for a process whose gateway is gone.
    signal.setitimer(signal.ITIMER_REAL, policy.decode_timeout + 1)
    head, body = answer(WORK[work], receive(channel, length), policy, BACKENDS[backend])
    channel.sendall(head)
    channel.sendall(body)
    signal.setitimer(signal.ITIMER_REAL, 0)


def answer(work: str, data: bytes, policy: MediaPolicy, backend: decoder.Backend) -> tuple[bytes, bytes | memoryview]:
    """The answer to one picture, as it goes over the socket: an ANSWER, and what follows it."""
    try:
        if work == "header":
            found = decoder.header(data, policy, backend)
            return ANSWER.pack(0, 0, found.height, found.width), b""
        rows = np.ascontiguousarray(decoder.decode_rows(data, policy, backend))
        height, width, channels = rows.shape
        return ANSWER.pack(0, channels, height, width), rows.data
    except ERRORS as error:
        message = error.message.encode()
        return ANSWER.pack(1 + ERRORS.index(type(error)), 0, 0, len(message)), message


def confine(policy: MediaPolicy) -> None:
    """Take from this process what decoding does not need: memory, files, other threads, and a voice."""
    keep_memory()
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # requests run side by side already
    with contextlib.suppress(ImportError):
        from pillow_heif import options

        options.DECODE_THREADS = 1
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for limit, value in (
        (resource.RLIMIT_AS, own + policy.decode_memory),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    with contextlib.suppress(OSError):  # when memory runs out, better this process than the gateway
        Path("/proc/self/oom_score_adj").write_text("1000")
    nothing = os.open(os.devnull, os.O_WRONLY)  # C libraries write to standard error as they please
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)


def receive(channel: socket.socket, length: int) -> bytes:
    """Exactly ``length`` bytes. Raises EOFError if there are fewer."""
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = channel.recv_into(view[done:])
        if count == 0:
            raise EOFError
        done += count
    return bytes(data)


if __name__ == "__main__":
    main()
