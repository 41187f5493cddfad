"""Load on an OpenAI-compatible gateway: bounded, its bodies made beforehand, to loopback only."""

from __future__ import annotations

import asyncio
import base64
import io
import ipaddress
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import aiohttp
from processes import available_memory

PATH = "/v1/chat/completions"
MIN_FREE = 3 << 30  # bytes; with less no request is sent any more
TEXT = "Describe this image in one short sentence."


@dataclass
class Outcome:
    """What became of a round's requests: seconds of those that went well, and how often what else happened."""

    seconds: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    wall: float = 0.0

    def at(self, share: float) -> float:
        """A quantile, in seconds."""
        ordered = sorted(self.seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def median(self) -> float:
        """In seconds."""
        return statistics.median(self.seconds)


def body(model: str, pictures: Sequence[bytes], text: str = TEXT, **fields: object) -> bytes:
    """A chat request with its pictures as data URLs before the text."""
    content: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64," + base64.b64encode(data).decode()}}
        for data in pictures
    ]
    content.append({"type": "text", "text": text})
    options = {"max_tokens": 16, "temperature": 0, "stream": False} | fields
    return json.dumps({"model": model, "messages": [{"role": "user", "content": content}], **options}).encode()


def must_be_loopback(url: str) -> None:
    """Raise ValueError for any other host: this is no tool against anybody else's server."""
    if not ipaddress.ip_address(urlsplit(url).hostname or "").is_loopback:
        raise ValueError(f"{url} is not on a loopback address")


async def drive(url: str, bodies: Sequence[bytes], concurrency: int, *, seconds: float = 120.0) -> Outcome:
    """Send every body once, ``concurrency`` at a time, each in turn on a connection that is kept.

    No request begins after ``seconds``, or once the machine has less than `MIN_FREE` bytes left; that is an error.
    """
    must_be_loopback(url)
    outcome, left, start = Outcome(), list(reversed(bodies)), time.perf_counter()

    async def client(session: aiohttp.ClientSession) -> None:
        while left:
            if time.perf_counter() - start > seconds:
                outcome.errors["out of time"] += 1
                return
            if available_memory() < MIN_FREE:
                outcome.errors["out of memory"] += 1
                return
            sent = left.pop()
            before = time.perf_counter()
            try:
                # as a file: aiohttp writes it in pieces, so that the other clients are not kept from theirs
                async with session.post(url + PATH, data=io.BytesIO(sent), headers=_JSON) as reply:
                    answer = await reply.read()
            except (aiohttp.ClientError, TimeoutError) as failure:
                outcome.errors[type(failure).__name__] += 1
                continue
            if reply.status == 200:
                outcome.seconds.append(time.perf_counter() - before)
            else:
                outcome.errors[f"{reply.status} {answer[:200].decode(errors='replace')}"] += 1

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
    outcome.wall = time.perf_counter() - start
    return outcome


_JSON = {"Content-Type": "application/json"}
