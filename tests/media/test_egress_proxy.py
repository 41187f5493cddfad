"""Pictures through an operator's proxy: the same checks, and a tunnel to the address that was checked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from media.test_fetch import BODY, CERTIFICATE, redirect, reply
from pixelgate.errors import FetchError, TooLargeError
from pixelgate.media.fetch import Fetcher
from pixelgate.media.policy import MediaPolicy
from pixelgate.media.source import UrlSource, parse

PUBLIC = "93.184.216.34"


class Proxy:
    """An HTTP proxy on loopback. Whatever it is asked for, it talks to ``upstream``, or answers by itself."""

    def __init__(self) -> None:
        self.heads: list[str] = []
        self.answer: bytes | None = None
        self.upstream = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.heads.append(head.decode("latin-1"))
            if self.answer is not None:
                writer.write(self.answer)
            else:
                await self.pass_on(head, reader, writer)
        writer.close()

    async def pass_on(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_host, to_host = await asyncio.open_connection("127.0.0.1", self.upstream)
        if head.startswith(b"CONNECT "):
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        else:
            to_host.write(head)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    target.write(data)
            target.close()

        await asyncio.gather(pump(reader, to_host), pump(from_host, writer))

    @property
    def lines(self) -> list[str]:
        return [head.split("\r\n")[0] for head in self.heads]


class Host:
    """A picture host behind the proxy."""

    def __init__(self) -> None:
        self.answers: list[Callable[[str, asyncio.StreamWriter], Awaitable[None]]] = []
        self.heads: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode("latin-1"))
            await self.answers.pop(0)("", writer)
        writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    proxy = Proxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    yield proxy
    server.close()


@contextlib.asynccontextmanager
async def hosting(proxy: Proxy, context: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
    host = Host()
    server = await asyncio.start_server(host.serve, "127.0.0.1", 0, ssl=context)
    proxy.upstream = server.sockets[0].getsockname()[1]
    yield host
    server.close()


def through(proxy: Proxy, **fields: Any) -> MediaPolicy:
    return MediaPolicy(egress_proxy=f"http://127.0.0.1:{proxy.port}", fetch_timeout=5.0, **fields)


async def get(url: str, policy: MediaPolicy, *answers: Sequence[str]) -> bytes:
    asked: list[str] = []

    async def resolve(name: str, port: int) -> Sequence[str]:
        asked.append(name)
        if len(asked) > len(answers):
            raise OSError("no address")
        return answers[len(asked) - 1]

    source = parse(url, policy)
    assert isinstance(source, UrlSource)
    async with Fetcher(policy, resolve=resolve) as fetcher:
        return await fetcher.fetch(source)


async def test_http_is_asked_of_the_proxy_by_name(proxy: Proxy) -> None:
    async with hosting(proxy) as host:
        host.answers = [reply()]
        assert await get("http://images.example/a.png?x=%20", through(proxy), [PUBLIC]) == BODY
    assert proxy.lines == ["GET http://images.example/a.png?x=%20 HTTP/1.1"]
    assert "Host: images.example\r\n" in host.heads[0]


async def test_https_goes_through_a_tunnel_to_the_checked_address(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = tmp_path / "images.pem"
    pem.write_text(CERTIFICATE)
    monkeypatch.setattr(
        "aiohttp.connector._SSL_CONTEXT_VERIFIED", ssl.create_default_context(cafile=str(pem)), raising=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    names: list[str | None] = []
    context.sni_callback = lambda _, name, __: names.append(name)
    async with hosting(proxy, context) as host:
        host.answers = [reply(), reply(), reply()]
        mixed = ["2606:4700::1111", PUBLIC]
        assert await get("https://images.example/a.png", through(proxy), mixed) == BODY
        assert await get("https://images.example:8443/a.png", through(proxy), ["2606:4700::1111"]) == BODY
        with pytest.raises(FetchError, match="no valid TLS certificate"):
            await get("https://other.example/a.png", through(proxy), [PUBLIC])
    assert proxy.lines == [
        f"CONNECT {PUBLIC}:443 HTTP/1.1",
        "CONNECT [2606:4700::1111]:8443 HTTP/1.1",
        f"CONNECT {PUBLIC}:443 HTTP/1.1",
    ]
    assert names == ["images.example", "images.example", "other.example"]
    assert [head.split("\r\n")[0] for head in host.heads] == ["GET /a.png HTTP/1.1"] * 2
    assert "Host: images.example\r\n" in host.heads[0]
    assert "Host: images.example:8443\r\n" in host.heads[1]


async def test_two_names_of_one_address_have_no_tunnel_in_common(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = tmp_path / "images.pem"
    pem.write_text(CERTIFICATE)
    monkeypatch.setattr("aiohttp.connector._SSL_CONTEXT_VERIFIED", ssl.create_default_context(cafile=str(pem)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)

    async def stay(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")
        await asyncio.sleep(1)

    async def resolve(name: str, port: int) -> list[str]:
        return [PUBLIC]

    async with hosting(proxy, context) as host:
        host.answers = [stay, stay]
        policy = through(proxy)
        async with Fetcher(policy, resolve=resolve) as fetcher:
            for name, expected in (("images.example", b"a"), ("other.example", None)):
                source = parse(f"https://{name}/", policy)
                assert isinstance(source, UrlSource)
                if expected:
                    assert await fetcher.fetch(source) == expected
                else:
                    with pytest.raises(FetchError, match="certificate"):
                        await fetcher.fetch(source)
    assert len(proxy.heads) == 2


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("answers", [["10.0.0.1"], [PUBLIC, "127.0.0.1"], ["169.254.169.254"], ["::1"]])
async def test_the_checks_run_before_the_proxy_hears_of_it(proxy: Proxy, scheme: str, answers: list[str]) -> None:
    with pytest.raises(FetchError, match="not allowed"):
        await get(f"{scheme}://images.example/", through(proxy), answers)
    assert proxy.heads == []


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "[::1]", "10.0.0.1"])
async def test_addresses_are_checked_too(proxy: Proxy, host: str) -> None:
    with pytest.raises(FetchError, match="not allowed"):
        await get(f"http://{host}:{proxy.port}/", through(proxy))
    assert proxy.heads == []


async def test_every_hop_is_checked(proxy: Proxy) -> None:
    async with hosting(proxy) as host:
        host.answers = [redirect("http://inside.example/")]
        with pytest.raises(FetchError, match="not allowed"):
            await get("http://images.example/", through(proxy), [PUBLIC], ["10.0.0.1"])
    assert proxy.lines == ["GET http://images.example/ HTTP/1.1"]


async def test_allowed_private_hosts_are_asked_of_the_proxy_as_well(proxy: Proxy) -> None:
    async with hosting(proxy) as host:
        host.answers = [reply()]
        policy = through(proxy, allow_private=("inside.example",))
        assert await get("http://inside.example/", policy, ["10.0.0.1"]) == BODY
    assert len(proxy.heads) == 1


async def test_a_name_that_does_not_exist_is_told_without_the_proxy(proxy: Proxy) -> None:
    for answers in ((), ([],)):
        with pytest.raises(FetchError, match="cannot be found"):
            await get("http://images.example/", through(proxy), *answers)
    assert proxy.heads == []


async def test_the_proxys_password(proxy: Proxy) -> None:
    proxy.answer = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
    policy = MediaPolicy(egress_proxy=f"http://me:secret@127.0.0.1:{proxy.port}")
    for scheme, words in (("http", "HTTP status 403"), ("https", "cannot be reached")):
        with pytest.raises(FetchError, match=words) as caught:
            await get(f"{scheme}://images.example/", policy, [PUBLIC])
        assert "secret" not in str(caught.value)
    expected = base64.b64encode(b"me:secret").decode()
    assert all(f"Proxy-Authorization: Basic {expected}" in head for head in proxy.heads)
    assert len(proxy.heads) == 2


async def test_a_proxy_that_is_not_there(proxy: Proxy) -> None:
    policy = MediaPolicy(egress_proxy="http://127.0.0.1:1")
    for scheme in ("http", "https"):
        with pytest.raises(FetchError, match="cannot be reached"):
            await get(f"{scheme}://images.example/", policy, [PUBLIC])


async def test_the_byte_cap_holds(proxy: Proxy) -> None:
    async with hosting(proxy) as host:
        host.answers = [reply()]
        with pytest.raises(TooLargeError):
            await get("http://images.example/", through(proxy, max_bytes=len(BODY) - 1), [PUBLIC])
