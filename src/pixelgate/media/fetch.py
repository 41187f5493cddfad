"""The one place that opens a connection for a client.

Each hop of a fetch is resolved once, all its addresses are checked, and the connection goes to a checked address
under the original name. Redirects are followed by hand through the same checks; one deadline spans them all.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import zlib
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from pixelgate._version import __version__
from pixelgate.errors import FetchError, MediaError, TooLargeError
from pixelgate.media import freshness
from pixelgate.media.addresses import Address, permitted
from pixelgate.media.policy import MediaPolicy
from pixelgate.media.source import UrlSource, join

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""A host name and a port to IP addresses in text form; raises OSError if there are none."""

Taking = Callable[[int], Awaitable[None]]
"""Asked for room for so many bytes; raises if there is none."""

_HEADERS = {"User-Agent": f"pixelgate/{__version__}", "Accept": "image/*, */*;q=0.5", "Accept-Encoding": "identity"}
_LOOKUPS = 64  # threads, which are made when needed
_REDIRECTS = (301, 302, 303, 307, 308)
_GZIP_OR_ZLIB = 47  # zlib's own code for "tell the two apart by their header"
_REFUSED = "the picture's host is not allowed"
_BROKE_OFF = "the picture's host broke off before the whole picture had arrived"

_TRANSIENT_STATUS = (502, 503, 504)
_RETRY_PAUSE = 0.1  # seconds; doubled with each retry


@dataclass(frozen=True)
class Fetched:
    """A fetched file, and for how many seconds it may be used again without asking."""

    data: bytes
    fresh_for: float


@dataclass(frozen=True)
class _Redirect:
    """Where an answer leads instead, and for how many seconds it does."""

    source: UrlSource
    fresh_for: float


class _TransientError(FetchError):
    """A failure that may be gone a moment later."""


# The first class that fits gives error and message; aiohttp's own texts name addresses and objects.
_FAILURES: tuple[tuple[type[Exception], type[FetchError], str], ...] = (
    (aiohttp.ClientConnectorCertificateError, FetchError, "the picture's host has no valid TLS certificate"),
    (aiohttp.ClientSSLError, FetchError, "the picture's host does not speak TLS properly"),
    (aiohttp.ClientConnectorDNSError, FetchError, "the picture's host cannot be found"),
    (aiohttp.ClientHttpProxyError, FetchError, "the picture's host cannot be reached"),
    (aiohttp.ClientConnectorError, FetchError, "the picture's host cannot be reached"),
    (aiohttp.ServerTimeoutError, FetchError, "the picture's host cannot be reached"),
    (TimeoutError, FetchError, "the picture's host did not deliver it in time"),
    (aiohttp.ClientPayloadError, _TransientError, _BROKE_OFF),
    # aiohttp has tried that a second time itself, because of connections that were kept too long
    (aiohttp.ServerDisconnectedError, FetchError, "the picture's host closed the connection without an answer"),
    (ConnectionError, _TransientError, _BROKE_OFF),
    (zlib.error, FetchError, "the picture's host sent damaged compressed data"),
)


