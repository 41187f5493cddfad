"""A gateway under mixed load for half an hour: it has to answer well, and in the end to hold what it held before.

    python benchmarks/soak.py [--minutes 30] [--workers 2] [--clients 6] [--serve-args='...']

Clients ask for pictures of every size and format, send damaged ones, read slowly, and leave in every phase of a
request, while the engine is killed and started again. Everything is on loopback. Ends with 1 and says why unless

* no answer is a 5xx, and no stream ends with an error, but while the engine was gone;
* what is good is answered with 200, what is damaged with 400;
* the gateway answers again within RECOVERY seconds of the engine's return;
* p99 of /health, asked every 50 ms, is at most 100 ms;
* p99 of the probe, one picture of the largest size at a time, is at most 3 times its median;
* a crowd of large pictures stays within the memory that its pixels in flight allow;
* memory, descriptors, threads, shared memory and requests in flight are back where they were after the warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import aiohttp
from contenders import SERVE, free_port
from load import MIN_FREE
from processes import available_memory, forget_peaks, memory, running
from soak_checks import Held, Verdict, judge
from soak_clients import Clients, Record, crowd, host, url_of

from pixelgate.demo import CHECKPOINT

RECOVERY = 20.0  # seconds; an engine that failed five times in a row is left alone for 15
PIXELS = 128_000_000  # in flight; a crowd's pictures have half of that each
BYTES_A_PIXEL = 12  # a decoded picture, its turned or converted copy, and its tensor
KEPT = 512 << 20  # of freed memory, for the next picture: what pixelgate.process.keep_memory allows a worker
CROWD = 8000
PAUSE = 0.25  # seconds between two requests of a client, so that the machine is busy but not drowned
WARM_UP = 0.25  # of the time
ALONE = 15.0  # seconds
QUIET = 8.0  # seconds; longer than connections are kept


class Engine:
    """A strict stand-in at a fixed port, which can be killed. ``gone``: from when to when it was of no use.

    ``missed`` are the seconds from each return to the gateway's next answer.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.gone: list[tuple[float, float]] = []
        self.missed: list[float] = []
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = ["-m", "pixelgate.testing.strict_engine", "--checkpoint", os.fspath(CHECKPOINT), "--device-normalize"]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *command, "--port", str(self.port), "--delay", "0.002", stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        await self._process.stdout.readline()

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.wait()

    def caused(self, record: Record) -> bool:
        """Whether a request was under way while it was gone."""
        return any(record.start < until and record.end > since for since, until in self.gone)


@contextlib.asynccontextmanager
async def gateway(engine: Engine, workers: int, further: list[str], log: Path) -> AsyncIterator[tuple[int, str]]:
    """`pixelgate serve` as (process id, URL)."""
    port = free_port()
    command = ["-c", SERVE, "serve", CHECKPOINT, "--name", "demo", "--engine", f"vllm+grpc://127.0.0.1:{engine.port}"]
    command += ["--port", str(port), "--workers", str(workers), "--max-pixels-in-flight", str(PIXELS)]
    command += ["--media-allow-private", "127.0.0.1", "--budget-wait", "60", *further]
    with log.open("wb") as output:
        async with running(sys.executable, *command, stdout=output, stderr=output) as process:
            yield process.pid, f"http://127.0.0.1:{port}"


async def answers(clients: Clients, within: float) -> bool:
    """Whether within ``within`` seconds the gateway answers a request, and each of its workers uses the engine."""
    until = time.perf_counter() + within
    while time.perf_counter() < until:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            # the metric is the smallest of the workers, who each find out for themselves
            if await clients.text() == "200" and await clients.metric("pixelgate_engine_usable") == 1:
                return True
        await asyncio.sleep(0.1)
    return False


async def restart(engine: Engine, clients: Clients, every: float, verdict: Verdict) -> None:
    """Kill the engine now and then."""
    while True:
        await asyncio.sleep(every)
        engine.gone.append((time.perf_counter(), float("inf")))
        await engine.kill()
        await asyncio.sleep(clients.rng.uniform(0.0, 3.0))
        await back(engine, clients, verdict)


async def back(engine: Engine, clients: Clients, verdict: Verdict) -> None:
    """Start the engine again, and wait until the gateway has noticed."""
    await engine.start()
    since = time.perf_counter()
    verdict.need(await answers(clients, RECOVERY), f"no answer {RECOVERY:g} s after the engine's return")
    engine.missed.append(time.perf_counter() - since)
    engine.gone[-1] = (engine.gone[-1][0], time.perf_counter())


