from __future__ import annotations

import asyncio
import contextlib
import gzip
import re
import socket
import ssl
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pixelgate._version import __version__
from pixelgate.errors import DecodeError, FetchError, PixelgateError, TooLargeError
from pixelgate.media import decode
from pixelgate.media.fetch import Fetcher
from pixelgate.media.policy import MediaPolicy
from pixelgate.media.source import UrlSource, parse

BODY = bytes(range(256)) * 40
LOOPBACK = ("127.0.0.1",)
# Self-signed for images.example, made for this test alone.
CERTIFICATE = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgS6pXnKvH+6qBquuy
3TXu+/B+m5Vx+YqRWaspwv8c5f6hRANCAAS1d73t7NrTpFTP3h6UKtUWa7G2EBSl
GRDp0DP9XE076hIf+AGkxxb4GNJBdv8srWH6akC+FdhNPTQD9w6UKJkK
-----END PRIVATE KEY-----
-----BEGIN CERTIFICATE-----
MIIBpDCCAUqgAwIBAgIUPbzBjpflAr/T9cTs83ewp7DT+twwCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwOaW1hZ2VzLmV4YW1wbGUwIBcNMjYxMTMwMDYyMjEwWhgPMjEy
NjExMDYwNjIyMTBaMBkxFzAVBgNVBAMMDmltYWdlcy5leGFtcGxlMFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAEtXe97eza06RUz94elCrVFmuxthAUpRkQ6dAz/VxN
O+oSH/gBpMcW+BjSQXb/LK1h+mpAvhXYTT00A/cOlCiZCqNuMGwwHQYDVR0OBBYE
FOOKEFHfvB6h/VTX30soZozVRb2/MB8GA1UdIwQYMBaAFOOKEFHfvB6h/VTX30so
ZozVRb2/MA8GA1UdEwEB/wQFMAMBAf8wGQYDVR0RBBIwEIIOaW1hZ2VzLmV4YW1w
bGUwCgYIKoZIzj0EAwIDSAAwRQIhAKOu3vAjCaWfFMq1XsDnBjHc0CS2k65eAGkP
cN5F5KwXAiAq3PQRhY3zEFYjyzev6QjyeK7PvPHh4pgebIUMu4ykiA==
-----END CERTIFICATE-----
"""
Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


class Host:
    """A picture host on loopback that answers each request as the test says, and keeps what it saw."""

    def __init__(self) -> None:
        self.connections = 0
        self.requests: list[str] = []
        self.answers: dict[str, Answer] = {}
        self.port = 0
        self._serving: set[asyncio.Task[None]] = set()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.requests.append(head)
                path = head.split(" ")[1]
                await self.answers[path](path, writer)
        finally:
            writer.close()
            self._serving.discard(task)

    @contextlib.asynccontextmanager
    async def listening(self, context: ssl.SSLContext | None = None) -> AsyncIterator[Host]:
        """Serve on a free port; in the end answers that would never end are cancelled, and their sockets closed."""
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield self
            serving = list(self._serving)
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            await asyncio.sleep(0)  # a transport closes on the loop's next turn


def reply(status: str = "200 OK", body: bytes = BODY, *headers: str, length: int | None = -1) -> Answer:
    lines = [f"HTTP/1.1 {status}", "Connection: close", *headers]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length == -1 else length}")

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()

    return answer


def redirect(location: str, status: str = "302 Found") -> Answer:
    return reply(status, b"", f"Location: {location}")


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with Host().listening() as host:
        yield host


def resolving(*answers: Sequence[str]) -> tuple[Callable[[str, int], Awaitable[Sequence[str]]], list[str]]:
    """A resolver that gives one set of addresses after the other, and the names it was asked for."""
    asked: list[str] = []

    async def resolve(name: str, port: int) -> Sequence[str]:
        asked.append(name)
        return answers[len(asked) - 1]

    return resolve, asked


async def get(url: str, policy: MediaPolicy | None = None, deadline: float | None = None, **options: Any) -> bytes:
    policy = policy or MediaPolicy(allow_private=LOOPBACK, fetch_timeout=5.0)
    source = parse(url, policy)
    assert isinstance(source, UrlSource)
    async with Fetcher(policy, **options) as fetcher:
        return await fetcher.fetch(source, deadline)


async def test_a_picture_is_fetched_with_our_own_headers_and_nothing_else(host: Host) -> None:
    host.answers["/a.png?x=%20&y"] = reply("200 OK", BODY, "Set-Cookie: a=b")
    policy = MediaPolicy(allow_private=LOOPBACK)
    source = parse(host.url("/a.png?x=%20&y"), policy)
    assert isinstance(source, UrlSource)
    async with Fetcher(policy) as fetcher:
        assert await fetcher.fetch(source) == BODY
        assert await fetcher.fetch(source) == BODY
    lines = host.requests[1].strip().split("\r\n")
    assert lines[0] == "GET /a.png?x=%20&y HTTP/1.1"
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert headers.pop("host") == f"127.0.0.1:{host.port}"
    assert headers.pop("user-agent") == f"pixelgate/{__version__}"
    assert headers.pop("accept-encoding") == "identity"
    assert set(headers) == {"accept"}


async def test_the_path_is_sent_as_given(host: Host) -> None:
    host.answers["//evil.example/a/../b%2Fc"] = reply()
    assert await get(host.url("//evil.example/a/../b%2Fc")) == BODY
    assert len(host.requests) == 1


@pytest.mark.parametrize("variant", ["no-length", "chunked"])
async def test_bodies_without_a_length_are_read_to_their_end(host: Host, variant: str) -> None:
    if variant == "chunked":
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:]))
        host.answers["/"] = reply("200 OK", chunks + b"0\r\n\r\n", "Transfer-Encoding: chunked", length=None)
    else:
        host.answers["/"] = reply(length=None)
    assert await get(host.url("/")) == BODY


async def test_environment_proxies_are_ignored(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    host.answers["/"] = reply()
    assert await get(host.url("/")) == BODY


# Addresses


@pytest.mark.parametrize("name", ["127.0.0.1", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]", "127。0。0。1"])
async def test_without_an_entry_no_loopback_connection_is_opened(host: Host, name: str) -> None:
    with pytest.raises(FetchError) as caught:
        await get(host.url("/", name), MediaPolicy())
    assert caught.value.message == "the picture's host is not allowed"
    assert host.connections == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "http://[fe80::1]/",
        "http://0.0.0.0/",
        "http://100.64.0.1/",
        "http://10.0.0.1/",
        "http://localhost/",
    ],
)
async def test_other_private_addresses_stay_refused_when_one_is_allowed(url: str) -> None:
    resolve, _ = resolving(["127.0.0.2"])
    with pytest.raises(FetchError) as caught:
        await get(url, resolve=resolve)
    assert caught.value.message == "the picture's host is not allowed"


@pytest.mark.parametrize(
    "answers",
    [
        ["127.0.0.1"],
        ["93.184.216.34", "127.0.0.1"],
        ["127.0.0.1", "93.184.216.34"],
        ["2606:2800:220:1::1", "::1"],
        ["::ffff:127.0.0.1"],
    ],
)
async def test_one_bad_answer_of_the_resolver_refuses_the_host(host: Host, answers: list[str]) -> None:
    resolve, asked = resolving(answers)
    with pytest.raises(FetchError) as caught:
        await get(host.url("/", "images.example"), MediaPolicy(), resolve=resolve)
    assert caught.value.message == "the picture's host is not allowed"
    assert asked == ["images.example"]
    assert host.connections == 0


async def test_a_host_entry_allows_that_name_alone(host: Host) -> None:
    host.answers["/"] = reply()
    policy = MediaPolicy(allow_private=("images.internal",))
    resolve, _ = resolving(["127.0.0.1"])
    assert await get(host.url("/", "Images.Internal"), policy, resolve=resolve) == BODY
    assert f"Host: images.internal:{host.port}" in host.requests[0]
    for url in (host.url("/", "other.internal"), host.url("/")):
        resolve, _ = resolving(["127.0.0.1"])
        with pytest.raises(FetchError, match="not allowed"):
            await get(url, policy, resolve=resolve)
    assert host.connections == 1


async def test_the_first_answer_is_the_one_connected_to(host: Host) -> None:
    """A rebinding name: were it resolved again for the connection, it would lead to a refused port."""
    host.answers["/"] = reply()
    policy = MediaPolicy(allow_private=LOOPBACK)
    resolve, asked = resolving(["127.0.0.1"], ["127.0.0.9"])
    assert await get(host.url("/", "rebinding.example"), policy, resolve=resolve) == BODY
    assert asked == ["rebinding.example"]


async def test_every_hop_is_resolved_and_checked_anew(host: Host) -> None:
    host.answers["/1"] = redirect("/2")
    policy = MediaPolicy(allow_private=LOOPBACK)
    resolve, asked = resolving(["127.0.0.1"], ["127.0.0.9"])
    with pytest.raises(FetchError, match="not allowed"):
        await get(host.url("/1", "rebinding.example"), policy, resolve=resolve)
    assert asked == ["rebinding.example"] * 2
    assert host.connections == 1


async def test_unknown_hosts_and_closed_ports_are_told_apart_without_an_address(host: Host) -> None:
    async def unknown(name: str, port: int) -> list[str]:
        raise OSError(f"no address for {name}")

    resolve, _ = resolving([])
    for resolver in (unknown, resolve):
        with pytest.raises(FetchError) as caught:
            await get("http://nowhere.example/", resolve=resolver)
        assert caught.value.message == "the picture's host cannot be found"
    with pytest.raises(FetchError) as caught:
        await get("http://127.0.0.1:1/")
    assert caught.value.message == "the picture's host cannot be reached"


async def test_the_system_resolver_is_the_default(host: Host) -> None:
    host.answers["/"] = reply()
    policy = MediaPolicy(allow_private=("localhost",))
    assert await get(host.url("/", "localhost"), policy) == BODY
    with pytest.raises(FetchError, match="not allowed"):
        await get(host.url("/", "localhost"), MediaPolicy())


async def test_slow_names_hold_up_nobody_else(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    answered = threading.Event()

    def look(name: str, *arguments: Any, **options: Any) -> Any:
        asked.append(name)
        if name.startswith("slow"):
            answered.wait(10)
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", host.port))]

    host.answers["/"] = reply()
    monkeypatch.setattr(socket, "getaddrinfo", look)
    policy = MediaPolicy(allow_private=("quick.example",), fetch_timeout=5.0)
    async with Fetcher(policy) as fetcher:
        sources = [parse(f"http://slow{i}.example/", policy) for i in range(40)]
        slow = [asyncio.create_task(fetcher.fetch(source)) for source in sources]
        await asyncio.sleep(0.05)
        quick = parse(host.url("/", "quick.example"), policy)
        assert await asyncio.wait_for(fetcher.fetch(quick), 2) == BODY
        more = [asyncio.create_task(fetcher.fetch(sources[0])) for _ in range(60)]
        await asyncio.sleep(0.05)
        for task in (*slow, *more):  # their clients have left
            task.cancel()
        await asyncio.gather(*slow, *more, return_exceptions=True)
        begun = len(asked)
        answered.set()
        assert await asyncio.wait_for(fetcher.fetch(quick), 2) == BODY
    assert set(asked[begun:]) <= {"quick.example"}


# Redirects


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
async def test_redirects_are_followed(host: Host, status: str) -> None:
    host.answers["/x/1"] = redirect("2?a=b", status)
    host.answers["/x/2?a=b"] = redirect(host.url("/3"), status)
    host.answers["/3"] = reply()
    assert await get(host.url("/x/1")) == BODY


async def test_the_number_of_redirects_is_limited(host: Host) -> None:
    for hop in range(6):
        host.answers[f"/{hop}"] = redirect(f"/{hop + 1}")
    host.answers["/6"] = reply()
    assert await get(host.url("/1")) == BODY
    with pytest.raises(FetchError, match="more than 5 times"):
        await get(host.url("/0"))
    with pytest.raises(FetchError, match="more than 0 times"):
        await get(host.url("/5"), MediaPolicy(allow_private=LOOPBACK, max_redirects=0))


async def test_a_redirect_loop_ends(host: Host) -> None:
    host.answers["/loop"] = redirect("/loop")
    with pytest.raises(FetchError, match="redirects"):
        await get(host.url("/loop"))
    assert host.connections == 6


@pytest.mark.parametrize(
    "location",
    [
        "http://169.254.169.254/",
        "http://127.0.0.2:{port}/ok",
        "http://[::ffff:127.0.0.2]:{port}/ok",
        "http://2130706433:{port}/ok",
        "http://user@127.0.0.1:{port}/ok",
        "http://127.0.0.1:{port}\\@example.com/ok",
        "file:///etc/hostname",
        "data:image/png;base64,QUJD",
        "ftp://127.0.0.1:{port}/ok",
        "http://127.0.0.1:{port}/a b",
    ],
)
async def test_a_redirect_to_what_is_not_allowed_opens_no_second_connection(host: Host, location: str) -> None:
    host.answers["/"] = redirect(location.format(port=host.port))
    host.answers["/ok"] = reply()
    with pytest.raises(FetchError, match="not allowed"):
        await get(host.url("/"))
    assert host.connections == 1


async def test_a_redirect_respects_the_schemes_of_the_policy(host: Host) -> None:
    host.answers["/"] = redirect("https://127.0.0.1/")
    with pytest.raises(FetchError, match="not allowed"):
        await get(host.url("/"), MediaPolicy(schemes=("http",), allow_private=LOOPBACK))


# Time and size


async def drip(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


async def stall(_: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def slow_redirect(_: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.15)
    await redirect("/slow")("", writer)


@pytest.mark.parametrize("answer", [drip, stall, slow_redirect])
@pytest.mark.parametrize("by", ["policy", "caller"])
async def test_one_deadline_spans_the_whole_fetch(host: Host, answer: Answer, by: str) -> None:
    host.answers["/slow"] = answer
    start = time.monotonic()
    policy = MediaPolicy(allow_private=LOOPBACK, fetch_timeout=0.3 if by == "policy" else 30)
    deadline = asyncio.get_running_loop().time() + (30 if by == "policy" else 0.3)
    with pytest.raises(FetchError, match="in time"):
        await get(host.url("/slow"), policy, deadline)
    assert 0.25 < time.monotonic() - start < 2


async def test_a_resolver_that_hangs_hits_the_deadline() -> None:
    async def hang(name: str, port: int) -> list[str]:
        await asyncio.sleep(30)
        return []

    with pytest.raises(FetchError, match="in time"):
        await get("http://slow.example/", MediaPolicy(fetch_timeout=0.2), resolve=hang)


@pytest.mark.parametrize("length", [-1, None])
async def test_the_byte_cap_holds_with_and_without_a_length(host: Host, length: int | None) -> None:
    policy = MediaPolicy(allow_private=LOOPBACK, max_bytes=len(BODY))
    host.answers["/fits"] = reply(length=length)
    host.answers["/more"] = reply("200 OK", BODY + b"a", length=length)
    assert await get(host.url("/fits"), policy) == BODY
    with pytest.raises(TooLargeError, match=str(len(BODY))):
        await get(host.url("/more"), policy)


async def test_a_length_above_the_cap_is_refused_before_the_body(host: Host) -> None:
    async def promise(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 50000000000\r\n\r\n")
        await asyncio.sleep(30)

    host.answers["/"] = promise
    start = time.monotonic()
    with pytest.raises(TooLargeError):
        await get(host.url("/"))
    assert time.monotonic() - start < 2


async def test_an_endless_body_ends_at_the_cap(host: Host) -> None:
    async def endless(_: str, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(65536))
            await writer.drain()

    host.answers["/"] = endless
    with pytest.raises(TooLargeError):
        await get(host.url("/"), MediaPolicy(allow_private=LOOPBACK, max_bytes=1_000_000))


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("x-gzip", gzip.compress), ("Deflate", zlib.compress)]
)
async def test_a_compressed_answer_counts_after_decompression(
    host: Host, encoding: str, compress: Callable[[bytes], bytes]
) -> None:
    policy = MediaPolicy(allow_private=LOOPBACK, max_bytes=len(BODY))
    host.answers["/fits"] = reply("200 OK", compress(BODY), f"Content-Encoding: {encoding}")
    host.answers["/bomb"] = reply("200 OK", compress(bytes(50_000_000)), f"Content-Encoding: {encoding}")
    host.answers["/cut"] = reply("200 OK", compress(BODY)[:-9], f"Content-Encoding: {encoding}")
    host.answers["/junk"] = reply("200 OK", b"\0" * 50, f"Content-Encoding: {encoding}")
    assert await get(host.url("/fits"), policy) == BODY
    with pytest.raises(TooLargeError):
        await get(host.url("/bomb"), MediaPolicy(allow_private=LOOPBACK, max_bytes=1_000_000))
    with pytest.raises(FetchError, match="broke off"):
        await get(host.url("/cut"), policy)
    with pytest.raises(FetchError, match="damaged"):
        await get(host.url("/junk"), policy)


async def test_an_unasked_compression_is_refused(host: Host) -> None:
    host.answers["/"] = reply("200 OK", BODY, "Content-Encoding: br")
    with pytest.raises(FetchError, match="compressed"):
        await get(host.url("/"))


# Answers that are no picture


@pytest.mark.parametrize(
    "status", ["204 No Content", "206 Partial", "304 Not Modified", "404 Not Found", "429 Slow", "500 Oops", "302 X"]
)
async def test_any_other_status_is_named(host: Host, status: str) -> None:
    host.answers["/"] = reply(status, b"", length=0)
    with pytest.raises(FetchError, match=status[:3]):
        await get(host.url("/"))


async def test_html_with_status_200_is_found_out_by_content(host: Host) -> None:
    host.answers["/"] = reply("200 OK", b"<!doctype html><p>Who are you?", "Content-Type: image/jpeg")
    data = await get(host.url("/"))
    with pytest.raises(DecodeError, match="HTML"):
        decode.header(data, MediaPolicy())


async def close_at_once(_: str, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def gibberish(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.9\r\n\r\n")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply("200 OK", b""), "empty"),
        (reply("200 OK", BODY, length=len(BODY) + 1), "broke off"),
        (close_at_once, "without an answer"),
        (gibberish, "no proper HTTP answer"),
    ],
)
async def test_broken_answers_are_told_in_our_words(host: Host, answer: Answer, message: str) -> None:
    host.answers["/"] = answer
    with pytest.raises(FetchError, match=message) as caught:
        await get(host.url("/"))
    assert not re.search(r"127\.0|0x|object|aiohttp|SSH", caught.value.message)


async def test_a_host_without_tls_is_told_apart() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(plain, "127.0.0.1", 0)
    async with server:
        with pytest.raises(FetchError, match="TLS properly"):
            await get(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/")


async def test_an_untrusted_certificate_is_refused_and_the_name_is_asked_for(tmp_path: Path) -> None:
    pem = tmp_path / "host.pem"
    pem.write_text(CERTIFICATE)
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    context.sni_callback = lambda _socket, name, _context: asked.append(name)
    async with Host().listening(context) as host:
        resolve, _ = resolving(["127.0.0.1"])
        url = f"https://images.example:{host.port}/"
        with pytest.raises(FetchError, match="certificate"):
            await get(url, resolve=resolve)
    assert asked == ["images.example"]


async def test_fifty_slow_hosts_do_not_hold_up_a_good_one(host: Host) -> None:
    host.answers["/drip"] = drip
    host.answers["/good"] = reply()
    policy = MediaPolicy(allow_private=LOOPBACK, fetch_timeout=1.0)
    bad, good = parse(host.url("/drip"), policy), parse(host.url("/good"), policy)
    assert isinstance(bad, UrlSource)
    assert isinstance(good, UrlSource)
    async with Fetcher(policy) as fetcher:
        slow = [asyncio.create_task(fetcher.fetch(bad)) for _ in range(50)]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        assert await fetcher.fetch(good) == BODY
        assert time.monotonic() - start < 0.5
        outcomes = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(outcome, FetchError) for outcome in outcomes)


async def test_a_cancelled_fetch_closes_its_connection(host: Host) -> None:
    left = asyncio.Event()

    async def watch(_: str, writer: asyncio.StreamWriter) -> None:
        try:
            await drip(_, writer)
        except ConnectionError:
            left.set()
            raise

    host.answers["/"] = watch
    policy = MediaPolicy(allow_private=LOOPBACK)
    source = parse(host.url("/"), policy)
    assert isinstance(source, UrlSource)
    async with Fetcher(policy) as fetcher:
        task = asyncio.create_task(fetcher.fetch(source))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(left.wait(), 2)


async def test_a_fetcher_works_inside_its_context_only(host: Host) -> None:
    source = parse(host.url("/"), MediaPolicy())
    assert isinstance(source, UrlSource)
    fetcher = Fetcher(MediaPolicy(allow_private=LOOPBACK))
    with pytest.raises(RuntimeError, match="async with") as caught:
        await fetcher.fetch(source)
    assert not isinstance(caught.value, PixelgateError)
    async with fetcher:
        pass
    with pytest.raises(RuntimeError, match="async with"):
        await fetcher.fetch(source)


# Retries


def failing(times: int, failure: Answer, then: Answer) -> tuple[Answer, list[float]]:
    """An answer that fails so many times first, and when it was asked."""
    asked: list[float] = []

    async def answer(path: str, writer: asyncio.StreamWriter) -> None:
        asked.append(time.monotonic())
        await (failure if len(asked) <= times else then)(path, writer)

    return answer, asked


async def reset(_: str, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc")
    await writer.drain()
    writer.transport.abort()


@pytest.mark.parametrize(
    "failure",
    [
        reply("502 Bad Gateway", b""),
        reply("503 Busy", b"", "Retry-After: 100"),
        reply("504 Late", b""),
        reply("200 OK", BODY, length=len(BODY) + 1),
        reset,
    ],
)
async def test_what_may_be_gone_a_moment_later_is_tried_once_more(host: Host, failure: Answer) -> None:
    host.answers["/"], asked = failing(1, failure, reply())
    assert await get(host.url("/")) == BODY
    assert len(asked) == 2
    assert asked[1] - asked[0] > 0.09
    host.answers["/"], asked = failing(2, failure, reply())
    with pytest.raises(FetchError):
        await get(host.url("/"))
    assert len(asked) == 2
    host.answers["/"], asked = failing(2, failure, reply())
    assert await get(host.url("/"), MediaPolicy(allow_private=LOOPBACK, fetch_retries=2)) == BODY
    host.answers["/"], asked = failing(1, failure, reply())
    with pytest.raises(FetchError):
        await get(host.url("/"), MediaPolicy(allow_private=LOOPBACK, fetch_retries=0))
    assert len(asked) == 1


async def test_a_connection_closed_without_an_answer_is_tried_once_more_at_once(host: Host) -> None:
    host.answers["/"], asked = failing(1, close_at_once, reply())
    assert await get(host.url("/")) == BODY
    host.answers["/"], asked = failing(2, close_at_once, reply())
    with pytest.raises(FetchError, match="without an answer"):
        await get(host.url("/"))
    assert len(asked) == 2


@pytest.mark.parametrize(
    "failure", [reply("404 Not Found", b""), reply("429 Slow", b""), reply("500 Oops", b""), reply("200 OK", b"")]
)
async def test_what_would_fail_again_is_not_tried_again(host: Host, failure: Answer) -> None:
    host.answers["/"], asked = failing(1, failure, reply())
    with pytest.raises(FetchError):
        await get(host.url("/"))
    assert len(asked) == 1


async def test_a_retry_keeps_to_the_deadline(host: Host) -> None:
    host.answers["/"], asked = failing(1, reply("503 Busy", b""), stall)
    start = time.monotonic()
    with pytest.raises(FetchError, match="in time"):
        await get(host.url("/"), MediaPolicy(allow_private=LOOPBACK, fetch_timeout=0.4))
    assert len(asked) == 2
    assert 0.35 < time.monotonic() - start < 1.5


async def test_a_retry_is_checked_like_a_first_try(host: Host) -> None:
    host.answers["/"], _ = failing(1, reply("503 Busy", b""), reply())
    resolve, asked = resolving(["127.0.0.1"], ["127.0.0.9"])
    with pytest.raises(FetchError, match="not allowed"):
        await get(host.url("/", "images.example"), resolve=resolve)
    assert asked == ["images.example"] * 2


# Domains and connections


async def test_only_the_named_hosts_are_asked_on_every_hop(host: Host) -> None:
    policy = MediaPolicy(allow_private=LOOPBACK, allowed_domains=("*.good.example",))
    host.answers["/"] = reply()
    host.answers["/away"] = redirect(host.url("/", "bad.example"))
    resolve, asked = resolving(*[["127.0.0.1"]] * 9)
    assert await get(host.url("/", "a.good.example"), policy, resolve=resolve) == BODY
    for url in (host.url("/", "good.example"), host.url("/"), host.url("/away", "a.good.example")):
        with pytest.raises(FetchError, match="not allowed"):
            await get(url, policy, resolve=resolve)
    assert asked == ["a.good.example"] * 2
    assert host.connections == 2


async def test_a_named_host_is_no_way_to_a_private_address(host: Host) -> None:
    resolve, _ = resolving(["127.0.0.1"])
    with pytest.raises(FetchError, match="not allowed"):
        await get(host.url("/", "a.example"), MediaPolicy(allowed_domains=("a.example",)), resolve=resolve)
    assert host.connections == 0


async def test_connections_are_kept_for_the_next_picture(host: Host) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    policy = MediaPolicy(allow_private=LOOPBACK)
    source = parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", policy)
    assert isinstance(source, UrlSource)
    async with server, Fetcher(policy) as fetcher:
        for _ in range(3):
            assert await fetcher.fetch(source) == b"abc"
    assert host.connections == 1
