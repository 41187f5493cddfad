"""One process that serves, and how its servers run. supervisor.py has as many as were asked for."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette

from pixelgate.engines import shm
from pixelgate.errors import ConfigError
from pixelgate.gateway import logs, received
from pixelgate.gateway.access import digests
from pixelgate.gateway.app import create_app
from pixelgate.gateway.passthrough import PassThrough, open_both
from pixelgate.gateway.phases import check_tracing
from pixelgate.gateway.protocol import LimitedProtocol
from pixelgate.gateway.served import ServedModel
from pixelgate.gateway.settings import GatewaySettings, refuse_same_names
from pixelgate.gateway.worker import Line
from pixelgate.process import keep_memory, settle

_TICK = 0.1  # seconds
_BROKEN_OFF = "ASGI callable returned without completing response"


def run(
    settings: GatewaySettings, line: Line, sockets: Sequence[socket.socket], admin: Sequence[socket.socket]
) -> None:
    """Serve as one of the workers until told to end, on ``line`` or by a signal.

    Raises ConfigError or CheckpointError when the gateway cannot start.
    """
    logs.configure(settings)
    quieten_strangers()
    quieten_downloads()
    keep_memory(pictures=settings.threads)
    allow_open_files()
    if settings.shm == "auto":
        shm.sweep()
    check_tls(settings)
    digests(settings)  # a wrong file, or an extra that is missing, is told now, before anything is waited for
    check_tracing(settings)
    models = _open_models(settings)
    app = create_app(settings, models, summed=line.summed)
    server = Server(app, settings, partial(line.say, "serving"))

    async def serve() -> None:
        # Before the server starts: so a refusal is one readable line, and a signal ends the wait for an engine.
        try:
            for model in models:
                await model.connect(settings.engine_wait)
            settle()
            await line.ready()
        except BaseException:
            for model in models:
                await model.fleet.close()
            raise
        async with line.obeyed(app.state.report, server.leave):
            async with admin_listener(app.state.admin, settings, admin):
                await server.serve(list(sockets))
            line.say("report", families=app.state.report())
            line.over()

    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(serve())
    except SystemExit:  # its way to say that it cannot start
        pass
    if not server.started:
        raise ConfigError("the gateway did not start; the log above says why")


def _open_models(settings: GatewaySettings) -> list[ServedModel | PassThrough]:
    models: list[ServedModel | PassThrough] = []
    names = []
    for model in settings.models:
        with received.complete(model, settings.engine_wait) as complete:
            names.append(complete.name)
            models += open_both(complete, settings)
    refuse_same_names(names)
    return models


def server_config(app: Starlette, settings: GatewaySettings) -> uvicorn.Config:
    """How the HTTP server runs: fast loop and parser, no log line a request, no name of the software in replies."""
    tls = {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key} if settings.tls_cert else {}
    return _config(app, settings, host=settings.host, port=settings.port, lifespan="on", **tls)


@asynccontextmanager
async def admin_listener(
    app: Starlette | None, settings: GatewaySettings, sockets: Sequence[socket.socket]
) -> AsyncIterator[None]:
    """Serve the admin's application, if there is one, on ``sockets`` as long as the block runs.

    It has connections of its own, so that strangers cannot take them all, and leaves signals to the gateway's server.
    """
    if app is None:
        yield
        return
    server = _Beside(_config(app, settings, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=list(sockets)))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


class Server(uvicorn.Server):
    """The server of ``app``, the gateway's. It calls ``listens`` when it takes connections.

    When it is to end it says that it is not ready any more, and goes on for ``drain_delay`` seconds: a load balancer
    takes a while to hear that nothing should be sent here.
    """

    def __init__(self, app: Starlette, settings: GatewaySettings, listens: Callable[[], None] = lambda: None) -> None:
        super().__init__(server_config(app, settings))
        self._state, self._settings, self._listens = app.state, settings, listens
        self._leaving = self._signalled = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End with a signal."""
        self._signalled = True
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End with a signal, and do not raise it once more afterwards: there are things left to close."""
        with super().capture_signals():
            yield
            self._captured_signals.clear()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, and listen."""
        await super().startup(sockets)
        self._listens()

    async def leave(self) -> None:
        """End because others are here: take no more connections, but answer all that comes over those there are.

        A request may be on its way over a connection that looks idle. So each ends with its next answer, or with the
        time that it may be idle.
        """
        for listening in self.servers:
            listening.close()
        self._state.closing.set()
        await asyncio.sleep(self._settings.keep_alive_timeout)
        self._leaving = self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End, at once when a second signal says so."""
        self._state.drain()
        left, end = self.server_state, time.monotonic() + self._settings.drain_delay
        if not self._signalled:  # nobody is in a hurry, until somebody is
            for connection in list(left.connections):
                connection.shutdown()
            await _until(lambda: self._signalled or not (left.connections or left.tasks))
        elif not self._leaving:
            await _until(lambda: self.force_exit or time.monotonic() >= end)
        await super().shutdown(sockets)
        if self.force_exit:  # then that leaves these out
            for task in left.tasks:
                task.cancel()
            await self.lifespan.shutdown()


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - some are set where a signal is caught
        await asyncio.sleep(_TICK)


class _Beside(uvicorn.Server):
    """A server that does not catch signals."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """Leave them alone."""
        return nullcontext()


def check_tls(settings: GatewaySettings) -> None:
    """Raise ConfigError unless certificate and key can be read and belong together."""
    if not settings.tls_cert:
        return
    for name in ("tls_cert", "tls_key"):
        path = getattr(settings, name)
        try:
            Path(path).read_bytes()
        except OSError as failure:
            raise ConfigError(f"{name} {path} cannot be read: {failure.strerror}") from None
    try:
        # an empty password, so that a key that needs one is refused instead of asked for on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except (ssl.SSLError, ValueError):
        raise ConfigError(
            f"tls_cert {settings.tls_cert} and tls_key {settings.tls_key} are no pair of PEM files, "
            "a certificate with its chain and its private key without a password"
        ) from None


def _config(app: Starlette, settings: GatewaySettings, **options: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=partial(LimitedProtocol, settings, app.state.refused, app.state.closing),  # type: ignore[arg-type]
        ws="none",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # it would believe whoever asks from loopback; access.py asks whom to trust
        log_config=None,
        log_level=logging.WARNING,  # who serves and who ends is the supervisor's to say, once and in our words
        timeout_graceful_shutdown=settings.shutdown_timeout,  # type: ignore[arg-type]  # a float will do
        **options,
    )


def allow_open_files() -> None:
    """As many as the system allows: each connection and each fetch is one, and 1024 is a common start."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def quieten_downloads() -> None:
    """huggingface_hub and its HTTP client, of either name, log the address of every file, signatures included."""
    for name in ("huggingface_hub.file_download", "httpx", "httpx2"):
        logging.getLogger(name).setLevel(logging.ERROR)


def quieten_strangers() -> None:
    """Strangers' broken files are answered, not logged: a line for each would let them fill the disk.

    Neither is an answer that is broken off, as there is a line of ours for it.
    """
    logging.getLogger("uvicorn.error").addFilter(lambda record: not str(record.msg).startswith(_BROKEN_OFF))
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", module=r"PIL\.")
