"""A worker as its supervisor sees it: a process, and a line of JSON messages to it and from it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from pixelgate.engines import shm
from pixelgate.errors import ConfigError
from pixelgate.gateway.settings import GatewaySettings
from pixelgate.gateway.sums import Family
from pixelgate.process import with_one_heap

COMMAND = (sys.executable, "-P", "-m", "pixelgate.gateway.worker")
_LONGEST_LINE = 64 << 20  # of a report
_ASKED_EVERY = 10.0  # seconds
_MOST_UNANSWERED = 3  # one or two can be of a host that was suspended
_TOLD_SECONDS = 1.0  # for a worker to say where it is stuck

log = logging.getLogger(__name__)


class Child:
    """A process that makes itself ready with ``settings`` and serves on ``sockets`` and ``admin`` once it is told to.

    ``asks`` is called when somebody wants to see the metrics of all workers, ``lost`` when it has ended. The descriptor
    of a socket is all that its command line has: settings hold secrets, so they go through it.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        sockets: Sequence[socket.socket],
        admin: Sequence[socket.socket],
        *,
        asks: Callable[[Child], None],
        lost: Callable[[Child], None],
    ) -> None:
        self._settings = settings
        self._sockets = sockets
        self._admin = admin
        self._asks = asks
        self._lost = lost
        self._writer: asyncio.StreamWriter | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._signalled = 0
        self._failure = ""
        self.ready, self.serving, self.alive, self.reported, self.ended = (asyncio.Event() for _ in range(5))
        self.report: list[Family] = []
        self._life = asyncio.create_task(self._live())

    @property
    def id(self) -> int:
        """The process' id; 0 before there is one."""
        return self._process.pid if self._process else 0

    @property
    def serves(self) -> bool:
        """Whether it is serving, as far as anybody knows."""
        return self.serving.is_set() and not self.ended.is_set()

    async def until(self, event: asyncio.Event) -> None:
        """Wait for ``ready`` or ``serving``. Raises ConfigError with the worker's own reason when it ends instead."""
        await event.wait()
        if self.ended.is_set():
            raise ConfigError(self._failure or "the gateway did not start; the log above says why")

    def tell(self, kind: str, **fields: Any) -> None:
        """Send a message: serve, drain, alive, report or show."""
        if self._writer is not None and not self.ended.is_set():
            self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    def signal(self, number: int) -> None:
        """Send a signal, now or once there is a process."""
        self._signalled = number
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def watched(self) -> None:
        """Wait for its end; cause it when the event loop has stopped, as nobody is answered by this worker any more."""
        unanswered = 0
        while not self.ended.is_set():
            self.alive.clear()
            self.tell("alive")
            with suppress(TimeoutError):
                async with asyncio.timeout(_ASKED_EVERY):
                    await self.ended.wait()
            unanswered = 0 if self.alive.is_set() else unanswered + 1
            if unanswered == _MOST_UNANSWERED:
                self.show_stacks()
                await self.end(_TOLD_SECONDS)
                log.error("worker %d had not answered for %g seconds", self.id, unanswered * _ASKED_EVERY)

    def show_stacks(self) -> None:
        """Have it write to standard error what its threads are doing; it would not survive that earlier."""
        if self.ready.is_set():
            self.signal(signal.SIGUSR1)

    async def end(self, patience: float) -> None:
        """Wait for its end, which has been asked for, and enforce it after ``patience`` seconds."""
        try:
            async with asyncio.timeout(patience):
                await self.ended.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)  # before the log, which may be what stops it
            log.error("worker %d has not ended in time and is killed", self.id)
            await self.ended.wait()

    async def _live(self) -> None:
        status = 0
        try:
            self._process, ours = await self._started()
            if self._signalled:
                self.signal(self._signalled)
            await self._listen(ours)
            status = await self._process.wait()  # whoever closes the line is about to end
        except OSError as failure:
            self._failure = f"a worker cannot be started: {failure.strerror}"
        if status and not self._failure:
            log.error("worker %d ended with %s", self.id, _words(status))
        if status < 0 and self._settings.shm == "auto":
            shm.sweep()
        self.ended.set()
        self._lost(self)
        for event in (self.ready, self.serving, self.alive, self.reported):
            event.set()

    async def _started(self) -> tuple[asyncio.subprocess.Process, socket.socket]:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *(each.fileno() for each in (*self._sockets, *self._admin))],
                    env=with_one_heap(os.environ),
                    process_group=0,  # a terminal's SIGINT is for the supervisor alone
                )
            except BaseException:
                ours.close()
                raise
        return process, ours

    async def _listen(self, ours: socket.socket) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=_LONGEST_LINE)
        self.tell(
            "start",
            settings=base64.b64encode(pickle.dumps(self._settings)).decode(),
            sockets=[each.fileno() for each in self._sockets],
            admin=[each.fileno() for each in self._admin],
        )
        with suppress(ConnectionError):
            async for line in reader:
                self._heard(json.loads(line))
        self._writer.close()

    def _heard(self, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ready":
                self.ready.set()
            case "serving":
                log.info("worker %d serves", self.id)
                self.serving.set()
            case "failed":
                self._failure = message["reason"]
            case "alive":
                self.alive.set()
            case "report":
                self.report = message["families"]
                self.reported.set()
            case "ask":
                self._asks(self)


def _words(status: int) -> str:
    return f"signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"status {status}"