class Fetcher:
    """Fetches pictures under one policy; an async context manager that holds one connection pool.

    ``resolve`` replaces the system's resolver. What it returns is checked all the same.
    """

    def __init__(self, policy: MediaPolicy, *, resolve: Resolve | None = None) -> None:
        self.policy = policy
        self._resolve = resolve or self._system_resolve
        # The system's resolver blocks for seconds over a name whose server is silent, and everybody waits for a thread.
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="pixelgate-lookup")
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                # With a proxy only its own name comes here, and hosts are checked in _route.
                resolver=None if self.policy.egress_proxy else _CheckedResolver(self.policy, self._resolve),
                # A tunnel has been made for one name, however many names its address has.
                force_close=bool(self.policy.egress_proxy),
                use_dns_cache=False,
                limit=0,  # how many fetches run at once is admission's decision
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.policy.connect_timeout),
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # done in _body, under the byte cap
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None
        self._lookups.shutdown(wait=False, cancel_futures=True)

    async def _system_resolve(self, host: str, port: int) -> list[str]:
        """All addresses the system's resolver has; a lookup that nobody waits for any more is not begun."""
        look = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        answers = await asyncio.get_running_loop().run_in_executor(self._lookups, look)
        return list(dict.fromkeys(str(answer[4][0]) for answer in answers))

    async def fetch(self, source: UrlSource, deadline: float | None = None, taking: Taking | None = None) -> bytes:
        """The body behind ``source`` alone; see `get`."""
        return (await self.get(source, deadline, taking)).data

    async def get(self, source: UrlSource, deadline: float | None = None, taking: Taking | None = None) -> Fetched:
        """What is behind ``source``: at least one byte, at most ``policy.max_bytes``.

        ``deadline`` is a time of the running loop's clock; the fetch ends by it, or ``policy.fetch_timeout`` seconds
        from now if that is sooner. ``taking`` is asked before more bytes are kept. Raises FetchError, or TooLargeError
        above the byte cap.
        """
        end = asyncio.get_running_loop().time() + self.policy.fetch_timeout
        try:
            async with asyncio.timeout_at(end if deadline is None else min(end, deadline)):
                return await self._follow(source, taking)
        except TimeoutError:
            raise FetchError("the picture's host did not deliver it in time") from None

    async def _follow(self, source: UrlSource, taking: Taking | None) -> Fetched:
        fresh_for = math.inf
        for _ in range(self.policy.max_redirects + 1):
            outcome = await self._hop(source, taking)
            fresh_for = min(fresh_for, outcome.fresh_for)  # the way must hold as long as what it leads to
            if isinstance(outcome, Fetched):
                return replace(outcome, fresh_for=fresh_for)
            source = outcome.source
        raise FetchError(f"the picture's URL redirects more than {self.policy.max_redirects} times")

    async def _hop(self, source: UrlSource, taking: Taking | None) -> Fetched | _Redirect:
        """The file, or the URL it redirects to; a GET may be repeated, so what looks transient is tried again."""
        counted = taking and _Counted(taking)
        for retry in range(self.policy.fetch_retries):
            try:
                return await self._request(source, counted)
            except _TransientError:
                await asyncio.sleep(_RETRY_PAUSE * 2**retry)
                if counted is not None:
                    counted.arrived = 0
        return await self._request(source, counted)

    async def _request(self, source: UrlSource, taking: Taking | None) -> Fetched | _Redirect:
        if self._session is None:
            raise RuntimeError("use the fetcher inside 'async with'")
        _check_host(source.host, self.policy)
        url, options = await self._route(source)
        try:
            async with self._session.get(url, allow_redirects=False, **options) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    target = self._redirected(source, response.headers["Location"])
                    return _Redirect(target, freshness.seconds(response.headers))
                if response.status != 200:
                    kind = _TransientError if response.status in _TRANSIENT_STATUS else FetchError
                    raise kind(f"the picture's host answered with HTTP status {response.status}")
                return Fetched(await self._body(response, taking), freshness.seconds(response.headers))
        except (aiohttp.ClientError, OSError, zlib.error) as error:
            for cause, kind, message in _FAILURES:
                if isinstance(error, cause):
                    raise kind(message) from None
            raise FetchError("the picture's host gave no proper HTTP answer") from None

    async def _route(self, source: UrlSource) -> tuple[URL, dict[str, Any]]:
        """What to ask for, and how: directly, where the resolver checks the name, or through the proxy.

        A tunnel of https leads to a checked address, under the original name in Host, SNI and certificate. HTTP has no
        tunnel, and a proxy forms Host from the URL: so it is asked by name, and looks that up itself.
        """
        path, _, query = source.target.partition("?")
        authority = source.authority
        options: dict[str, Any] = {}
        if self.policy.egress_proxy:
            options["proxy"] = self.policy.egress_proxy
            try:
                addresses = await _checked(self.policy, self._resolve, source.host, source.port)
            except OSError:
                raise FetchError("the picture's host cannot be found") from None
            if source.scheme == "https":
                options |= {"server_hostname": source.host, "headers": {"Host": authority}}
                # many proxies have no way to IPv6
                chosen = min(addresses, key=lambda address: address.version)
                authority = replace(source, host=str(chosen)).authority
        url = URL.build(scheme=source.scheme, authority=authority, path=path, query_string=query, encoded=True)
        return url, options

    def _redirected(self, source: UrlSource, location: str) -> UrlSource:
        try:
            return join(source, location, self.policy)
        except MediaError:
            raise FetchError("the picture's URL redirects to one that is not allowed") from None

    async def _body(self, response: aiohttp.ClientResponse, taking: Taking | None) -> bytes:
        limit = self.policy.max_bytes
        too_large = TooLargeError(f"the picture is larger than the limit of {limit} bytes")
        if (response.content_length or 0) > limit:
            raise too_large
        encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("identity", "", "gzip", "x-gzip", "deflate"):
            raise FetchError("the picture's host compressed its answer in a way that was not asked for")
        inflate = None if encoding in ("identity", "") else zlib.decompressobj(_GZIP_OR_ZLIB)
        body = bytearray()
        async for chunk in response.content.iter_any():
            more = inflate.decompress(chunk, limit + 1 - len(body)) if inflate else chunk
            if len(body) + len(more) > limit:
                raise too_large
            if taking is not None:
                await taking(len(more))
            body += more
        if inflate is not None and not inflate.eof:
            raise FetchError(_BROKE_OFF)
        if not body:
            raise FetchError("the picture's host sent an empty answer")
        return bytes(body)


class _Counted:
    """Takes room for bytes as they arrive. What a try that failed has taken is there for the next."""

    def __init__(self, taking: Taking) -> None:
        self._taking = taking
        self._taken = 0
        self.arrived = 0

    async def __call__(self, nbytes: int) -> None:
        self.arrived += nbytes
        if (more := self.arrived - self._taken) > 0:
            await self._taking(more)
            self._taken += more


class _CheckedResolver(AbstractResolver):
    """Resolves and checks in one step, so that nothing can change between the check and the connection."""

    def __init__(self, policy: MediaPolicy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await _checked(self._policy, self._resolve, host, port)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Nothing to give back."""


async def _checked(policy: MediaPolicy, resolve: Resolve, host: str, port: int) -> list[Address]:
    """The addresses of a host, all of them permitted. Raises FetchError, or OSError if there are none."""
    addresses = [ipaddress.ip_address(answer) for answer in await resolve(host, port)]
    if not addresses:
        raise OSError("no address")
    if host not in policy.allowed_hosts and not all(permitted(a, policy.allowed_networks) for a in addresses):
        raise FetchError(_REFUSED)
    return addresses


def _check_host(host: str, policy: MediaPolicy) -> None:
    """Check a host's name, or its address where it is one: no resolver will see that."""
    if not policy.domain_allowed(host):
        raise FetchError(_REFUSED)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    if not permitted(address, policy.allowed_networks):
        raise FetchError(_REFUSED)
