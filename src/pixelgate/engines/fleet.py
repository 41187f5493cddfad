"""Several engines of one model behind one: choice, health, and another try when nothing was sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from pixelgate.engines.chat_engine import ChatCall, ChatObject
from pixelgate.engines.engine import AnyEngine, Delta, EngineFacts, EngineRequest
from pixelgate.errors import ConfigError, EngineError, EngineUnavailableError, EngineUnreachableError

_LIMITS = ("max_context", "max_images", "max_embeddings_per_image")

log = logging.getLogger(__name__)
_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")


@dataclass(eq=False)
class _Member:
    """An engine with what is known of it. ``usable`` ends with a failure and comes back with a probe."""

    engine: AnyEngine[Any, Any]
    usable: bool = False
    in_flight: int = 0
    probe: asyncio.Task[EngineFacts | None] | None = None
    probe_after: float = 0.0
    trouble: str = ""


class Pool(Generic[_Request, _Answer]):
    """Engines that serve the same model and take the same requests.

    ``probe_interval`` seconds pass between two looks at one that is down.
    """

    def __init__(self, engines: Sequence[AnyEngine[_Request, _Answer]], *, probe_interval: float = 1.0) -> None:
        self._members = [_Member(engine) for engine in engines]
        self._probe_interval = probe_interval
        self._facts: EngineFacts | None = None
        self._turn = 0

    async def connect(self) -> EngineFacts:
        """Ask every engine for its facts, and return what holds for all that answer: of the limits the smallest.

        Raises EngineUnavailableError when none answers, ConfigError when two want different pixels or models.
        """
        self._facts = None
        answers = await asyncio.gather(*(self._describe(member) for member in self._members))
        known = [facts for facts in answers if facts is not None]
        if not known:
            raise EngineUnavailableError("No engine of this model can be reached.")
        shared = next((facts for facts in known if facts.model_type), known[0])  # not every engine tells its type
        for facts in known:
            same_type = facts.model_type == shared.model_type or not (facts.model_type and shared.model_type)
            if facts.pixel_dtype != shared.pixel_dtype or not same_type:
                raise ConfigError(
                    f"The engines of one model differ: {shared.model_type} with {shared.pixel_dtype} pixels, "
                    f"and {facts.model_type} with {facts.pixel_dtype} pixels."
                )
        limits = {name: [n for f in known if (n := getattr(f, name)) is not None] for name in _LIMITS}
        self._facts = replace(shared, **{name: min(values) for name, values in limits.items() if values})
        return self._facts

    async def healthy(self) -> bool:
        """Whether any engine takes requests now. Looks at all of them."""
        await asyncio.gather(*(self._look_at(member) for member in self._members))
        return any(member.usable for member in self._members)

    async def generate(self, request: _Request) -> AsyncGenerator[_Answer, None]:
        """Send ``request`` to the usable engine with the fewest requests under way and yield its answer.

        Another engine is tried only if the request was certainly not sent: one that has ended an engine must not
        reach the next. Raises EngineUnavailableError when no engine is left.
        """
        tried: set[_Member] = set()
        while True:
            member = await self._choose(tried)
            tried.add(member)
            member.in_flight += 1
            try:
                # an Engine's iterator is an async generator, as closing it has to abort the request
                answer = cast("AsyncGenerator[_Answer, None]", member.engine.generate(request))
                async with aclosing(answer):
                    async for part in answer:
                        yield part
                return
            except EngineUnreachableError:
                member.usable = False
            except EngineError:
                member.usable = False
                raise
            finally:
                member.in_flight -= 1

    async def close(self) -> None:
        """Close every engine."""
        probes = [member.probe for member in self._members if member.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await asyncio.gather(*(member.engine.close() for member in self._members))

    async def _choose(self, tried: Collection[_Member]) -> _Member:
        self._turn += 1
        start = self._turn % max(len(self._members), 1)
        left = [m for m in self._members[start:] + self._members[:start] if m not in tried]
        probes = [probe for member in left if not member.usable and (probe := self._probe(member)) is not None]
        if probes and not any(member.usable for member in left):
            await asyncio.wait(probes)
        usable = [member for member in left if member.usable]
        if not usable:
            raise EngineUnavailableError("No engine of this model can take the request now.")
        return min(usable, key=lambda member: member.in_flight)

    def _probe(self, member: _Member) -> asyncio.Task[EngineFacts | None] | None:
        """The look at an engine that is under way, or a new one if the last was long enough ago."""
        if member.probe is not None and not member.probe.done():
            return member.probe
        if time.monotonic() < member.probe_after:
            return None
        member.probe = asyncio.create_task(self._describe(member))
        return member.probe

    async def _look_at(self, member: _Member) -> None:
        if member.usable:
            member.usable = await member.engine.healthy()
        elif (probe := self._probe(member)) is not None:
            await asyncio.wait([probe])

    async def _describe(self, member: _Member) -> EngineFacts | None:
        """Ask an engine for its facts and decide by them whether it is usable; None when it does not answer."""
        try:
            facts = await member.engine.describe()
        except EngineError as error:
            if member.trouble != error.message:  # once, not at every look
                log.warning("%s cannot be used: %s", member.engine.url, error.message)
            member.trouble = error.message
            member.usable, member.probe_after = False, time.monotonic() + self._probe_interval
            return None
        member.trouble = ""
        misfits = _misfits(facts, self._facts) if self._facts is not None else []
        if misfits:
            log.error("%s is left out, it does not fit the others: %s", member.engine.url, "; ".join(misfits))
            member.probe_after = time.monotonic() + self._probe_interval
        member.usable = not misfits
        return facts


class Fleet(Pool[EngineRequest, Delta]):
    """Engines that take prompts and tensors."""


class ChatFleet(Pool[ChatCall, ChatObject]):
    """Engines that take chat requests as clients write them."""


def _misfits(facts: EngineFacts, fleet: EngineFacts) -> list[str]:
    """Why requests made for ``fleet`` must not go to an engine with ``facts``."""
    reasons = [
        f"{name} is {getattr(facts, name)}, not {getattr(fleet, name)}"
        for name in ("pixel_dtype", "model_type")
        if getattr(facts, name) not in (getattr(fleet, name), "") and getattr(fleet, name)
    ]
    for name in _LIMITS:
        own, shared = getattr(facts, name), getattr(fleet, name)
        if own is not None and (shared is None or own < shared):
            reasons.append(f"{name} is {own}, less than {shared or 'no limit'}")
    return reasons
