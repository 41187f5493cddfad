"""The workers of one configuration: started together or not at all, and replaced when they die."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import time
from collections.abc import Callable

from pixelgate.errors import ConfigError
from pixelgate.gateway.child import Child
from pixelgate.gateway.listening import Listeners
from pixelgate.gateway.settings import GatewaySettings

_STEADY_SECONDS = 10.0  # a worker that served for less has failed to start, in effect
_MOST_TRIES = 5
_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds; doubled from try to try
_LONGEST_ANSWER = 600.0  # seconds; by then calls of engines have ended
_LAST_SECONDS = 2.0  # beyond shutdown_timeout, until a worker is killed

log = logging.getLogger(__name__)


class Crew:
    """``settings.workers`` children. ``asks`` is called when one wants to show metrics, ``lost`` when one has ended."""

    def __init__(
        self,
        settings: GatewaySettings,
        listeners: Listeners,
        admin: Listeners | None,
        *,
        asks: Callable[[Child], None],
        lost: Callable[[Child], None],
    ) -> None:
        self.settings = settings
        self.listeners = listeners
        self.admin = admin
        self.children: list[Child] = []
        self.keepers: list[asyncio.Task[None]] = []
        self._draining = False
        self._sockets_stay = False
        self._share = settings.share()
        self._asks = asks
        self._lost = lost

    async def start(self) -> None:
        """Start all, and let them serve once every one is ready. Raises ConfigError if one cannot be."""
        self.children = [self._child(number) for number in range(self.settings.workers)]
        await asyncio.gather(*(child.until(child.ready) for child in self.children))
        for child in self.children:
            child.tell("serve")
        await asyncio.gather(*(child.until(child.serving) for child in self.children))
        self.keepers = [asyncio.create_task(self._keep(number)) for number in range(len(self.children))]

    def lend_sockets(self, lent: bool) -> None:
        """Whether others begin to use the sockets, which then stay as they are: they go on to whoever replaces one."""
        self._sockets_stay = lent

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send all a signal, by default the one that has them finish what they do. Nobody is replaced any more."""
        self._draining = False
        self._leave()
        for child in self.children:
            child.signal(number)

    def drain(self) -> None:
        """Have all end without refusing anybody, since others take their connections."""
        self._draining = True
        self._leave()
        for child in self.children:
            if child.serves:
                child.tell("drain")
            else:
                child.signal(signal.SIGTERM)

    async def ended(self) -> None:
        """Wait for the end of all, which has been asked for."""
        if self._draining:
            patience = self.settings.keep_alive_timeout + _LONGEST_ANSWER + _LAST_SECONDS
        else:
            patience = self.settings.drain_delay + self.settings.shutdown_timeout + _LAST_SECONDS
        watching = [asyncio.create_task(child.watched()) for child in self.children if child.serves]
        await asyncio.gather(*(child.end(patience) for child in self.children))
        for watch in watching:
            watch.cancel()

    def _leave(self) -> None:
        for keeper in self.keepers:
            if not keeper.cancel() and not keeper.cancelled():
                keeper.exception()  # others serve by now

    def _child(self, number: int) -> Child:
        return Child(
            self._share,
            self.listeners.of(number, self.settings.workers),
            self.admin.of(0, 1) if self.admin else (),
            asks=self._asks,
            lost=self._lost,
        )

    async def _serving(self, child: Child) -> None:
        await child.until(child.ready)
        child.tell("serve")
        await child.until(child.serving)

    async def _keep(self, number: int) -> None:
        """Have a worker at this place. Raises ConfigError when it is hopeless: nobody serves, and nobody can start."""
        failures = 0
        while True:
            child, since = self.children[number], math.inf
            if not child.ended.is_set():
                try:
                    await self._serving(child)
                    since = time.monotonic()
                    await child.watched()
                except ConfigError as failure:
                    log.error("worker %d did not start: %s", child.id, failure.message)
            failures = 0 if time.monotonic() - since > _STEADY_SECONDS else failures + 1
            if failures >= _MOST_TRIES and not any(each.serves for each in self.children):
                raise ConfigError("no worker serves any more, and new ones end as soon as they start; the log says why")
            if not self._sockets_stay:
                self.listeners.renew(number, self.settings.workers)
            pause = min(_PAUSE * 2.0 ** min(failures - 1, 10), _LONGEST_PAUSE) if failures else 0.0
            log.warning("worker %d is gone; another one is started in %g seconds", child.id, pause)
            await asyncio.sleep(pause)
            self.children[number] = self._child(number)