async def forever(ask: Callable[[], Awaitable[object]], pause: float) -> None:
    """One client: request after request."""
    while available_memory() > MIN_FREE:
        await ask()
        await asyncio.sleep(pause * random.uniform(0.5, 1.5))
    raise MemoryError("the machine has too little memory left")


def probe(clients: Clients, group: asyncio.TaskGroup, beside: str) -> None:
    """Ask for what latencies are judged by."""
    group.create_task(forever(partial(clients.one, "probe" + beside, clients.probe), PAUSE))
    group.create_task(forever(partial(clients.one, "health" + beside, clients.health), 0.05))


async def alone(clients: Clients) -> None:
    """The probes without any other load, to know the machine by."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ALONE), asyncio.TaskGroup() as group:
            probe(clients, group, ", alone")


async def load(clients: Clients, engine: Engine, count: int, seconds: float, verdict: Verdict) -> None:
    """All clients at once, for a time."""
    every = min(max(seconds / 4, 15.0), 180.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
            group.create_task(restart(engine, clients, every, verdict))
            probe(clients, group, "")
            for _ in range(count):
                group.create_task(forever(clients.some, PAUSE))
    if engine.gone and engine.gone[-1][1] == float("inf"):  # it was over in the middle of a restart
        await engine.kill()
        await back(engine, clients, verdict)


async def crowded(clients: Clients, pid: int, count: int, verdict: Verdict, workers: int) -> None:
    """Many large pictures at once, each of them legal; text is answered meanwhile."""
    pictures = [clients.pictures.large() if number % 3 == 0 else crowd(CROWD, number) for number in range(count)]
    bodies = [clients.body(url_of(picture), max_tokens=1) for picture in pictures]
    forget_peaks(pid)
    before = memory(pid, "VmRSS")
    asked = [asyncio.create_task(clients.one("crowd", partial(clients.post, body))) for body in bodies]
    while not all(task.done() for task in asked):
        await clients.one("crowd, text", clients.text)
        await asyncio.sleep(0.2)
    grown, allowed = memory(pid) - before, PIXELS * BYTES_A_PIXEL + KEPT * workers
    print(f"{count} pictures of 12 and 64 megapixels at once: {grown >> 20} MiB more, {allowed >> 20} allowed")
    verdict.need(grown < allowed, f"a crowd of pictures took {grown >> 20} MiB")


async def soak(arguments: argparse.Namespace, log: Path) -> Verdict:
    verdict, engine, total = Verdict(), Engine(), arguments.minutes * 60
    await engine.start()
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)  # shorter than the gateway's: no race for its end
    async with (
        gateway(engine, arguments.workers, shlex.split(arguments.serve_args), log) as (pid, url),
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
    ):
        clients = Clients(url, "demo", session)
        pictures = await host(clients)
        try:
            if not await answers(clients, 60):
                verdict.need(False, f"the gateway did not start, see {log}")
                return verdict
            (await Held.now(pid, clients)).show("at the start")
            await alone(clients)
            await load(clients, engine, arguments.clients, total * WARM_UP, verdict)
            await asyncio.sleep(QUIET)
            warm = await Held.now(pid, clients)
            warm.show("warmed up")
            await load(clients, engine, arguments.clients, total * (1 - WARM_UP), verdict)
            await asyncio.sleep(QUIET)
            held = await Held.now(pid, clients)
            held.show("in the end")
            held.after(warm, verdict)
            await crowded(clients, pid, arguments.crowd, verdict, arguments.workers)
            await asyncio.sleep(QUIET)
            (await Held.now(pid, clients)).show("after a crowd")
            missed = ", ".join(f"{seconds:.1f}" for seconds in engine.missed)
            print(f"seconds from the engine's returns to the next answers: {missed}")
            judge(clients.records, engine.caused, verdict)
        finally:
            await pictures.cleanup()
            await engine.kill()
    return verdict


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="of mixed load (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="of the gateway (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=6, help="at once (default: %(default)s)")
    parser.add_argument("--crowd", type=int, default=30, help="large pictures at once (default: %(default)s)")
    parser.add_argument("--serve-args", default="", help="further arguments of pixelgate serve, in one word")
    parser.add_argument(
        "--log", type=Path, default=Path("build/soak.log"), help="of the gateway (default: %(default)s)"
    )
    arguments = parser.parse_args()
    arguments.log.parent.mkdir(parents=True, exist_ok=True)
    verdict = await soak(arguments, arguments.log)
    for words in verdict.broken:
        print(f"BROKEN: {words}")
    return 1 if verdict.broken else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
