"""What clients of the soak do: ask well, ask badly, read slowly, and leave at every moment of a request."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import numpy as np
import PIL.Image
from aiohttp import web
from load import PATH, TEXT, must_be_loopback
from pictures import photo, screenshot

SIZES = ((56, 56), (224, 280), (480, 640), (480, 640), (1080, 1920))
FORMATS = ("PNG", "WEBP", "GIF", "BMP", "TIFF")
SHARED = 8  # pictures that are sent again and again


@dataclass(frozen=True)
class Record:
    """A request, and what became of it: a status, "error event" or "left", the client's own doing."""

    kind: str
    start: float
    end: float
    outcome: str


class Pictures:
    """Encoded pictures, made once; `fresh` makes them differ by bytes after their end, which no decoder reads."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._number = rng, itertools.count()
        self._photos = [photo(*size, seed) for seed, size in enumerate(SIZES)]
        self._probe = photo(*SIZES[-1], 100)
        self._large = photo(3000, 4000)
        small = PIL.Image.open(io.BytesIO(photo(240, 320)))
        self._forms = [_encoded(small, form) for form in FORMATS] + [screenshot(720, 1280)]
        self._again = [photo(480, 640, 200 + seed) for seed in range(SHARED)]
        self._damaged = _damaged(self._photos[2], self._forms)

    def good(self) -> bytes:
        """Of any size and format."""
        return (
            self._fresh(self._rng.choice(self._photos)) if self._rng.random() < 0.7 else self._rng.choice(self._forms)
        )

    def again(self) -> bytes:
        """One of a few that everybody sends."""
        return self._rng.choice(self._again)

    def probe(self) -> bytes:
        """Always of the largest size, never twice the same."""
        return self._fresh(self._probe)

    def large(self) -> bytes:
        """Of 12 megapixels."""
        return self._fresh(self._large)

    def damaged(self) -> bytes:
        """What no decoder can read."""
        return self._rng.choice(self._damaged)

    def _fresh(self, jpeg: bytes) -> bytes:
        return jpeg + next(self._number).to_bytes(8, "big")


def _encoded(image: PIL.Image.Image, form: str) -> bytes:
    file = io.BytesIO()
    image.save(file, form)
    return file.getvalue()


def _damaged(jpeg: bytes, others: list[bytes]) -> list[bytes]:
    noise = np.random.default_rng(0).integers(0, 256, 20_000, np.uint8).tobytes()
    cut = [data[: len(data) // 2] for data in (jpeg, *others)]
    return [b"<html>404</html>", jpeg[:30], noise, *cut]


def crowd(side: int, number: int) -> bytes:
    """A bilevel PNG: a few kilobytes that become ``side`` x ``side`` pixels."""
    image = PIL.Image.new("1", (side, side), 1)
    image.paste(0, (number, 0, number + 1, side))
    return _encoded(image, "PNG")


def url_of(data: bytes) -> str:
    """As a data URL, with a label that may be wrong: it is not looked at."""
    return "data:image/jpeg;base64," + base64.b64encode(data).decode()


class Clients:
    """The kinds of requests, against the gateway at ``url``, with pictures also from the host at ``pictures_url``."""

    def __init__(self, url: str, model: str, session: aiohttp.ClientSession, seed: int = 0) -> None:
        must_be_loopback(url)
        self.url, self.model, self.session = url, model, session
        self.rng = random.Random(seed)
        self.pictures = Pictures(self.rng)
        self.records: list[Record] = []
        self.host = ""
        self.kinds: dict[str, tuple[int, Callable[[], Awaitable[str]]]] = {
            "text": (10, self.text),
            "pictures": (20, self.good),
            "the same pictures": (15, self.again),
            "fetched": (8, self.fetched),
            "streams": (10, self.stream),
            "damaged": (15, self.damaged),
            "missing": (4, self.missing),
            "slow readers": (4, self.slow_reader),
            "left in the body": (4, self.leave_in_body),
            "left at once": (4, self.leave_at_once),
            "left in a fetch": (3, self.leave_in_fetch),
            "left soon": (6, self.leave_soon),
            "left in a stream": (5, self.leave_in_stream),
        }

    async def some(self) -> None:
        """One request of a kind by chance."""
        kinds = list(self.kinds)
        [kind] = self.rng.choices(kinds, [self.kinds[each][0] for each in kinds])
        await self.one(kind, self.kinds[kind][1])

    async def one(self, kind: str, ask: Callable[[], Awaitable[str]]) -> str:
        """Do it, and remember what became of it."""
        start = time.perf_counter()
        try:
            outcome = await ask()
        except (aiohttp.ClientError, ConnectionError, TimeoutError, asyncio.IncompleteReadError) as failure:
            outcome = type(failure).__name__
        self.records.append(Record(kind, start, time.perf_counter(), outcome))
        return outcome

    def body(self, *urls: str, **fields: object) -> bytes:
        """A chat request."""
        content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": TEXT}]
        return json.dumps({"model": self.model, "messages": [{"role": "user", "content": content}], **fields}).encode()

    async def post(self, body: bytes, path: str = PATH) -> str:
        """The status, once everything has been read."""
        async with self.session.post(self.url + path, data=io.BytesIO(body)) as reply:
            await reply.read()
            return str(reply.status)

    async def text(self) -> str:
        return await self.post(self.body())

    async def metric(self, name: str) -> float:
        """The sum of a metric's samples, of all workers."""
        async with self.session.get(self.url + "/metrics") as reply:
            lines = (await reply.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")))

    async def health(self) -> str:
        async with self.session.get(self.url + "/health") as reply:
            await reply.read()
            return str(reply.status)

    async def probe(self) -> str:
        return await self.post(self.body(url_of(self.pictures.probe())))

    async def good(self) -> str:
        count = self.rng.choice((1, 1, 1, 2, 4))
        return await self.post(self.body(*(url_of(self.pictures.good()) for _ in range(count))))

    async def again(self) -> str:
        return await self.post(self.body(url_of(self.pictures.again())))

    async def fetched(self) -> str:
        return await self.post(self.body(self.host + "/good", url_of(self.pictures.again())))

    async def damaged(self) -> str:
        return await self.post(self.body(url_of(self.pictures.again()), url_of(self.pictures.damaged())))

    async def missing(self) -> str:
        return await self.post(self.body(self.host + "/missing"))

    async def stream(self, pause: float = 0.0) -> str:
        body = self.body(url_of(self.pictures.again()), stream=True)
        async with self.session.post(self.url + PATH, data=io.BytesIO(body)) as reply:
            answer = b""
            async for piece in reply.content.iter_any():
                answer += piece
                await asyncio.sleep(pause)
        if reply.status == 200 and not answer.endswith(b"data: [DONE]\n\n"):
            return "error event"
        return str(reply.status)

    async def slow_reader(self) -> str:
        """Tensors of two megabytes, read at half a megabyte a second."""
        body = self.body(url_of(self.pictures.again()))
        reader, writer = await self._send(body, PATH + "/render?tensors=1")
        status = (await reader.readline()).split(b" ")[1].decode()
        piece = b"..."
        while piece:
            piece = await reader.read(1 << 16)
            await asyncio.sleep(0.1)
        writer.close()
        return status

    async def leave_in_body(self) -> str:
        body = self.body(url_of(self.pictures.good()))
        return await self._leave(body[: len(body) // 2], len(body), 0.05)

    async def leave_at_once(self) -> str:
        body = self.body(url_of(self.pictures.good()))
        return await self._leave(body, len(body), 0.0)

    async def leave_in_fetch(self) -> str:
        body = self.body(url_of(self.pictures.again()), self.host + "/drip")
        return await self._leave(body, len(body), 0.3)

    async def leave_soon(self) -> str:
        """While pictures are preprocessed, or the engine has them."""
        body = self.body(*(url_of(self.pictures.good()) for _ in range(3)))
        return await self._leave(body, len(body), self.rng.uniform(0.005, 0.2))

    async def leave_in_stream(self) -> str:
        body = self.body(url_of(self.pictures.again()), stream=True)
        reader, writer = await self._send(body)
        await reader.readuntil(b"}\n\n")
        writer.close()
        return "left"

    async def _send(
        self, body: bytes, path: str = PATH, length: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A request on a connection of its own, which the gateway closes when it has answered."""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 17)
        lines = [
            f"POST {path} HTTP/1.1",
            f"Host: {host}",
            "Connection: close",
            f"Content-Length: {length or len(body)}",
        ]
        writer.write("".join(line + "\r\n" for line in [*lines, ""]).encode() + body)
        await writer.drain()
        return reader, writer

    async def _leave(self, body: bytes, length: int, after: float) -> str:
        _, writer = await self._send(body, length=length)
        await asyncio.sleep(after)
        writer.transport.abort()
        return "left"


async def host(clients: Clients) -> web.AppRunner:
    """A picture host on loopback: /good, /missing, and /drip, which never ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path == "/good":
            return web.Response(body=clients.pictures.probe())
        if request.path == "/missing":
            raise web.HTTPNotFound
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"\x89PNG")
            await asyncio.sleep(0.5)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    clients.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    return runner
