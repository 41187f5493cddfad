"""Picture hosts that drip, stall or never answer, and what a gateway's other clients notice of them.

    python benchmarks/slow_hosts.py [--fetches 50] [--timeout 5]

Runs an engine without a model, a gateway and a picture host, all on loopback. Every slow fetch has to end with its
deadline and a second at most; meanwhile requests with data URLs have to keep their latency (median within half as much
again) and /health has to answer. Ends with 1 if not.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from pixelgate.demo import CHECKPOINT, PICTURE

SERVE = "import sys; from pixelgate.cli import main; sys.exit(main())"
CONFIG = """
port = {port}
[[model]]
name = "demo"
checkpoint = {checkpoint}
engines = ["{engine}"]
[media]
allow_private = ["127.0.0.1"]
fetch_timeout = {timeout}
"""


@asynccontextmanager
async def running(*command: str, **options: object) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, *command, **options)
    try:
        yield process
    finally:
        process.terminate()
        await process.wait()


async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Drip a byte every half second, stall in the body, or never answer."""
    path = (await reader.readuntil(b"\r\n\r\n")).split(b" ")[1]
    head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nContent-Length: 1000\r\n\r\n"
    try:
        if path != b"/silent":
            writer.write(head + b"\x89PNG")
        while path == b"/drip":
            writer.write(b"\0")
            await writer.drain()
            await asyncio.sleep(0.5)
        await reader.read()  # until the other side gives up
    except (ConnectionError, asyncio.CancelledError):
        pass  # the gateway gave up, or it is over
    finally:
        writer.close()


class Client:
    def __init__(self, session: aiohttp.ClientSession, port: int) -> None:
        self.session = session
        self.base = f"http://127.0.0.1:{port}"

    async def ask(self, url: str) -> tuple[int, float]:
        """Status and seconds of a request with one picture."""
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
        start = time.perf_counter()
        async with self.session.post(self.base + "/v1/chat/completions", json=body) as response:
            await response.read()
            return response.status, time.perf_counter() - start

    async def health(self) -> float:
        start = time.perf_counter()
        async with self.session.get(self.base + "/health") as response:
            await response.read()
            if response.status != 200:
                raise RuntimeError(f"/health answered {response.status}")
            return time.perf_counter() - start

    async def ready(self) -> None:
        for _ in range(600):
            try:
                await self.health()
                return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)
        raise RuntimeError("the gateway did not start")


def figures(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    at95 = ordered[int(0.95 * (len(ordered) - 1))]
    return f"p50 {1e3 * statistics.median(ordered):6.1f} ms, p95 {1e3 * at95:6.1f} ms ({len(ordered)} requests)"


async def measure(client: Client, host: str, fetches: int, deadline: float) -> bool:
    data = "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode()

    async def good(until: float) -> list[float]:
        taken = []
        while time.perf_counter() < until:
            status, seconds = await client.ask(data)
            assert status == 200, status
            taken.append(seconds)
            await asyncio.sleep(0.01)
        return taken

    await good(time.perf_counter() + 1)
    before = await good(time.perf_counter() + deadline * 0.8)
    paths = ("/drip", "/silent", "/stall")
    tasks = [asyncio.create_task(client.ask(host + paths[i % 3])) for i in range(fetches)]
    await asyncio.sleep(0.2)
    probes: list[float] = []

    async def probe() -> None:
        while True:
            probes.append(await client.health())
            await asyncio.sleep(0.05)

    probing = asyncio.create_task(probe())
    during = await good(time.perf_counter() + deadline * 0.8)
    outcomes = await asyncio.gather(*tasks)
    probing.cancel()
    statuses, seconds = {status for status, _ in outcomes}, [taken for _, taken in outcomes]
    ratio = statistics.median(during) / statistics.median(before)
    print(f"data URLs alone                 {figures(before)}")
    print(f"beside {fetches:3d} slow fetches         {figures(during)}, {ratio:.2f} of the median")
    print(f"/health beside them             {figures(probes)}, at most {1e3 * max(probes):.0f} ms")
    print(f"slow fetches                    status {statuses}, {min(seconds):.2f} to {max(seconds):.2f} s")
    return statuses == {400} and max(seconds) < deadline + 1 and ratio < 1.5


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetches", type=int, default=50)
    parser.add_argument("--timeout", type=float, default=5.0, help="the gateway's fetch_timeout")
    parser.add_argument("--port", type=int, default=18080)
    arguments = parser.parse_args()
    host = await asyncio.start_server(slow, "127.0.0.1", 0)
    engine_command = ("-m", "pixelgate.testing.strict_engine", "--checkpoint", os.fspath(CHECKPOINT))
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        async with (
            host,
            running(*engine_command, "--device-normalize", stdout=subprocess.PIPE) as engine,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            assert engine.stdout is not None
            url = (await engine.stdout.readline()).decode().strip()
            checkpoint = json.dumps(os.fspath(CHECKPOINT))
            timeout = arguments.timeout
            text = CONFIG.format(port=arguments.port, checkpoint=checkpoint, engine=url, timeout=timeout)
            await asyncio.to_thread(Path(config.name).write_text, text)
            async with running("-c", SERVE, "serve", "--config", config.name, stderr=subprocess.DEVNULL):
                client = Client(session, arguments.port)
                await client.ready()
                slow_host = f"http://127.0.0.1:{host.sockets[0].getsockname()[1]}"
                good = await measure(client, slow_host, arguments.fetches, timeout)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
