"""Engines and gateways as processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

ROOT = Path(__file__).parents[2]
START = 600.0  # seconds; 20 on an idle machine
_LOCAL = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Process:
    """A process and all its children, with its output in a file."""

    def __init__(self, command: list[str], log: Path, variables: Mapping[str, str]) -> None:
        self.log = log
        environ = {**os.environ, **_LOCAL, **variables}
        self._output: BinaryIO = log.open("wb")
        # a session of its own, so that its children can be ended with it
        self._process = subprocess.Popen(
            command, stdout=self._output, stderr=subprocess.STDOUT, env=environ, cwd=ROOT, start_new_session=True
        )

    def wait_for(self, ready: Callable[[], bool], seconds: float = START) -> None:
        """Wait until it is ``ready``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            if ready():
                return
            time.sleep(0.2)
        self.kill()
        raise AssertionError(f"it does not start; the end of {self.log}:\n" + self.log.read_text("utf-8")[-3000:])

    def end(self) -> None:
        """Ask it to end, and see that it and its children do."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self.kill()

    def kill(self) -> None:
        """End it and its children at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()


def healthy(base: str) -> bool:
    """Whether /health says so."""
    try:
        return httpx.get(f"{base}/health", timeout=10, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def serving(address: str) -> bool:
    """Whether gRPC's health service says so."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def free_port() -> int:
    """A port that nobody listens at, and that leaves room for the one 10,000 above it, which SGLang takes as well."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port + 10_000 < 1 << 16:
            return port


class Gateway:
    """``pixelgate serve`` in front of engines, with a client. The model is called as the checkpoint's folder."""

    def __init__(self, checkpoint: Path | None, urls: list[str], log: Path, *flags: str) -> None:
        port = free_port()
        self.model = checkpoint.name if checkpoint else ""
        self.base = f"http://127.0.0.1:{port}"
        engines = [flag for url in urls for flag in ("--engine", url)]
        own = [str(checkpoint)] if checkpoint else []
        command = [sys.executable, "-m", "pixelgate.cli", "serve", *own, *engines, "--port", str(port), *flags]
        self._process = Process(command, log, {})
        self.client = httpx.Client(base_url=self.base, timeout=180, trust_env=False)
        self._process.wait_for(lambda: healthy(self.base))

    def close(self) -> None:
        """End it."""
        self.client.close()
        self._process.end()
