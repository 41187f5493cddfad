"""`pixelgate serve`: the process that has the port, and workers that serve. It handles no request and loads no arrays.

It starts workers, replaces those that die, adds up their metrics, and ends with all of them. SIGHUP has it read its
configuration anew: workers with the new one are started beside the old ones, which end when those are serving. SIGUSR1
has the workers say what they are doing.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from pixelgate.errors import ConfigError
from pixelgate.gateway import logs
from pixelgate.gateway.child import Child
from pixelgate.gateway.crew import Crew
from pixelgate.gateway.listening import Listeners
from pixelgate.gateway.settings import GatewaySettings
from pixelgate.gateway.sums import Family, lasting, summed

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_REPORT_SECONDS = 1.0
_STACKS_SECONDS = 0.2

log = logging.getLogger(__name__)


def run(read: Callable[[], GatewaySettings]) -> None:
    """Serve until SIGINT or SIGTERM; ``read`` gives the settings, now and whenever SIGHUP asks for them.

    Raises ConfigError when the gateway cannot start, or cannot go on.
    """
    settings = read()
    logs.configure(settings)
    asyncio.run(Supervisor(read).serve(settings))


class Supervisor:
    """The workers of the gateway, and of the configuration before while they finish."""

    def __init__(self, read: Callable[[], GatewaySettings]) -> None:
        self._read = read
        self._crew: Crew | None = None
        self._crews: set[Crew] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._counted: list[Family] = []  # by workers that have ended
        self._stopping = False
        self._hangups: asyncio.Queue[int] = asyncio.Queue()

    async def serve(self, settings: GatewaySettings) -> None:
        """Serve until told to end. Raises ConfigError when the gateway cannot start, or cannot go on."""
        loop, work = asyncio.get_running_loop(), asyncio.create_task(self._work(settings))
        loop.add_signal_handler(signal.SIGHUP, self.reload)
        loop.add_signal_handler(signal.SIGUSR1, self.show_stacks)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number, work)
        try:
            await work
        except asyncio.CancelledError:
            if not self._stopping:
                raise
        finally:
            self._stopping = True
            await self._end()
            for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def reload(self) -> None:
        """Read the configuration anew."""
        self._hangups.put_nowait(signal.SIGHUP)

    def show_stacks(self) -> None:
        """Have the workers write to standard error what their threads are doing."""
        self._beside(self._stacks())

    def _stop(self, number: int, work: asyncio.Task[None]) -> None:
        if not self._stopping:
            self._stopping = True
            log.info("ending, as told by %s", signal.Signals(number).name)
            work.cancel()
        elif number == signal.SIGINT:  # a second one: the workers are told twice, too
            for crew in self._crews:
                crew.stop(number)

    async def _work(self, settings: GatewaySettings) -> None:
        self._crew = await self._begun(settings)
        while True:
            hangup = asyncio.create_task(self._hangups.get())
            done, _ = await asyncio.wait({hangup, *self._crew.keepers}, return_when=asyncio.FIRST_COMPLETED)
            if hangup not in done:
                hangup.cancel()
                for keeper in done:
                    keeper.result()  # raises
            await self._reloaded(self._crew)

    async def _reloaded(self, old: Crew) -> None:
        """Exchange the crew for one with a configuration that is read anew, if that is right."""
        log.info("reading the configuration anew")
        old.lend_sockets(True)
        sockets = old.listeners.count
        try:
            self._crew = await self._begun(self._read())
        except ConfigError as failure:
            log.error("the configuration is not taken over: %s", failure.message)
            old.listeners.shrink(sockets)
            old.lend_sockets(False)
            return
        logs.configure(self._crew.settings)
        log.info("the new configuration is taken over; workers with the old one finish what they have begun")
        old.drain()
        self._beside(self._gone(old))

    async def _begun(self, settings: GatewaySettings) -> Crew:
        """Workers that serve with these settings. Raises ConfigError, and leaves no worker, if they cannot."""
        crew = Crew(settings, *self._listeners(settings), asks=self._asked, lost=self._count)
        self._crews.add(crew)
        try:
            await crew.start()
        except ConfigError:
            crew.stop()
            await self._gone(crew)
            raise
        _announce(crew)
        return crew

    def _listeners(self, settings: GatewaySettings) -> tuple[Listeners, Listeners | None]:
        """Those of the crew before where the addresses are the same, so that no connection is lost or refused."""
        before = self._crew
        if before is not None and (before.listeners.host, before.listeners.asked) == (settings.host, settings.port):
            listeners = before.listeners
            listeners.grow(settings.workers)
        else:
            what = f"host {settings.host} and port {settings.port}"
            listeners = Listeners(settings.host, settings.port, what=what, count=settings.workers)
        if settings.admin_address is None:
            return listeners, None
        host, port = settings.admin_address
        if before is not None and before.admin and (before.admin.host, before.admin.asked) == (host, port):
            return listeners, before.admin
        try:
            return listeners, Listeners(host, port, what=f"admin_host {settings.admin_host}")
        except ConfigError:
            self._close(listeners)
            raise

    async def _gone(self, crew: Crew) -> None:
        await crew.ended()
        self._crews.discard(crew)
        self._close(crew.listeners, crew.admin)

    def _close(self, *listeners: Listeners | None) -> None:
        """Close those that no crew has any more."""
        used = [each for crew in self._crews for each in (crew.listeners, crew.admin)]
        for each in listeners:
            if each is not None and each not in used:
                each.close()

    async def _end(self) -> None:
        for crew in self._crews:
            crew.stop()
        await asyncio.gather(*(self._gone(crew) for crew in self._crews))
        for task in self._tasks:
            task.cancel()

    def _count(self, child: Child) -> None:
        """Keep what a worker that has ended had counted."""
        self._counted = summed((self._counted, lasting(child.report)))
        child.report = []

    def _asked(self, child: Child) -> None:
        self._beside(self._show(child))

    async def _show(self, asking: Child) -> None:
        """Tell a worker the metrics of all. Of one that does not answer in time its last report counts."""
        serving = [child for child in self._children() if child.serves]
        for child in serving:
            child.reported.clear()
            child.tell("report")
        with suppress(TimeoutError):
            async with asyncio.timeout(_REPORT_SECONDS):
                await asyncio.gather(*(child.reported.wait() for child in serving))
        asking.tell("show", families=summed((self._counted, *(child.report for child in self._children()))))

    async def _stacks(self) -> None:
        for child in self._children():
            log.info("what worker %d is doing:", child.id)
            child.show_stacks()
            await asyncio.sleep(_STACKS_SECONDS)  # it writes word by word, and into what others write

    def _children(self) -> list[Child]:
        return [child for crew in self._crews for child in crew.children]

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _announce(crew: Crew) -> None:
    settings, host = crew.settings, crew.settings.host
    if host not in _LOOPBACK and not (settings.api_keys or settings.api_key_file):
        log.warning("anybody who reaches %s may ask: no API key is set", host or "any address")
    for words in settings.narrow:
        log.warning("%s", words)
    scheme = "https" if settings.tls_cert else "http"
    workers = f", {settings.workers} workers" if settings.workers > 1 else ""
    if crew.admin:
        log.info("the admin's listener is on http://%s:%d", _shown(crew.admin.host), crew.admin.port)
    log.info("running on %s://%s:%d%s", scheme, _shown(host), crew.listeners.port, workers)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host or "0.0.0.0"
