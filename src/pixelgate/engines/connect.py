"""From the URL of an engine to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pixelgate.engines import local, vllm_grpc
from pixelgate.engines.engine import Engine, EngineWithFiles
from pixelgate.errors import ConfigError


def _vllm_grpc(url: str, deps: dict[str, Any]) -> EngineWithFiles:
    timeouts = ("connect_timeout", "call_timeout", "generate_timeout")
    return vllm_grpc.VllmGrpcEngine(url, **{name: deps[name] for name in timeouts if name in deps})


def _local(url: str, deps: dict[str, Any]) -> Engine:
    if url != local.URL:
        raise ConfigError(f"{url!r} is not an embedded engine; there is {local.URL}.")
    return local.ReaderEngine(**{name: deps[name] for name in ("model_type", "encode", "eos_token_id")})


# One entry per URL scheme. A builder takes what it needs of ``deps`` and leaves the rest.
_BUILDERS: dict[str, Callable[[str, dict[str, Any]], Engine]] = {
    vllm_grpc.SCHEME: _vllm_grpc,
    "local": _local,
}


def engine(url: str, **deps: Any) -> Engine:
    """The engine that ``url`` names; nothing is connected yet.

    ``deps`` are what engines are built with: ``connect_timeout``, ``call_timeout`` and ``generate_timeout`` in
    seconds; for an embedded one ``model_type``, ``encode`` (text to token ids) and ``eos_token_id``.
    Raises ConfigError for an unknown scheme or a malformed address.
    """
    return _BUILDERS[_scheme(url)](url, deps)


def remote(url: str) -> EngineWithFiles:
    """The engine that ``url`` names, to be asked for its files. An embedded one has none and is a ConfigError, too."""
    if _scheme(url) != vllm_grpc.SCHEME:
        raise ConfigError(f"{url} has no files of its own: give CHECKPOINT, a directory or hub id")
    return _vllm_grpc(url, {})


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    if not colon or scheme not in _BUILDERS:
        known = " or ".join(f"{name}:" for name in _BUILDERS)
        raise ConfigError(f"{url!r} is not an engine address: it must start with {known}")
    return scheme
