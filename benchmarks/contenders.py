"""The gateways that are compared, as processes, in front of one and the same engine stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from processes import maps, running

from pixelgate.engines.connect import engine
from pixelgate.errors import ConfigError

HERE = Path(__file__).parent
START_SECONDS = 60.0
SERVE = "import sys; from pixelgate.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Engine:
    """A running stand-in."""

    process: asyncio.subprocess.Process
    runtime: str
    checkpoint: Path
    address: str

    async def told(self) -> dict[str, Any]:
        """What the request that came last was; see light_engine.py."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(b"\n")
        return dict(json.loads(await stdout.readline()))


@dataclass(frozen=True)
class Contender:
    """A running gateway, or the reason why there is none."""

    name: str
    url: str = ""
    pid: int = 0
    missing: str = ""


@dataclass(frozen=True)
class Setup:
    """What the command line says of the gateways. ``smg`` is the directory of its environment."""

    smg: Path | None
    serve_args: Sequence[str] = field(default_factory=tuple)
    smg_args: Sequence[str] = field(default_factory=tuple)


@asynccontextmanager
async def engine_for(runtime: str, checkpoint: Path, dtype: str) -> AsyncIterator[Engine]:
    """A light stand-in."""
    script = ["--runtime", runtime, "--checkpoint", os.fspath(checkpoint), "--dtype", dtype]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    async with running(sys.executable, HERE / "light_engine.py", *script, **pipes) as process:
        assert process.stdout is not None
        address = (await asyncio.wait_for(process.stdout.readline(), START_SECONDS)).decode().strip()
        if not address:
            raise RuntimeError("the engine stand-in did not start")
        yield Engine(process, runtime, checkpoint, address)


@asynccontextmanager
async def pixelgate(setup: Setup, behind: Engine, logs: Path) -> AsyncIterator[Contender]:
    """Our gateway, of this environment, with its defaults and ``serve_args``."""
    url = f"{behind.runtime}+grpc://{behind.address}"
    try:
        engine(url)
    except ConfigError:
        yield Contender("pixelgate", missing=f"has no {behind.runtime}+grpc:// engines")
        return
    port, name = free_port(), behind.checkpoint.name
    command = ["-c", SERVE, "serve", behind.checkpoint, "--name", name, "--engine", url, "--port", str(port)]
    async with _gateway("pixelgate", port, name, logs, sys.executable, *command, *setup.serve_args) as contender:
        yield contender


@asynccontextmanager
async def smg(setup: Setup, behind: Engine, logs: Path) -> AsyncIterator[Contender]:
    """The peer, with the command line that its guide has for pictures that are prepared in the gateway."""
    if setup.smg is None:
        yield Contender("smg", missing="no --smg")
        return
    port, prometheus = free_port(), free_port()
    command = ["launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"grpc://{behind.address}"]
    command += ["--model-path", os.fspath(behind.checkpoint), "--mm-processing", "router", "--history-backend", "none"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(prometheus), "--log-level", "warn"]
    name = behind.checkpoint.name
    async with _gateway("smg", port, name, logs, setup.smg / "bin/smg", *command, *setup.smg_args) as contender:
        yield contender


@asynccontextmanager
async def _gateway(name: str, port: int, model: str, logs: Path, *command: str | Path) -> AsyncIterator[Contender]:
    url = f"http://127.0.0.1:{port}"
    with (logs / f"{name}.log").open("ab") as log:
        async with running(*command, stdout=log, stderr=log, env=_without_proxies()) as process:
            if await _lists(url, model, process):
                yield Contender(name, url, process.pid)
            else:
                yield Contender(name, missing=f"did not start, see {log.name}")


async def _lists(url: str, model: str, process: asyncio.subprocess.Process) -> bool:
    """Wait until the gateway lists the model."""
    async with aiohttp.ClientSession() as session:
        for _ in range(int(START_SECONDS * 10)):
            if process.returncode is not None:
                return False
            try:
                async with session.get(url + "/v1/models") as reply:
                    if reply.status == 200 and any(each["id"] == model for each in (await reply.json())["data"]):
                        return True
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    return False


def decoder_of(contender: Contender) -> str:
    """Which JPEG decoder smg has loaded; it does so with its first JPEG. Without libturbojpeg it is not exact."""
    return "libturbojpeg" if maps(contender.pid, "libturbojpeg") else "its own, not exact: install libturbojpeg0"


def free_port() -> int:
    """A port on loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def _without_proxies() -> dict[str, str]:
    """Ours of the environment, so that nothing goes another way than loopback."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
