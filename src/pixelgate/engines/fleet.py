"""Several engines of one model behind one: choice, health, and another try when none was begun."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Generic, Literal, TypeVar, cast

from pixelgate.engines.balance import Balance
from pixelgate.engines.chat_engine import ChatCall, ChatObject
from pixelgate.engines.engine import AnyEngine, Delta, EngineFacts, EngineRequest, other_model
from pixelgate.errors import (
    ConfigError,
    EngineDeclinedError,
    EngineError,
    EngineUnavailableError,
    EngineUnreachableError,
    NotCarriedError,
    NotCarriedNowError,
    RequestError,
)

Outcome = Literal["answered", "failed", "refused", "declined", "unreachable", "not_carried", "aborted"]
Heard = Callable[[str, Outcome, float], None]

LOOK_INTERVAL = 2.0  # seconds between two looks at every engine
BREAKER_FAILURES = 5  # requests that fail one after another, until an engine is left alone
BREAKER_PAUSE = 15.0  # seconds, for which it is

_NOT_NOW = "The engines of this model that could carry the request cannot take it now."
_LIMITS = ("max_context", "max_images", "max_embeddings_per_image", "max_pixel_bytes")

log = logging.getLogger(__name__)
_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class EngineState:
    """What is known of an engine: its name, whether it gets requests, how many it has, and failed on in a row."""

    name: str
    usable: bool
    in_flight: int
    failures: int


@dataclass(eq=False)
class _Member:
    """An engine with what is known of it. ``usable`` ends with a failure and comes back with a probe.

    ``failures`` counts requests that failed one after another; ``leaving`` is an engine that is no longer found, and is
    closed when its last request has ended.
    """

    engine: AnyEngine[Any, Any]
    number: int
    usable: bool = False
    facts: EngineFacts | None = None
    in_flight: int = 0
    failures: int = 0
    leaving: bool = False
    probe: asyncio.Task[None] | None = None
    probe_after: float = 0.0
    trouble: str = ""

    @property
    def name(self) -> str:
        """What the engine is called where its address must not be seen."""
        return f"{self.engine.url.partition(':')[0]}-{self.number}"


class Pool(ABC, Generic[_Request, _Answer]):
    """Engines that serve the same model and take the same requests; ``find``, where there may be others later, looks.

    Every engine is looked at every ``look_interval`` seconds once `connect` has been called; between two looks at one
    that is down pass at least ``probe_interval``. One on which ``breaker_failures`` requests failed in a row is left
    alone for ``breaker_pause`` seconds, however healthy it says it is.

    An engine's name is its scheme and its number: its place, or, of one that was found later, the first that was free.
    """

    def __init__(
        self,
        engines: Sequence[AnyEngine[_Request, _Answer]],
        *,
        find: Callable[[], Awaitable[Sequence[AnyEngine[_Request, _Answer]]]] | None = None,
        balance: Balance = "least-load",
        probe_interval: float = 1.0,
        look_interval: float = LOOK_INTERVAL,
        breaker_failures: int = BREAKER_FAILURES,
        breaker_pause: float = BREAKER_PAUSE,
    ) -> None:
        self._members = [_taken_on(engine, number) for number, engine in enumerate(engines)]
        self._find = find
        self._balance = balance
        self._probe_interval = probe_interval
        self._look_interval = look_interval
        self._breaker_failures = breaker_failures
        self._breaker_pause = breaker_pause
        self._facts: EngineFacts | None = None
        self._turn = 0
        self._looking: asyncio.Task[None] | None = None

    @property
    def facts(self) -> EngineFacts:
        """What holds for all engines that can be used now, of the limits the smallest: requests are made for this.

        While there is none, what held last. Known after `connect`.
        """
        assert self._facts is not None
        return self._facts

    @property
    def troubles(self) -> list[str]:
        """Why engines cannot be used, without their addresses."""
        return sorted({member.trouble for member in self._members if not member.usable and member.trouble})

    @property
    def states(self) -> list[EngineState]:
        """What is known of every engine now."""
        return [EngineState(m.name, m.usable, m.in_flight, m.failures) for m in self._members]

    async def connect(self) -> EngineFacts:
        """Ask every engine for its facts, and return those that hold for all that answer.

        Raises EngineUnavailableError when none answers, ConfigError when two want different pixels or models: pictures
        are prepared before an engine is chosen.
        """
        await self._refresh()
        answers = await asyncio.gather(*(self._ask(member) for member in self._members))
        known = [facts for facts in answers if facts is not None]
        if not known:
            raise EngineUnavailableError("No engine of this model can be reached.")
        reference = _telling(known)
        for facts in known:
            if difference := _difference(facts, reference):
                raise ConfigError(f"The engines of one model differ: {difference}.")
        for member, answer in zip(self._members, answers, strict=True):
            member.usable, member.facts = answer is not None, answer
        self._facts = _shared(known)
        self._looking = self._looking or asyncio.create_task(self._look())
        return self._facts

    async def healthy(self) -> bool:
        """Whether any engine takes requests now. Looks at all of them."""
        await asyncio.gather(*(self._look_at(member) for member in self._members))
        return any(member.usable for member in self._members)

    async def generate(self, request: _Request, heard: Heard = lambda *told: None) -> AsyncGenerator[_Answer, None]:
        """Send ``request`` to a usable engine and yield its answer.

        ``heard`` is told of each that was tried: its name, what came of it, and after how many seconds.

        Another engine is tried only if the request was certainly not sent, or turned away by an engine that is well:
        one that has ended an engine must not reach the next. When no engine is left raises EngineUnavailableError, or
        NotCarriedError if one's protocol could not carry the request: NotCarriedNowError while there are others.
        """
        tried: set[_Member] = set()
        not_carried: NotCarriedError | None = None
        protocols: set[type] = set()  # those that could not carry it; each is a class
        self._turn += 1  # once for a request, or one that is turned away would meet the same engine first every time
        turn = self._turn
        while True:
            try:
                member = await self._choose(request, turn, tried)
            except EngineUnavailableError as error:
                if not_carried and any(type(member.engine) not in protocols for member in self._members):
                    raise NotCarriedNowError(_NOT_NOW, param=not_carried.param) from None
                raise not_carried or error from None
            tried.add(member)
            member.in_flight += 1
            outcome: Outcome = "aborted"
            start = time.perf_counter()
            try:
                # an Engine's iterator is an async generator, as closing it has to abort the request
                answer = cast("AsyncGenerator[_Answer, None]", member.engine.generate(request))
                async with aclosing(answer):
                    async for part in answer:
                        yield part
                outcome, member.failures = "answered", 0
                return
            except GeneratorExit:  # at a part of the answer; whoever has all that was wanted reads no further
                outcome, member.failures = "answered", 0
                raise
            except NotCarriedError as error:
                outcome, not_carried = "not_carried", error
                protocols.add(type(member.engine))
            except EngineDeclinedError as error:
                outcome = "declined"
                log.warning("%s turned a request away: %s", member.engine.url, error.message)
            except EngineUnreachableError as error:
                outcome = "unreachable"
                self._leave_out(member, error.message, wait=0.0)
                self._probe(member)
            except EngineError as error:
                outcome = "failed"
                self._failed(member, error)
                raise
            except RequestError:
                outcome = "refused"
                raise
            finally:
                member.in_flight -= 1
                heard(member.name, outcome, time.perf_counter() - start)
                if member.leaving and not member.in_flight:
                    await member.engine.close()

    async def close(self) -> None:
        """Close every engine."""
        tasks = [member.probe for member in self._members if member.probe is not None]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    @abstractmethod
    def _picture(self, request: _Request) -> str:
        """The identity of the first picture of a request; empty where it has none."""

    async def _choose(self, request: _Request, turn: int, tried: Collection[_Member]) -> _Member:
        start = turn % max(len(self._members), 1)
        left = [m for m in self._members[start:] + self._members[:start] if m not in tried]
        probes = [probe for member in left if not member.usable and (probe := self._probe(member)) is not None]
        if probes and not any(member.usable for member in left):
            await asyncio.wait(probes)
        usable = [member for member in left if member.usable]
        if not usable:
            raise EngineUnavailableError("No engine of this model can take the request now.")
        if self._balance == "image-affinity" and (picture := self._picture(request)):
            return max(usable, key=lambda member: _affinity(member.engine.url, picture))
        if self._balance == "round-robin":
            return usable[0]
        return min(usable, key=lambda member: member.in_flight)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self._look_interval)
            try:
                await self._refresh()
                await self.healthy()
            except ConfigError as error:
                log.error("the engines that were found last are kept: %s", error.message)
            except Exception:  # whatever it is, the next look must not be missed
                log.exception("a look at the engines failed")

    async def _refresh(self) -> None:
        """Take on engines that are new; those that are gone finish what they have begun, and get nothing more."""
        if self._find is None:
            return
        engines = await self._find()
        known = {member.engine: member for member in self._members}
        free = (number for number in count() if number not in {m.number for m in known.values()})
        self._members = [known.get(engine) or _taken_on(engine, next(free)) for engine in engines]
        for member in known.values():
            if member in self._members:
                continue
            log.info("%s is no longer an engine of this model", member.engine.url)
            member.leaving = True
            if not member.in_flight:
                await member.engine.close()

    def _probe(self, member: _Member) -> asyncio.Task[None] | None:
        """The look at an engine that is under way, or a new one if the last was long enough ago."""
        if member.probe is not None and not member.probe.done():
            return member.probe
        if time.monotonic() < member.probe_after:
            return None
        member.probe = asyncio.create_task(self._describe(member))
        return member.probe

    async def _look_at(self, member: _Member) -> None:
        if member.usable:
            if not await member.engine.healthy() and member.usable:
                self._leave_out(member, "The engine does not take requests now.")
        elif (probe := self._probe(member)) is not None:
            await asyncio.wait([probe])

    async def _ask(self, member: _Member) -> EngineFacts | None:
        """An engine's facts; None when it does not answer."""
        try:
            facts = await member.engine.describe()
        except EngineError as error:
            self._leave_out(member, error.message)
            return None
        return facts

    async def _describe(self, member: _Member) -> None:
        """Ask an engine for its facts and decide by them whether it is usable.

        One of another model is not, nor is one that wants other pixels than the others that are usable. Without others
        its facts are those of the fleet from now on.
        """
        facts = await self._ask(member)
        if facts is None:
            return
        others = [m.facts for m in self._members if m is not member and m.usable and m.facts is not None]
        before = self._facts or facts
        difference = _difference(facts, _telling(others) if others else replace(before, pixel_dtype=facts.pixel_dtype))
        if difference:
            self._leave_out(member, f"It does not fit the others: {difference}.")
            return
        if member.trouble:
            log.info("%s can be used again", member.engine.url)
        member.usable, member.facts, member.trouble = True, facts, ""
        self._facts = _shared([facts, *others])
        changes = [
            f"{name} is {now}, was {was}"
            for name in ("pixel_dtype", *_LIMITS)
            if (now := getattr(self._facts, name)) != (was := getattr(before, name))
        ]
        if changes:
            log.warning(
                "since %s is there requests are made for other engines: %s", member.engine.url, ", ".join(changes)
            )

    def _failed(self, member: _Member, error: EngineError) -> None:
        """Note a request that an engine failed on. Those that were under way with it at that moment do not count."""
        if not member.usable:
            return
        member.failures += 1
        tripped = member.failures >= self._breaker_failures
        if tripped:
            log.error(
                "%s failed on %d requests in a row and is left alone for %g seconds",
                member.engine.url,
                member.failures,
                self._breaker_pause,
            )
        self._leave_out(member, error.message, wait=self._breaker_pause if tripped else 0.0)

    def _leave_out(self, member: _Member, why: str, wait: float | None = None) -> None:
        """Do not use an engine until it has been asked again, after ``wait`` seconds at the earliest."""
        if member.trouble != why:  # once, not at every look
            log.error("%s cannot be used: %s", member.engine.url, why)
        member.usable, member.trouble = False, why
        member.probe_after = time.monotonic() + (self._probe_interval if wait is None else wait)


