"""What all requests share, and what one request holds of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pixelgate.budget import Budget, Share
from pixelgate.errors import PixelgateError
from pixelgate.fairness import Owner
from pixelgate.gateway.idle import Activity
from pixelgate.gateway.memory import Memory
from pixelgate.gateway.metrics import Metrics
from pixelgate.gateway.phases import Phases, open_tracing
from pixelgate.gateway.settings import GatewaySettings
from pixelgate.gateway.threads import Threads
from pixelgate.media import files, source
from pixelgate.media.decode import Backend
from pixelgate.media.fetch import Fetcher
from pixelgate.media.isolation import Isolation

if TYPE_CHECKING:
    from pixelgate.gateway.tracing import Tracing

_T = TypeVar("_T")
SMALL_FILE = 512 << 10  # bytes; base64 and a digest of them take less than half a millisecond


@dataclass(frozen=True)
class Held:
    """What a request holds: encoded bytes until its tensors are made, and these until the engine has read them."""

    owner: Owner
    encoded: Share
    tensors: Share
    phases: Phases


@dataclass(frozen=True)
class Services:
    """What all requests share.

    ``errands`` is for what is over in a moment: it has threads of its own, so that no prompt waits for the pictures of
    others, which take up to seconds on ``threads``.
    """

    settings: GatewaySettings
    fetcher: Fetcher
    isolation: Isolation
    threads: Threads
    errands: Threads
    memory: Memory
    metrics: Metrics
    activity: Activity
    tracing: Tracing | None
    encoded: Budget
    pixels: Budget
    tensors: Budget
    decoders: Budget
    one_a_turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, settings: GatewaySettings) -> Services:
        """What a gateway with these settings shares. Raises ConfigError where traces need an extra that is missing."""

        def budget(unit: str, total: int) -> Budget:
            return Budget(unit, total, settings.budget_wait, settings.max_queue)

        metrics = Metrics()
        return cls(
            settings=settings,
            fetcher=Fetcher(settings.media),
            isolation=Isolation(settings.media, settings.threads),
            threads=Threads(settings.threads, metrics.thread_wait.observe),
            errands=Threads(settings.threads, metrics.thread_wait.observe),
            memory=Memory(settings, metrics),
            metrics=metrics,
            activity=Activity(),
            tracing=open_tracing(settings),
            encoded=budget("bytes", settings.max_bytes_in_flight),
            pixels=budget("pixels", settings.max_pixels_in_flight),
            tensors=budget("bytes of tensors", settings.max_tensor_bytes_in_flight),
            decoders=Budget("decoders", settings.threads),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open what has to be, and close it all in reverse."""
        async with AsyncExitStack() as stack:
            if self.tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self.tracing.close)
            stack.callback(self.threads.shutdown)
            stack.callback(self.errands.shutdown)
            await stack.enter_async_context(self.fetcher)
            await stack.enter_async_context(self.isolation)
            yield

    async def file(self, url: str, held: Held) -> bytes:
        """The encoded picture behind a reference, counted against what its request holds. Raises RequestError."""
        policy, owner = self.settings.media, held.owner
        match source.parse(url, policy):
            case source.DataSource() as inside:  # counted with the body
                small = inside.base64 and inside.nbytes <= SMALL_FILE
                return await self.errand(owner, source.payload, inside, policy, at_once=small)
            case source.FileSource() as path:
                data = await self.errands.run(owner, files.read, path, policy)
                await held.encoded.take(len(data))
                return data
            case source.UrlSource() as outside:
                if (kept := self.memory.file(owner.client, outside)) is not None:
                    await held.encoded.take(len(kept))
                    return kept
                fetched = await self.fetcher.get(outside, taking=held.encoded.take)
                self.memory.keep_file(owner.client, outside, fetched)
                return fetched.data

    async def errand(self, owner: Owner, work: Callable[..., _T], *arguments: Any, at_once: bool) -> _T:
        """The result of short work: on a thread, or ``at_once`` where it is over before a thread would have begun.

        At once is one piece of work in a turn of the event loop, however many requests and pictures have some.
        """
        if at_once:
            async with self.one_a_turn:
                result = work(*arguments)
                await asyncio.sleep(0)
            return result
        return await self.errands.run(owner, work, *arguments)

    async def apart(
        self, owner: Owner, work: Callable[[bytes, Backend], Awaitable[_T]], data: bytes, decoding: Backend
    ) -> _T:
        """What a decoder process makes of a file: ``work`` is of `Isolation`, whose processes are given in turn."""
        with self.decoders.share(owner) as decoder:
            await decoder.take(1)
            return await work(data, decoding)

    @contextmanager
    def holding(self, owner: Owner, phases: Phases) -> Iterator[Held]:
        """What a request holds, given back however it ends."""
        with (
            self.encoded.share(owner, phases.waiting("bytes")) as encoded,
            self.tensors.share(owner, phases.waiting("tensors")) as tensors,
        ):
            yield Held(owner, encoded, tensors, phases)


async def together(work: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Results of all, in order; the first failure cancels the rest and is raised."""
    coroutines = list(work)
    if len(coroutines) <= 1:
        return [await coroutine for coroutine in coroutines]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


@contextmanager
def naming(param: str) -> Iterator[None]:
    """Errors raised inside get ``param``, the place in the request that they are about."""
    try:
        yield
    except PixelgateError as error:
        error.param = error.param or param
        raise
