"""Strangers on real sockets: heads, bodies and connections that are too large, too slow or too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import httpx
import pytest
import pytest_asyncio
from running import ENDLESS, PATH, error_of, events, gateway, image, picture, strict_engine, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEAD, BODY, IDLE, UNREAD = 0.3, 0.5, 0.4, 0.6
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strict():
    """(gateway, engine) with small limits."""
    async with (
        strict_engine(reply=ENDLESS) as engine,
        gateway(
            engine.url,
            header_timeout=HEAD,
            body_timeout=BODY,
            write_timeout=UNREAD,
            keep_alive_timeout=IDLE,
            max_header_bytes=4096,
            max_headers=20,
            max_connections=12,
            max_body_bytes=100_000,
        ) as running,
        # an idle connection may end just as a request is sent
        httpx.AsyncClient(base_url=running.client.base_url, limits=httpx.Limits(max_keepalive_connections=0)) as client,
    ):
        running.client = client
        yield running, engine


def post(length, *more, path=PATH):
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: a", f"content-length: {length}", *more, "", ""]).encode()


def chat(**fields):
    return json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


async def talk(running, *pieces, every=0.0, limit=5.0):
    """Send pieces, then (status or None, error object, seconds until the gateway closed)."""
    start = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)

    async def send():
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(every)

    sending = asyncio.create_task(send())
    answer = b""
    with contextlib.suppress(ConnectionError):  # who sends on after the end is told so
        async with asyncio.timeout(limit):
            while piece := await reader.read(65536):
                answer += piece
    took = time.monotonic() - start
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    if not answer:
        return None, None, took
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body), took


def drops(text, size=1):
    return [text[start : start + size] for start in range(0, len(text), size)]


@pytest.mark.parametrize(
    "pieces",
    [
        [b"GET /health HTTP/1.1\r\n"],
        drops(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 100),
        [b"GET /health HTTP/1.1\r\nhost: a\r\n", *[b"x: y\r\n"] * 10],
        [b"P"],
    ],
    ids=["half", "drip", "lines", "letter"],
)
async def test_a_slow_head(strict, pieces):
    status, answer, took = await talk(strict[0], *pieces, every=0.05)
    assert status == 408
    assert answer["error"]["code"] == "request_timeout"
    assert answer["error"]["message"] == "the head of the request did not arrive within 0.3 seconds"
    assert HEAD - 0.1 < took < HEAD + 0.5


@pytest.mark.parametrize("pieces", [[], [b"\r\n"] * 60], ids=["silence", "blank lines"])
async def test_a_connection_that_asks_for_nothing(strict, pieces):
    status, _, took = await talk(strict[0], *pieces, every=0.05)
    assert status is None
    assert HEAD - 0.1 < took < HEAD + 0.5


async def test_a_slow_second_head_on_a_kept_connection(strict):
    reader, writer = await asyncio.open_connection("127.0.0.1", strict[0].port)
    for _ in range(3):
        writer.write(GET)
        assert (await reader.readuntil(b"}}")).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(IDLE / 2)
    writer.write(GET[:20])
    assert b"408" in await asyncio.wait_for(reader.readline(), HEAD + 0.5)
    writer.close()


@pytest.mark.parametrize("after", [b"", b"\r\n"])
async def test_an_idle_connection_ends(strict, after):
    reader, writer = await asyncio.open_connection("127.0.0.1", strict[0].port)
    writer.write(GET)
    await reader.readuntil(b"}}")
    writer.write(after)
    start = time.monotonic()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    assert IDLE - 0.1 < time.monotonic() - start < HEAD + 0.5
    writer.close()


async def test_the_time_for_a_head_does_not_end_an_answer(strict):
    running, engine = strict
    engine.delay = 0.01
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    sent = chat(stream=True, max_tokens=100)
    writer.write(post(len(sent)) + sent)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\r\n" + GET[:10])  # the beginning of the next request
    start = time.monotonic()
    answer = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 10)
    assert time.monotonic() - start > 2 * HEAD
    assert answer.count(b"data:") > 100
    assert b"408" in await asyncio.wait_for(reader.read(), HEAD + 1)  # from here the rest was waited for
    writer.close()
    engine.delay = 0


@pytest.mark.parametrize(
    "head",
    [
        [b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nhost: a\r\n\r\n"],
        [b"GET / HTTP/1.1\r\nx: " + b"a" * 5000 + b"\r\n\r\n"],
        [b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 21 + b"\r\n"],
        [b"GET / HTTP/1.1\r\nx: ", *[b"a" * 1000] * 10],
        [b"GET /", *[b"a" * 1000] * 10],
    ],
    ids=["path", "value", "number", "endless value", "endless path"],
)
async def test_a_head_that_is_too_large(strict, head):
    status, answer, took = await talk(strict[0], *head, every=0.01)
    assert status == 431
    assert answer["error"]["code"] == "header_too_large"
    assert answer["error"]["message"].endswith("the limits of 4096 bytes and 20 lines")
    assert took < HEAD


@pytest.mark.parametrize(
    "trailers",
    [[b"x: y\r\n" * 1000] * 100, [b"x: ", *[b"a" * 5000] * 100], [b"1;", *[b"a" * 5000] * 100]],
    ids=["number", "endless value", "endless extension"],
)
async def test_what_follows_a_body_is_limited_too(strict, trailers):
    """Headers behind the last chunk would be kept in memory, however many."""
    head = post("").replace(b"content-length: ", b"transfer-encoding: chunked")
    last = b"" if trailers[0].startswith(b"1;") else b"0\r\n"
    status, _, took = await talk(strict[0], head + b"1\r\n \r\n", last, *trailers, every=0.005)
    assert status is None
    assert took < HEAD


async def test_a_few_trailers_are_no_headers(strict):
    running, _ = strict
    head = post("", "connection: close").replace(b"content-length: ", b"transfer-encoding: chunked")
    sent = chat(max_tokens=1)
    chunks = b"%x\r\n%b\r\n0\r\nx-request-id: trailer\r\n\r\n" % (len(sent), sent)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(head + chunks)
    answer = await asyncio.wait_for(reader.read(), 5)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"trailer" not in answer
    writer.close()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_upgrade_is_not_taken_up(strict, protocol):
    headers = {"connection": "upgrade", "upgrade": protocol}
    assert (await strict[0].client.get("/health", headers=headers)).status_code == 200
    assert (await strict[0].client.post(PATH, headers=headers, content=chat(max_tokens=1))).status_code == 200


UPGRADE = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")


@pytest.mark.parametrize("more", [UPGRADE, ("Connection: close, Upgrade", "Upgrade: a", "Upgrade: b")])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("every", [0, 1, 7])
async def test_the_body_behind_a_wish_for_an_upgrade_is_the_requests(strict, more, chunked, every):
    sent = chat(max_tokens=1)
    if chunked:
        body = b"%x\r\n%b\r\n0\r\nupgrade: h2c\r\n\r\n" % (len(sent), sent)
        data = post(0, "transfer-encoding: chunked", *more).replace(b"content-length: 0\r\n", b"") + body
    else:
        data = post(len(sent), *more) + sent
    reader, writer = await asyncio.open_connection("127.0.0.1", strict[0].port)
    writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for start in range(0, len(data), every or len(data)):
        writer.write(data[start : start + (every or len(data))])
        await asyncio.sleep(0)
    assert b"200 OK" in await asyncio.wait_for(reader.readline(), 5)
    writer.close()


async def test_what_looks_like_a_request_behind_a_wish_for_an_upgrade_is_its_body(strict):
    _, answer, _ = await talk(strict[0], post(len(GET), *UPGRADE), GET, every=0.1)
    assert answer["error"]["message"] == "the body is not valid JSON"  # and nothing else was answered


async def test_requests_one_after_another_may_all_wish_for_an_upgrade(strict):
    wish = GET.replace(b"host: a", "\r\n".join(("host: a", *UPGRADE)).encode())
    reader, writer = await asyncio.open_connection("127.0.0.1", strict[0].port)
    writer.write(wish * 400 + GET)
    answers = b""
    while answers.count(b'"status":"ok"') < 401:
        answers += await asyncio.wait_for(reader.readuntil(b"}"), 5)
    writer.close()


async def test_a_head_at_the_limit(strict):
    fixed = len("/health") + sum(len(name) + len(value) + 4 for name, value in [("host", "a"), ("x", "")])
    for size, status in ((4096 - fixed, b"200"), (4097 - fixed, b"431")):
        reader, writer = await asyncio.open_connection("127.0.0.1", strict[0].port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * size + b"\r\n\r\n")
        assert (await reader.readline()).split()[1] == status
        writer.close()
    assert await strict[0].metric("pixelgate_errors_total", code="header_too_large", status="431") >= 1


@pytest.mark.parametrize(
    "sent",
    [
        [post(1000) + b"{"],
        [post(1000), *drops(b'{"model": "demo", "messages": [' + b" " * 100)],
        [post("").replace(b"content-length: ", b"transfer-encoding: chunked"), *[b"1\r\n \r\n"] * 100],
    ],
    ids=["half", "drip", "chunks"],
)
async def test_a_slow_body(strict, sent):
    running, engine = strict
    before = len(engine.requests)
    status, answer, took = await talk(running, *sent, every=0.05)
    assert status == 408
    assert answer["error"]["message"] == "the request body did not arrive within 0.5 seconds"
    # the answer comes in time, and the connection ends a little later
    assert BODY - 0.1 < took < BODY + HEAD + 0.5
    assert len(engine.requests) == before
    assert await running.metric("pixelgate_requests_total", path=PATH, status="408") >= 1


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (post(10**9), 413),
        (post(10**30), 400),
        (post(1000, path="/health"), 405),
        (post(1000, path="/nothing"), 404),
        (b"GET /health HTTP/1.1\r\ncontent-length: 1000\r\n\r\n", 200),
    ],
)
async def test_a_body_that_goes_on_after_the_answer_ends_soon(strict, head, status):
    found, _, took = await talk(strict[0], head, *[b"a"] * 100, every=0.05)
    assert found == status
    assert took < HEAD + 0.5


async def test_a_body_that_comes_whole_after_the_answer_keeps_the_connection(strict):
    reader, writer = await asyncio.open_connection("127.0.0.1", strict[0].port)
    for _ in range(2):
        writer.write(post(10, path="/health"))
        assert b"405" in await reader.readline()
        await reader.readuntil(b"}}")
        writer.write(b"a" * 10)
        await asyncio.sleep(0.05)
    writer.close()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [99_999, 100_000, 100_001, 2_000_000])
async def test_bodies_around_the_limit(strict, size, chunked):
    """D62."""
    sent = chat(max_tokens=1)
    sent += b" " * (size - len(sent))

    async def pieces():
        for piece in drops(sent, 60_000):
            yield piece

    response = await strict[0].client.post(PATH, content=pieces() if chunked else sent)
    assert response.status_code == (200 if size <= 100_000 else 413)
    if size > 100_000:
        assert error_of(response)["message"] == "the request body is larger than the limit of 100000 bytes"


@pytest.mark.parametrize(
    "head",
    [
        post(5, "content-length: 6"),
        post(5, "transfer-encoding: chunked"),
        post("5, 5"),
        post("-1"),
        post("+5"),
        post("0x5"),
        post("").replace(b"content-length: ", b"transfer-encoding: gzip, chunked, gzip"),
        b"GET /health HTTP/1.1\nx\n\n",
        b"GET http://[/ HTTP/1.1\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_what_is_no_http_or_has_two_meanings(strict, head):
    running, engine = strict
    before = len(engine.requests)
    status, answer, _ = await talk(running, head + b"hello", every=0.01)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(engine.requests) == before


async def test_a_body_longer_than_its_length_is_the_next_request(strict):
    sent = chat(max_tokens=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", strict[0].port)
    writer.write(post(len(sent)) + sent + b"and more")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.count(b"HTTP/1.1 ") <= 1  # what follows is no request, and gets no second answer


async def test_too_many_connections(strict):
    running, _ = strict
    await asyncio.sleep(HEAD + IDLE)  # those of other tests are gone
    reader, kept = await asyncio.open_connection("127.0.0.1", running.port)
    kept.write(GET)
    await reader.readuntil(b"}}")
    waiting = [await asyncio.open_connection("127.0.0.1", running.port) for _ in range(11)]
    for _ in range(3):
        status, answer, _ = await talk(running)
        assert status == 503
        assert (answer["error"]["type"], answer["error"]["code"]) == ("server_error", "gateway_busy")
    kept.write(GET)  # is served all the while
    assert b" 200 " in await reader.readline()
    for writer in (kept, *(writer for _, writer in waiting)):
        writer.close()
    await asyncio.sleep(0.05)
    assert (await running.client.get("/health")).status_code == 200


async def test_slow_clients_do_not_hurt_others(strict):
    running, _ = strict
    slow = [asyncio.create_task(talk(running, post(1000), *drops(b" " * 200), every=0.02)) for _ in range(9)]
    await asyncio.sleep(0.1)
    start = time.monotonic()
    for _ in range(5):
        assert (await running.ask([image(picture(56, 56))], max_tokens=1)).status_code == 200
    assert time.monotonic() - start < 2
    assert {status for status, _, _ in await asyncio.gather(*slow)} == {408}


async def test_refused_requests_leave_nothing_behind(strict):
    running, engine = strict
    await until(lambda: not engine.running)
    assert await running.metric("pixelgate_requests_in_flight") == 0
    assert events((await running.ask(stream=True, max_tokens=2)).text)[-1] == "[DONE]"


async def test_an_answer_that_nobody_reads():
    """Nine megabytes of tensors: what the client leaves unread is counted, and in the end given up."""
    limits = {"write_timeout": UNREAD, "keep_alive_timeout": IDLE}
    content = [image(picture(700, 1100))] * 4
    async with strict_engine() as engine, gateway(engine.url, **limits) as running:
        body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": content}]}).encode()
        unread = socket.socket()
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", running.port))
        reader, writer = await asyncio.open_connection(sock=unread, limit=1)
        writer.transport.pause_reading()
        writer.write(post(len(body), path=f"{PATH}/render?tensors=1") + body)
        await writer.drain()
        start = time.monotonic()

        async def under_way(count):
            return await running.metric("pixelgate_requests_in_flight") == count

        await until(lambda: under_way(1))
        await until(lambda: under_way(0))
        assert time.monotonic() - start > UNREAD
        writer.transport.resume_reading()
        with contextlib.suppress(ConnectionError):
            received = await reader.read(-1)
            assert len(received) < 9_000_000
        writer.close()
