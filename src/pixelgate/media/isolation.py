"""Decoders in processes of their own, for formats whose libraries may crash, hang or take any amount of memory.

A process handles one picture at a time and lives on; one that fails is killed and another takes its place. A process
costs memory and a start, so there are never more than were needed at once. It is no sandbox against code that a picture
might smuggle in: it runs under the same user.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pixelgate.errors import ConfigError, DecodeError, InternalError, RequestError
from pixelgate.media import formats, structure
from pixelgate.media.decode import Backend, Header
from pixelgate.media.decoder_process import ANSWER, BACKENDS, ERRORS, JOB, LENGTH, READY, WORK
from pixelgate.media.policy import MediaPolicy

_COMMAND = (sys.executable, "-P", "-m", "pixelgate.media.decoder_process")
_START_SECONDS = 60.0
_LONGEST_MESSAGE = 1000
_SOCKET_BUFFER = 1 << 20
_CHANNELS = (3, 4)

# Nothing that a decoder does not need is given to it: the gateway's settings and environment hold secrets.
_NEEDED = ("formats", "max_bytes", "max_pixels", "rgb", "background", "decode_timeout", "decode_memory")
_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LANG", "LC_ALL")

_Answer = tuple[int, int, NDArray[np.uint8]]

log = logging.getLogger(__name__)


class Isolation:
    """Up to ``processes`` decoder processes under one policy; an async context manager that leaves none behind.

    ``command`` starts a decoder process; a socket's descriptor is appended to it.
    """

    def __init__(self, policy: MediaPolicy, processes: int, *, command: Sequence[str] = _COMMAND) -> None:
        self.policy = policy
        self._command = command
        # A thread for every process, which waits for it: whoever works on other pictures is not held up.
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="pixelgate-isolation")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        if self.policy.isolate:  # what cannot start at all is found out now
            try:
                first = await asyncio.get_running_loop().run_in_executor(self._threads, self._start)
            except InternalError as failure:
                raise ConfigError(failure.message) from None
            self._discard(first)  # most gateways never see a picture for it, and it takes 50 MB
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._closed = True
            processes, self._all = self._all, set()
        for process in processes:
            process.close()
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def rest(self) -> None:
        """End the processes that work on no picture; others start with the next."""
        while (process := self._idle_process()) is not None:
            self._discard(process)

    def takes(self, data: bytes) -> bool:
        """Whether this picture is to be decoded here."""
        if not self.policy.isolate:
            return False
        kind = formats.sniff(data)
        return kind in self.policy.isolate or (kind == "JPEG" and structure.slow_jpeg(data))

    async def header(self, data: bytes, backend: Backend = "torchvision") -> Header:
        """`decode.header` in a process. Raises DecodeError also for a picture over which the process failed."""
        height, width, _ = await self._ask("header", data, backend)
        return Header(height, width, str(formats.sniff(data)))

    async def rows(self, data: bytes, backend: Backend = "torchvision") -> NDArray[np.uint8]:
        """`decode.decode_rows` in a process: uint8 [height, width, 3], or 4 with a byte that means nothing."""
        height, width, memory = await self._ask("rows", data, backend)
        return memory.reshape(height, width, -1)

    async def _ask(self, work: str, data: bytes, backend: Backend) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, work, data, backend)

    def _answer(self, work: str, data: bytes, backend: Backend) -> _Answer:
        process = self._idle_process() or self._start()
        try:
            answer = process.ask(work, data, backend, self.policy)
        except (OSError, EOFError, _NonsenseError) as failure:  # TimeoutError is an OSError
            self._discard(process)
            kind, late = formats.sniff(data), isinstance(failure, TimeoutError)
            how = "took too long" if late else f"ended with {process.close()}"
            log.warning("a decoder process %s over a %s picture of %d bytes", how, kind, len(data))
            if late:
                allowed = f"{self.policy.decode_timeout:g} seconds"
                raise DecodeError(f"decoding the {kind} picture takes longer than the limit of {allowed}") from None
            raise DecodeError(f"the {kind} picture cannot be decoded: its decoder broke down over it") from None
        except RequestError:
            self._idle.append(process)
            raise
        self._idle.append(process)
        return answer

    def _idle_process(self) -> _Process | None:
        while True:
            try:
                process = self._idle.pop()  # the one used last: its memory is warm
            except IndexError:
                return None
            if process.alive:
                return process
            self._discard(process)

    def _start(self) -> _Process:
        with self._lock:
            if self._closed:
                raise InternalError("a picture was to be decoded after the end")
            process = _Process(self._command)
            self._all.add(process)
        try:
            process.prepare(self.policy)
        except (OSError, EOFError, _NonsenseError):
            self._discard(process)
            raise InternalError(f"a decoder process did not start; it ended with {process.close()}") from None
        return process

    def _discard(self, process: _Process) -> None:
        process.close()
        with self._lock:
            self._all.discard(process)


class _NonsenseError(Exception):
    """A decoder process said something that it never says."""


class _Process:
    """One decoder process, and the socket to it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            for end in (self._socket, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the gateway, which ends its processes itself
            )

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def prepare(self, policy: MediaPolicy) -> None:
        """Tell it the policy and wait until it is ready."""
        deadline = time.monotonic() + _START_SECONDS
        needed = {name: getattr(policy, name) for name in _NEEDED}
        told = pickle.dumps(MediaPolicy(**needed))
        self._send(LENGTH.pack(len(told)) + told, deadline)
        if self._receive(len(READY), deadline).tobytes() != READY:
            raise _NonsenseError

    def ask(self, work: str, data: bytes, backend: Backend, policy: MediaPolicy) -> _Answer:
        """Height, width and memory of a picture. Raises what the decoder raised, or OSError, EOFError, _NonsenseError.

        Nothing that comes back is trusted: a decoder that was taken over may say anything.
        """
        deadline = time.monotonic() + policy.decode_timeout
        self._send(JOB.pack(WORK.index(work), BACKENDS.index(backend), len(data)), deadline)
        self._send(data, deadline)
        status, channels, height, width = ANSWER.unpack(self._receive(ANSWER.size, deadline).data)
        if status:
            if status > len(ERRORS) or width > _LONGEST_MESSAGE:
                raise _NonsenseError
            message = self._receive(width, deadline).tobytes().decode(errors="replace")
            raise ERRORS[status - 1](message)
        if not 0 < height * width <= policy.max_pixels or channels not in (_CHANNELS if work == "rows" else (0,)):
            raise _NonsenseError
        return height, width, self._receive(height * width * channels, deadline)

    def close(self) -> int:
        """Kill it, if need be; its exit status."""
        self._process.kill()
        status = self._process.wait()
        self._socket.close()
        return status

    def _send(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(data)

    def _receive(self, length: int, deadline: float) -> NDArray[np.uint8]:
        memory = np.empty(length, np.uint8)
        view, done = memory.data, 0
        while done < length:
            self._socket.settimeout(_left(deadline))
            count = self._socket.recv_into(view[done:])
            if count == 0:
                raise EOFError
            done += count
        return memory


def _environment() -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name in _VARIABLES or name.startswith("PYTHON")}
    return {**kept, "OPENBLAS_NUM_THREADS": "1"}  # numpy's threads would have nothing to do


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
