"""What the operator configures, checked before anything starts. How it is said is in configure.py."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from pixelgate.engines.balance import Balance
from pixelgate.errors import ConfigError
from pixelgate.media.policy import MediaPolicy, Network
from pixelgate.models import hub
from pixelgate.models.backend import Backend
from pixelgate.prompt.rules import Bos, TypedSpecials

MIB = 1 << 20
SharedMemory = Literal["auto", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

DIVIDED: Mapping[str, bool] = {"divided": True}
"""Marks a setting that holds for the whole gateway, and of which every worker gets its part."""

_KEY = re.compile("[!-~]+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*")
_COLLECTOR = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[\w./-]*)?")
_ADMIN = re.compile(r"(?:(?P<host>[\w.-]+|\[[0-9a-fA-F:.]+\])?:)?(?P<port>\d{1,5})")
_COUNTS = (
    "max_body_bytes",
    "max_text_characters",
    "max_tensor_bytes",
    "max_header_bytes",
    "max_headers",
    "max_connections",
    "max_bytes_in_flight",
    "max_pixels_in_flight",
    "max_tensor_bytes_in_flight",
    "max_queue",
    "workers",
    "threads",
)
_KEPT = ("tensor_cache_bytes", "header_cache_bytes", "fetch_cache_bytes")
_SECONDS = ("header_timeout", "body_timeout", "write_timeout", "keep_alive_timeout", "shutdown_timeout")


@dataclass(frozen=True)
class ModelSettings:
    """One ``[[model]]`` table: a name that clients use, a checkpoint (directory or hub id), and its engines.

    The name is by default the directory's, or the id. Without a checkpoint both are asked of the engines.
    """

    checkpoint: str = ""
    engines: tuple[str, ...] = ()
    name: str = ""
    backend: Backend | None = None
    """Whose numbers; by default torchvision's where there is a choice."""
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the processor for every request, which may have its own on top."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    bos: Bos = "engine"
    """Whose habit with the token before a prompt is followed: vLLM's chat API, or transformers' processors."""
    balance: Balance = "least-load"
    """Which of several engines gets a request."""
    engine_model: str = ""
    """What the model is called by its engines, of those behind HTTP that serve more than one."""
    engine_api_key: str = field(default="", repr=False)
    """Sent to engines behind HTTP as ``Authorization: Bearer KEY``."""
    engine_headers: dict[str, Any] = field(default_factory=dict, repr=False)
    """Further headers for single engines behind HTTP: a table of names and values for an engine's URL."""
    resize: bool = False
    """Whether an ``openai+`` engine is sent pictures in the size that the model will use, where that is less."""

    def __post_init__(self) -> None:
        if not self.engines:
            raise ConfigError("a model needs at least one engine: --engine URL, or engines in the file")
        if self.backend not in (None, *get_args(Backend)):
            raise ConfigError(f"backend must be one of {', '.join(get_args(Backend))}, not {self.backend!r}")
        if self.bos not in get_args(Bos):
            raise ConfigError(f"bos must be one of {', '.join(get_args(Bos))}, not {self.bos!r}")
        if self.balance not in get_args(Balance):
            raise ConfigError(f"balance must be one of {', '.join(get_args(Balance))}, not {self.balance!r}")
        if self.revision is not None and not self.checkpoint:
            raise ConfigError("a revision goes with a hub id; there is no checkpoint")
        _check_headers(self.engines, self.engine_api_key, self.engine_headers)
        if self.checkpoint and not self.name:
            name = self.checkpoint if hub.is_id(self.checkpoint) else Path(self.checkpoint).resolve().name
            object.__setattr__(self, "name", name)

    def headers(self, url: str) -> dict[str, str]:
        """The headers for an engine."""
        key = {"authorization": f"Bearer {self.engine_api_key}"} if self.engine_api_key else {}
        return {**key, **{name.lower(): value for name, value in self.engine_headers.get(url, {}).items()}}


def _check_headers(engines: Sequence[str], key: str, headers: Mapping[str, Any]) -> None:
    """Raise ConfigError where they cannot be sent; no message holds a value, for they are secrets."""
    if key and not any("+http" in url or url.startswith("file:") for url in engines):
        raise ConfigError("engine_api_key is for engines behind HTTP, and this model has none")
    if not _HEADER_VALUE.fullmatch(key):
        raise ConfigError("engine_api_key has characters that a header cannot carry")
    for url, table in headers.items():
        if url not in engines or "+http" not in url:
            raise ConfigError(f"engine_headers: {url!r} is none of this model's engines behind HTTP")
        if url.startswith("dns+"):
            raise ConfigError(f"engine_headers: {url!r} is a name of several engines; headers are for single ones")
        if not isinstance(table, Mapping):
            raise ConfigError(f"engine_headers: {url!r} must have a table of names and values")
        for name, value in table.items():
            if not (_HEADER_NAME.fullmatch(name) and isinstance(value, str) and _HEADER_VALUE.fullmatch(value)):
                raise ConfigError(f"engine_headers: {name!r} of {url!r} cannot be sent as a header")


