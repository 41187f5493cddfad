"""From the URL of an engine to the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pixelgate.engines import local, local_transformers, openai_http, sglang_grpc, sglang_http, vllm_grpc, vllm_http
from pixelgate.engines.chat_engine import ChatEngine
from pixelgate.engines.discovery import DNS, FILE
from pixelgate.engines.engine import Engine, EngineWithFiles
from pixelgate.errors import ConfigError

_TIMEOUTS = ("connect_timeout", "call_timeout", "generate_timeout")
_HTTP = (*_TIMEOUTS, "model", "name", "headers")


def _vllm_grpc(url: str, deps: dict[str, Any]) -> EngineWithFiles:
    return vllm_grpc.VllmGrpcEngine(url, **_of(deps, (*_TIMEOUTS, "shm")))


def _sglang_grpc(url: str, deps: dict[str, Any]) -> EngineWithFiles:
    kind = _SGLANG[_scheme(url)]
    return kind(url, **_of(deps, (*_TIMEOUTS, "model_type", "image_processor")))


def _vllm_http(url: str, deps: dict[str, Any]) -> Engine:
    return vllm_http.VllmHttpEngine(url, **_of(deps, _HTTP))


def _local(url: str, deps: dict[str, Any]) -> Engine:
    match url.partition("?")[0]:
        case local.URL if url == local.URL:
            return local.ReaderEngine(**{name: deps[name] for name in ("model_type", "encode", "eos_token_id")})
        case local_transformers.URL:
            return local_transformers.TransformersEngine(url, **_of(deps, ("checkpoint", "eos_token_ids")))
    raise ConfigError(f"{url!r} is not an embedded engine; there are {local.URL} and {local_transformers.URL}.")


_SGLANG = {
    sglang_grpc.SCHEME: sglang_grpc.SglangGrpcEngine,
    sglang_grpc.BESIDE_SCHEME: sglang_grpc.SglangBesideEngine,
}
# One entry per URL scheme. A builder takes what it needs of ``deps`` and leaves the rest.
_BUILDERS: dict[str, Callable[[str, dict[str, Any]], Engine]] = {
    vllm_grpc.SCHEME: _vllm_grpc,
    **dict.fromkeys(_SGLANG, _sglang_grpc),
    **dict.fromkeys(vllm_http.SCHEMES, _vllm_http),
    "local": _local,
}
_WITH_FILES: dict[str, Callable[[str, dict[str, Any]], EngineWithFiles]] = {
    vllm_grpc.SCHEME: _vllm_grpc,
    sglang_grpc.SCHEME: _sglang_grpc,
}
_CHAT: dict[str, type[openai_http.OpenAIEngine]] = {
    **dict.fromkeys(openai_http.SCHEMES, openai_http.OpenAIEngine),
    **dict.fromkeys(sglang_http.SCHEMES, sglang_http.SglangHttpEngine),
}


def engine(url: str, **deps: Any) -> Engine:
    """The engine that ``url`` names; nothing is connected yet.

    ``deps`` are what engines are built with: ``connect_timeout``, ``call_timeout`` and ``generate_timeout`` in
    seconds; over gRPC ``shm``, whether shared memory may be used, ``model_type`` and ``image_processor`` of the
    checkpoint; over HTTP ``model``, ``name`` and ``headers``; for an embedded one those of its class. Raises
    ConfigError for an unknown scheme, a malformed address, an engine that takes no tensors or would answer wrong.
    """
    scheme = _scheme(url)
    if scheme not in _BUILDERS:
        raise ConfigError(f"{url} prepares pictures itself; here an engine is needed that takes tensors.")
    return _BUILDERS[scheme](url, deps)


def embedded(url: str) -> bool:
    """Whether the engine that ``url`` names is built here, of a checkpoint, rather than asked over a network."""
    return url.startswith("local:")


def takes_chat(entry: str) -> bool:
    """Whether ``entry``, a URL or a name of several, is of engines that take chat requests as clients write them.

    Those of a file take tensors. Raises ConfigError.
    """
    return not entry.startswith(FILE) and _scheme(entry.removeprefix(DNS)) in _CHAT


def begins_as_transformers(entry: str) -> bool:
    """Whether engines of ``entry`` put the token before a prompt that transformers' processors put there.

    Those of a file are taken for engines that do not. Raises ConfigError.
    """
    if entry.partition("?")[0] == local_transformers.URL:
        return True
    return not entry.startswith(FILE) and _scheme(entry.removeprefix(DNS)) in _SGLANG


def chat_engine(url: str, **deps: Any) -> ChatEngine:
    """The engine that ``url`` names, of which `takes_chat` is true; ``deps`` as in `engine`. Raises ConfigError."""
    return _CHAT[_scheme(url)](url, **_of(deps, _HTTP))


def remote(url: str) -> EngineWithFiles:
    """The engine that ``url`` names, to be asked for its files. An embedded one has none and is a ConfigError, too."""
    scheme = _scheme(url)
    if scheme not in _WITH_FILES:
        raise ConfigError(
            f"{url} has no files of its own, as {' and '.join(f'{name}://' for name in _WITH_FILES)} engines have: "
            "give CHECKPOINT, a directory or hub id"
        )
    return _WITH_FILES[scheme](url, {})


def _scheme(url: str) -> str:
    scheme, colon, _ = url.partition(":")
    schemes = (*_BUILDERS, *_CHAT)
    if not colon or scheme not in schemes:
        known = " or ".join(f"{name}:" for name in schemes)
        more = f"; {DNS}... is a name of several, {FILE}PATH a file with a list"
        chat = f"; is it openai+{url}?" if scheme in ("http", "https") else ""
        raise ConfigError(f"{url!r} is not an engine address: it must start with {known}{more}{chat}")
    return scheme


def _of(deps: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: deps[name] for name in names if name in deps}
