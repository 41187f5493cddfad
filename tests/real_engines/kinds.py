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


def _sglang(*program: str) -> Callable[[Path, Path, int], list[str]]:
    def command(environment: Path, checkpoint: Path, port: int) -> list[str]:
        return [
            *(str(environment / "bin/python"), *program, "--host", "127.0.0.1", "--port", str(port)),
            *("--model-path", str(checkpoint), "--served-model-name", checkpoint.name, "--device", "cpu"),
            *("--dtype", "float32", "--attention-backend", "torch_native", "--mm-attention-backend", "sdpa"),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none", "--max-total-tokens", "8192"),
            *("--max-running-requests", "4", "--disable-radix-cache", "--disable-overlap-schedule"),
            "--skip-server-warmup",  # with ids that a small vocabulary does not have
        ]

    return command


_SERVER = ("-m", "sglang.launch_server")
_BESIDE = Path(__file__).parents[2] / "src/pixelgate/beside/sglang_engine.py"
_ON_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "FLASHINFER_DISABLE_VERSION_CHECK": "1"}

HTTP = Kind("vllm-http", "vllm+http", "vllm", _vllm("--enable-scale-out"), "vllm-http")
GRPC = Kind("vllm-grpc", "vllm+grpc", "vllm", _vllm("--grpc"), "vllm-http", gives_files=True)
VLLM = {kind.name: kind for kind in (HTTP, GRPC)}
SGLANG_HTTP = Kind(
    "sglang-http",
    "sglang+http",
    "sglang",
    _sglang(*_SERVER),
    "sglang-http",
    models=tuple(model for model in MODELS if model != "llava"),  # it does not load so small a tower
    variables=_ON_CPU,
)
SGLANG_GRPC = Kind(
    "sglang-grpc",
    "sglang+grpc",
    "sglang",
    _sglang(*_SERVER, "--smg-grpc-mode"),
    "sglang-http",
    gives_files=True,
    models=("llava_next", "pixtral", "mistral3"),  # of a Qwen it loses the positions
    variables=_ON_CPU,
)
SGLANG_ENGINE = Kind(
    "sglang-engine",
    "sglang+engine",
    "sglang",
    _sglang(str(_BESIDE)),
    "sglang-http",
    models=("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
    variables=_ON_CPU,
)
SGLANG = {kind.name: kind for kind in (SGLANG_HTTP, SGLANG_GRPC, SGLANG_ENGINE)}
KINDS = {**VLLM, **SGLANG}
