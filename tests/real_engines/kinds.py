"""The kinds of engine there are, and how each is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from chats import MODELS

from pixelgate.testing.recording import speaks_grpc


@dataclass(frozen=True)
class Kind:
    """A kind of engine: how one starts, and how the gateway speaks to it.

    ``command`` gets the environment, which is that of ``maker``, the checkpoint and the port. What it would answer is
    known by OpenAI's chat API of ``reference``, a kind of the same engine. ``gives_files`` says whether it can be asked
    for its checkpoint's. It serves ``models``.
    """

    name: str
    scheme: str
    maker: str
    command: Callable[[Path, Path, int], list[str]]
    reference: str
    gives_files: bool = False
    models: tuple[str, ...] = MODELS
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def speaks_grpc(self) -> bool:
        """Whether its own protocol is gRPC."""
        return speaks_grpc(self.scheme)


def _vllm(*more: str) -> Callable[[Path, Path, int], list[str]]:
    def command(environment: Path, checkpoint: Path, port: int) -> list[str]:
        return [
            *(str(environment / "bin/vllm"), "serve", str(checkpoint), "--served-model-name", checkpoint.name),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"),
            *("--max-num-seqs", "4", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"),
            *("--distributed-executor-backend", "uni", *more),
        ]

    return command


HTTP = Kind("vllm-http", "vllm+http", "vllm", _vllm("--enable-scale-out"), "vllm-http")
GRPC = Kind("vllm-grpc", "vllm+grpc", "vllm", _vllm("--grpc"), "vllm-http", gives_files=True)
VLLM = {kind.name: kind for kind in (HTTP, GRPC)}
KINDS = {**VLLM}
