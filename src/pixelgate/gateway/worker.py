"""One of the gateway's processes, which its supervisor starts as `python -m pixelgate.gateway.worker DESCRIPTOR`.

The descriptor is the worker's end of a line of JSON messages, each a ``kind`` and what belongs to it. The worker says
"ready" when its engines are connected, is told to "serve", and says "serving"; then "drain" ends it, "alive" asks
whether it still moves, "report" for its metrics, and its own "ask" for those of all, which come back as "show". When
nobody holds the other end any more, the supervisor has died, and the worker ends as if told to by a signal.
"""

from __future__ import annotations

import asyncio
import base64
import faulthandler
import json
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

from pixelgate.errors import PixelgateError
from pixelgate.gateway.settings import GatewaySettings
from pixelgate.gateway.sums import Family

_LAST_SECONDS = 5.0  # for what comes after the shutdown_timeout
_ANSWER_SECONDS = 3.0

log = logging.getLogger(__name__)


class Line:
    """The worker's end. A thread reads it, as a supervisor's death must be noticed whatever the worker is doing."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._incoming = end.makefile("rb")
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._wanting: list[asyncio.Future[list[Family]]] = []
        self._over = False

    def first(self) -> dict[str, Any]:
        """The message with which the worker begins; empty if the supervisor is gone already."""
        return self._next() or {}

    def watch(self, patience: float) -> None:
        """Begin to read what follows. Without a supervisor the process gets ``patience`` seconds to end by itself."""
        threading.Thread(target=self._read, args=(patience,), name="pixelgate-line", daemon=True).start()

    async def ready(self) -> None:
        """Say that the worker is ready, and wait until it is to serve."""
        self._loop = asyncio.get_running_loop()
        self.say("ready")
        await self._messages.get()

    @asynccontextmanager
    async def obeyed(
        self, report: Callable[[], list[Family]], drain: Callable[[], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[None]:
        """Do as told as long as the block runs."""
        obeying = asyncio.create_task(self._obey(report, drain))
        try:
            yield
        finally:
            obeying.cancel()

    async def summed(self) -> list[Family]:
        """The metrics of all workers. Raises TimeoutError where the supervisor does not answer."""
        if not self._heard():
            raise TimeoutError
        answer: asyncio.Future[list[Family]] = asyncio.get_running_loop().create_future()
        self._wanting.append(answer)
        self.say("ask")
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await answer

    def over(self) -> None:
        """The worker is about to end by itself, whoever tells it to, and whatever becomes of the supervisor."""
        self._over = True
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    def say(self, kind: str, **fields: Any) -> None:
        """Send a message. Nobody hears what is said to a supervisor that is gone."""
        data = json.dumps({"kind": kind, **fields}).encode() + b"\n"
        with self._lock, suppress(OSError):
            self._end.sendall(data)

    def _heard(self) -> bool:
        """Whether the supervisor reads: one that is stopped is not to stop who speaks to it."""
        ready = select.poll()
        ready.register(self._end, select.POLLOUT)
        return bool(ready.poll(0))

    async def _obey(self, report: Callable[[], list[Family]], drain: Callable[[], Coroutine[Any, Any, None]]) -> None:
        draining = None
        while True:
            message = await self._messages.get()
            match message["kind"]:
                case "alive":
                    self.say("alive")
                case "report":
                    try:
                        self.say("report", families=report())
                    except Exception:  # a worker without metrics is not one that is stuck
                        log.exception("the metrics cannot be reported")
                case "show":
                    for answer in self._wanting:
                        if not answer.done():  # nobody waits any more
                            answer.set_result(message["families"])
                    self._wanting.clear()
                case "drain":
                    draining = draining or asyncio.create_task(drain())

    def _next(self) -> dict[str, Any] | None:
        try:
            line = self._incoming.readline()
        except OSError:
            return None
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def _read(self, patience: float) -> None:
        while (message := self._next()) is not None:
            assert self._loop is not None  # nothing is sent to a worker that has not said that it is ready
            with suppress(RuntimeError):  # the loop has ended, and the process will
                self._loop.call_soon_threadsafe(self._messages.put_nowait, message)
        _end(patience, told=self._over)


def _end(patience: float, *, told: bool) -> None:
    if not told:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(patience)
    os._exit(1)  # something holds it up


def main(descriptor: int) -> int:
    """Serve until told to end. What prevents it is said on the line, and is the supervisor's to tell."""
    if sys.stderr is None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    else:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1)  # writes there what every thread is doing
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # for the supervisor, though whoever sends it may not know
    # as SIGINT in the midst of starting, so that what was begun is undone; the server has handlers of its own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with ExitStack() as opened:
        line = Line(_taken(opened, descriptor))
        try:
            return _work(line, opened)
        except KeyboardInterrupt:
            return 0
        finally:
            line.over()


def _work(line: Line, opened: ExitStack) -> int:
    if not (begin := line.first()):
        return 1
    settings: GatewaySettings = pickle.loads(base64.b64decode(begin["settings"]))
    sockets, admin = ([_taken(opened, each) for each in begin[name]] for name in ("sockets", "admin"))
    line.watch(settings.drain_delay + settings.shutdown_timeout + _LAST_SECONDS)
    try:
        from pixelgate.gateway import serve

        serve.run(settings, line, sockets, admin)
    except PixelgateError as failure:
        return _failed(line, failure.message)
    except ImportError as failure:
        return _failed(line, f"this needs {failure.name}: pip install 'pixelgate[gateway]'")
    return 0


def _failed(line: Line, reason: str) -> int:
    line.over()
    line.say("failed", reason=reason)
    return 1


def _taken(opened: ExitStack, descriptor: int) -> socket.socket:
    """The socket of a descriptor from the supervisor, which is for no process further down."""
    taken = opened.enter_context(socket.socket(fileno=descriptor))
    taken.set_inheritable(False)
    return taken


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
