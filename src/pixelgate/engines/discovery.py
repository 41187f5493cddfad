"""Which engines a model has: by address, by a name in DNS, or by a file; the latter two may say otherwise later."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from pixelgate.engines.engine import AnyEngine
from pixelgate.errors import ConfigError, EngineUnavailableError

DNS, FILE = "dns+", "file:"

log = logging.getLogger(__name__)
_Engine = TypeVar("_Engine", bound=AnyEngine[Any, Any])


class Discovery(Generic[_Engine]):
    """Engines for configured ``entries``, made with ``build``; an address keeps its engine as long as it is found.

    Raises ConfigError, also of ``build``, for an entry that can never be an engine.
    """

    def __init__(self, entries: Sequence[str], build: Callable[[str], _Engine]) -> None:
        self._entries = entries
        self._build = build
        self._engines = {entry: build(entry) for entry in entries if not entry.startswith((DNS, FILE))}
        self._found: dict[str, list[str]] = {}
        for entry in entries:
            if entry.startswith(DNS):
                _parts(entry)
                build(entry.removeprefix(DNS))

    @property
    def engines(self) -> list[_Engine]:
        """The engines that were found last; before the first look those that are configured by address."""
        return list(self._engines.values())

    @property
    def fixed(self) -> bool:
        """Whether no look can find anything else."""
        return not any(entry.startswith((DNS, FILE)) for entry in self._entries)

    async def look(self) -> list[_Engine]:
        """The engines that there are now; of an entry that cannot be looked up those found last.

        Raises ConfigError for a file that holds something else than addresses.
        """
        for entry in self._entries:
            try:
                self._found[entry] = await addresses(entry)
            except EngineUnavailableError as failure:
                log.warning("%s cannot be looked up: %s", entry, failure.message)
        urls = dict.fromkeys(url for found in self._found.values() for url in found)
        self._engines = {url: self._engines.get(url) or self._build(url) for url in urls}
        return self.engines


async def addresses(entry: str) -> list[str]:
    """The addresses of engines that ``entry`` stands for now.

    ``dns+SCHEME://NAME:PORT`` is one for each address of the name, ``file:PATH`` one a line, ``#`` begins a comment;
    anything else is an address. Raises EngineUnavailableError where that cannot be looked up, ConfigError for an entry
    that is malformed.
    """
    if entry.startswith(FILE):
        return [url for line in await _lines(entry.removeprefix(FILE)) for url in await _resolved(line)]
    return await _resolved(entry)


async def _lines(path: str) -> list[str]:
    try:
        text = await asyncio.to_thread(Path(path).read_text, "utf-8")
    except OSError as failure:
        raise EngineUnavailableError(f"The file cannot be read: {failure.strerror}.") from None
    except UnicodeDecodeError:
        raise EngineUnavailableError("The file is not text.") from None
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    if any(line.startswith(FILE) for line in lines):
        raise ConfigError(f"{path} names a file; it may name engines only")
    return [line for line in lines if line]


async def _resolved(entry: str) -> list[str]:
    if not entry.startswith(DNS):
        return [entry]
    host, port = _parts(entry)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter for a part of a name that is too long
        raise EngineUnavailableError("The name has no address.") from None
    hosts = sorted({str(address[0]) for *_, address in found})
    parts = urlsplit(entry.removeprefix(DNS))
    return [parts._replace(netloc=f"[{host}]:{port}" if ":" in host else f"{host}:{port}").geturl() for host in hosts]


def _parts(entry: str) -> tuple[str, int]:
    """Host and port of a DNS entry."""
    try:
        parts = urlsplit(entry.removeprefix(DNS))
        if parts.scheme.endswith("https"):
            raise ConfigError(f"{entry!r} cannot be: certificates are for names, and engines in DNS are addresses.")
        if parts.hostname and parts.port and "@" not in parts.netloc:
            return parts.hostname, parts.port
    except ValueError:  # a port that is no number
        pass
    raise ConfigError(f"{entry!r} is not a name of engines: it must look like {DNS}vllm+grpc://NAME:PORT.")
