"""What is remembered of pictures from one request to the next, each kind within its own budget of bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from pixelgate.gateway.cache import Cache
from pixelgate.gateway.metrics import Metrics
from pixelgate.gateway.settings import GatewaySettings
from pixelgate.gateway.tensors import Make, Tensors
from pixelgate.media.decode import Header
from pixelgate.media.fetch import Fetched
from pixelgate.media.source import UrlSource

_T = TypeVar("_T")
_KNOWN_BYTES = 512  # of an entry: two digests, a size, and the dictionary's own


@dataclass(frozen=True)
class Known:
    """What is known of a picture without its pixels: the digest of its file, its size, and where it is decoded."""

    digest: str
    header: Header
    isolated: bool


class Memory:
    """Headers by the digest of a file, files by client and URL, finished tensors by identity."""

    def __init__(self, settings: GatewaySettings, metrics: Metrics) -> None:
        self._metrics = metrics
        self.tensors = Tensors(settings.tensor_cache_bytes)
        self._known: Cache[tuple[str, ...], Known] = Cache(settings.header_cache_bytes)
        self._fetched: Cache[tuple[str, UrlSource], tuple[bytes, float]] = Cache(settings.fetch_cache_bytes)
        for tier, cache in (("header", self._known), ("fetch", self._fetched), ("tensor", self.tensors.kept)):
            metrics.watch_cache(tier, cache)

    async def tensor(self, identity: str, make: Make | None) -> NDArray[Any] | None:
        """A finished tensor, or what ``make`` makes, once for all who want it now; None without it."""
        kept = self._noted("tensor", self.tensors.kept.get(identity))
        return await self.tensors.obtain(identity, make) if kept is None else kept

    def known(self, digest: str, decoding: str) -> Known | None:
        """What is known of a file, as ``decoding`` sees it."""
        return self._noted("header", self._known.get((digest, decoding)))

    def remember(self, known: Known, decoding: str) -> None:
        """Keep what is known of a file."""
        self._known.put((known.digest, decoding), known, _KNOWN_BYTES)

    def called(self, client: str, uuid: str, decoding: str) -> Known | None:
        """What is known of the picture that a client calls ``uuid``. Another client's names are its own."""
        return self._noted("header", self._known.get((client, uuid, decoding)))

    def call(self, client: str, uuid: str, known: Known, decoding: str) -> None:
        """Keep a client's name for a picture."""
        self._known.put((client, uuid, decoding), known, _KNOWN_BYTES + len(uuid))

    def file(self, client: str, url: UrlSource) -> bytes | None:
        """What a client's earlier fetch of this very URL brought, as long as its host said that it would hold."""
        found = self._fetched.get((client, url))
        fresh = found is not None and found[1] > time.monotonic()
        return self._noted("fetch", found[0] if found and fresh else None)

    def keep_file(self, client: str, url: UrlSource, fetched: Fetched) -> None:
        """Keep a fetched file for as long as its host allows."""
        if fetched.fresh_for > 0:
            until = time.monotonic() + fetched.fresh_for
            nbytes = len(fetched.data) + len(url.host) + len(url.target) + _KNOWN_BYTES
            self._fetched.put((client, url), (fetched.data, until), nbytes)

    def _noted(self, tier: str, found: _T | None) -> _T | None:
        self._metrics.cache_events.labels(tier, "miss" if found is None else "hit").inc()
        return found