class Fleet(Pool[EngineRequest, Delta]):
    """Engines that take prompts and tensors."""

    def _picture(self, request: EngineRequest) -> str:
        return request.images.hashes[0] if request.images is not None else ""


class ChatFleet(Pool[ChatCall, ChatObject]):
    """Engines that take chat requests as clients write them."""

    def _picture(self, request: ChatCall) -> str:
        return request.picture


def _taken_on(engine: AnyEngine[Any, Any], number: int) -> _Member:
    member = _Member(engine, number)
    log.info("%s is called %s", engine.url, member.name)
    return member


def _telling(known: Sequence[EngineFacts]) -> EngineFacts:
    """One that tells its model's type, if there is one: not every engine does."""
    return next((facts for facts in known if facts.model_type), known[0])


def _shared(known: Sequence[EngineFacts]) -> EngineFacts:
    """What holds for all: of the limits the smallest."""
    limits = {name: [n for facts in known if (n := getattr(facts, name)) is not None] for name in _LIMITS}
    smallest = {name: min(values) for name, values in limits.items() if values}
    return replace(_telling(known), takes_mixed_shapes=all(facts.takes_mixed_shapes for facts in known), **smallest)


def _difference(facts: EngineFacts, others: EngineFacts) -> str:
    """Why the same request cannot go to an engine with ``facts`` and to ``others``. Empty when it can.

    Engines on several machines may have the same checkpoint under several paths.
    """
    reasons = [other_model(replace(facts, checkpoint=""), others)]
    if facts.pixel_dtype != others.pixel_dtype:
        reasons.append(f"one wants {facts.pixel_dtype} pixels, another {others.pixel_dtype}")
    return "; ".join(reason for reason in reasons if reason)


def _affinity(url: str, picture: str) -> bytes:
    """How much an engine is meant for a picture: the largest wins, and goes on winning when others come or go."""
    return hashlib.blake2b(f"{url} {picture}".encode(), digest_size=8).digest()