@dataclass(frozen=True)
class GatewaySettings:
    """All settings of the gateway but those of pictures, which are in ``media``.

    A field that ``repr`` leaves out is a secret: no message shows its value.
    """

    models: tuple[ModelSettings, ...]
    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8080
    """Port to listen on."""

    media: MediaPolicy = field(default_factory=MediaPolicy)

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys of which a request must bring one, as ``Authorization: Bearer KEY``. None here and in ``api_key_file``:
    the gateway is open to whoever reaches it."""

    api_key_file: str = ""
    """A file with more keys, one a line and no comments; read at start-up, and at SIGHUP."""

    admin_host: str = ""
    """``HOST:PORT``, or ``PORT`` on loopback: where ``/metrics`` is served, without a key, instead of at ``port``."""

    trusted_proxies: tuple[str, ...] = ()
    """Networks of reverse proxies whose ``X-Forwarded-For`` is believed."""

    tls_cert: str = ""
    """A PEM file with the certificate and its chain: HTTPS instead of HTTP at ``port``. Needs ``tls_key``."""

    tls_key: str = ""
    """The PEM file of the certificate's private key, without a password."""

    workers: int = 1
    """Processes that share the port, and divide among them what holds for all requests together."""

    max_connections: int = field(default=1000, metadata=DIVIDED)
    """Connections at once; one more is told 503 and closed."""

    max_header_bytes: int = 32 * 1024
    """Request line and headers of one request together; above it 431."""

    max_headers: int = 100
    """Header lines of one request; above it 431."""

    header_timeout: float = 10.0
    """Seconds for the whole head of a request, from its first byte or the connection's start, or 408; also for what a
    client still sends once it is answered."""

    body_timeout: float = 60.0
    """Seconds for the whole body of a request, or 408."""

    write_timeout: float = 60.0
    """Seconds that a client may leave an answer unread before its connection is ended."""

    keep_alive_timeout: float = 5.0
    """Seconds for which a connection may be idle between two requests."""

    max_body_bytes: int = 64 * MIB
    """Largest request body; a larger one is 413, whatever length it claims. Pictures as data URLs are a third larger
    than their files."""

    max_text_characters: int = 2_000_000
    """Characters of one request's messages, tools and template arguments; above it 413. A message counts as a hundred
    more."""

    max_tensor_bytes: int = 1024 * MIB
    """Largest pixel tensors of one request together, known from the headers before any pixel is decoded; above it
    413."""

    trust_request_mm_kwargs: bool = False
    """Whether a request may set options of the processor (``mm_processor_kwargs``), and with them how much work a
    picture makes."""

    special_tokens_in_text: TypedSpecials = "text"
    """Whether special tokens that users type are "text", or control the model ("allow") but for those of pictures."""

    max_bytes_in_flight: int = field(default=1024 * MIB, metadata=DIVIDED)
    """Bytes of bodies and fetched pictures that all requests hold together until their tensors are made."""

    max_pixels_in_flight: int = field(default=512_000_000, metadata=DIVIDED)
    """Pixels of the pictures that all requests hold together while they are decoded and preprocessed."""

    max_tensor_bytes_in_flight: int = field(default=2048 * MIB, metadata=DIVIDED)
    """Bytes of pixel tensors that all requests hold together until their engines have them."""

    budget_wait: float = 5.0
    """Seconds for which a request waits for room in these three budgets before it is answered 429, with
    ``Retry-After``."""

    max_queue: int = field(default=256, metadata=DIVIDED)
    """Requests that wait for room in one of them, one client's no more than its share; one more is told 429 at once."""

    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)), metadata=DIVIDED)
    """Threads that decode and preprocess pictures. Default: the cores this process may use."""

    tensor_cache_bytes: int = field(default=64 * MIB, metadata=DIVIDED)
    """Finished tensors kept for pictures that come again."""

    header_cache_bytes: int = field(default=4 * MIB, metadata=DIVIDED)
    """Sizes kept of pictures that come again, and the names (``uuid``) that clients have given them."""

    fetch_cache_bytes: int = field(default=0, metadata=DIVIDED)
    """Fetched files kept for the client that asked, as long as their hosts' caching headers allow."""

    shutdown_timeout: float = 25.0
    """Seconds that requests under way may go on after a signal to end."""

    drain_delay: float = 0.0
    """Seconds after a signal to end for which requests are still taken, while ``/ready`` says to send none."""

    engine_wait: float = 60.0
    """Seconds to wait at start-up for the engines to answer."""

    shm: SharedMemory = "auto"
    """Whether engines that see the same /dev/shm get large tensors there ("auto") or in messages ("off")."""

    log_level: LogLevel = "info"
    """The least that is logged: "debug", "info", "warning" or "error"."""

    log_format: LogFormat = "text"
    """Whether a line of the log is "text", or an object of "json"."""

    log_requests: bool = False
    """Whether each request to a model, once let in, is a line of the log, with its figures; what it said never is."""

    trace_endpoint: str = ""
    """``http://HOST:PORT`` of a collector for OpenTelemetry traces, OTLP over HTTP. Needs the extra ``otel``."""

    trace_sample: float = 1.0
    """The share of requests that are traced, from 0 to 1. Where its client says whether to, that is done."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ConfigError("no model is configured; give a checkpoint with --engine, or a [[model]] table")
        refuse_same_names([model.name for model in self.models if model.name])
        if not 0 <= self.port <= 65535:
            raise _wrong("port", f"must be between 0 and 65535, not {self.port}")
        for name in _COUNTS:
            if getattr(self, name) < 1:
                raise _wrong(name, f"must be at least 1, not {getattr(self, name)}")
        for name in _SECONDS:
            if not 0 < getattr(self, name) < math.inf:
                raise _wrong(name, f"must be a number of seconds above 0, not {getattr(self, name)}")
        for name in ("engine_wait", "budget_wait", "drain_delay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise _wrong(name, f"must be a number of seconds, not {getattr(self, name)}")
        if self.special_tokens_in_text not in get_args(TypedSpecials):
            known = " or ".join(get_args(TypedSpecials))
            raise _wrong("special_tokens_in_text", f"must be {known}, not {self.special_tokens_in_text!r}")
        for name in _KEPT:
            if getattr(self, name) < 0:
                raise _wrong(name, f"must not be negative, not {getattr(self, name)}")
        for name, kind in (("shm", SharedMemory), ("log_level", LogLevel), ("log_format", LogFormat)):
            if getattr(self, name) not in get_args(kind):
                raise _wrong(name, f"must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        if self.trace_endpoint and not _COLLECTOR.fullmatch(self.trace_endpoint):
            raise _wrong("trace_endpoint", f"must look like http://HOST:PORT, not {self.trace_endpoint!r}")
        if not 0 <= self.trace_sample <= 1:
            raise _wrong("trace_sample", f"must be between 0 and 1, not {self.trace_sample}")
        for name, other in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
            if getattr(self, name) and not getattr(self, other):
                raise _wrong(name, f"is of no use without {other}")
        check_keys(self.api_keys, "api_keys")
        _ = self.trusted_networks  # raise now rather than later
        if (admin := self.admin_address) and admin[1] == self.port != 0:
            raise _wrong("admin_host", f"must have another port than the gateway's own, {self.port}")

    def share(self) -> GatewaySettings:
        """The settings of one worker: its part of what is divided, at least 1 of what there is any of."""
        whole = {each.name: getattr(self, each.name) for each in fields(self) if each.metadata.get("divided")}
        return replace(self, **{name: max(value // self.workers, min(value, 1)) for name, value in whole.items()})

    @property
    def narrow(self) -> list[str]:
        """What one request may have and no worker's share has room for, in words."""
        share, media = self.share(), self.media
        pairs = (
            ("max_bytes_in_flight", "max_body_bytes", self.max_body_bytes),
            ("max_bytes_in_flight", "max_bytes of a picture", media.max_bytes),
            ("max_pixels_in_flight", "max_pixels of a picture", media.max_pixels),
            ("max_tensor_bytes_in_flight", "max_tensor_bytes", self.max_tensor_bytes),
        )
        return [
            f"{name} is {getattr(share, name)} for each of {self.workers} workers, less than the {one} of {limit}"
            for name, limit, one in pairs
            if getattr(share, name) < one <= getattr(self, name)
        ]

    @property
    def admin_address(self) -> tuple[str, int] | None:
        """Host and port of the admin listener, where there is one."""
        if not self.admin_host:
            return None
        match = _ADMIN.fullmatch(self.admin_host)
        if match is None or int(match["port"]) > 65535:
            raise _wrong("admin_host", f"must be HOST:PORT or PORT, not {self.admin_host!r}")
        return (match["host"] or "127.0.0.1").strip("[]"), int(match["port"])

    @property
    def trusted_networks(self) -> tuple[Network, ...]:
        """``trusted_proxies`` as networks."""
        try:
            return tuple(ipaddress.ip_network(entry) for entry in self.trusted_proxies)
        except ValueError:
            raise _wrong(
                "trusted_proxies",
                "must be networks such as 10.1.0.0/16 (no bits set behind the prefix) or addresses, "
                f"not {', '.join(self.trusted_proxies)!r}",
            ) from None


def refuse_same_names(names: Sequence[str]) -> None:
    """Raise ConfigError where clients could not tell two models apart."""
    if len(set(names)) != len(names):
        raise ConfigError(f"two models have the same name: {', '.join(names)}")


def check_keys(keys: tuple[str, ...], where: str) -> None:
    """Raise ConfigError for a key that no client could send. The message never shows it."""
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            problem = "is empty" if not key else "has a blank or a character that is not visible ASCII"
            raise ConfigError(f"key {number} of {where} {problem}", param="api_keys")


def _wrong(name: str, problem: str) -> ConfigError:
    return ConfigError(f"{name} {problem}", param=name)
