"""What is written to a client leaves in its order, in as few pieces as may be, and never after the end."""

from __future__ import annotations

import asyncio

from running import PATH, gateway, strict_engine

from pixelgate.gateway.gathered import Gathered

LARGE = b"l" * (16 << 10)


class Transport:
    """What a transport was told."""

    def __init__(self):
        self.told = []
        self.closed = False

    def write(self, data):
        self.told.append(data)

    def close(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name):
        return name


async def made():
    transport = Transport()
    return transport, Gathered(transport, asyncio.get_running_loop())


async def test_small_pieces_of_one_turn_are_one():
    transport, out = await made()
    out.write(b"a")
    out.write(b"b")
    assert transport.told == []
    await asyncio.sleep(0)
    assert transport.told == [b"ab"]
    out.write(b"c")
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert transport.told == [b"ab", b"c"]


async def test_a_large_piece_goes_at_once_behind_what_waits():
    transport, out = await made()
    out.write(b"a")
    out.write(LARGE)
    assert transport.told == [b"a" + LARGE]
    out.write(LARGE)
    assert transport.told[1] is LARGE  # and is not copied
    out.write(b"b")
    await asyncio.sleep(0)
    assert transport.told[2:] == [b"b"]


async def test_a_close_sends_what_waits():
    transport, out = await made()
    out.write(b"a")
    out.close()
    assert transport.told == [b"a"]
    assert transport.closed


async def test_nothing_is_sent_after_the_end():
    transport, out = await made()
    out.write(b"a")
    transport.close()  # as when the client is gone
    await asyncio.sleep(0)
    out.write(LARGE)
    assert transport.told == []


async def test_the_rest_is_the_transports():
    _, out = await made()
    assert out.get_extra_info("peername") == "peername"


async def test_a_reply_is_one_piece():
    async with strict_engine() as engine, gateway(engine.url) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        body = b'{"model": "demo", "messages": [{"role": "user", "content": "x"}]}'
        writer.write(b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body))
        reply = await reader.read(1 << 20)  # what is there when the first of it is
        assert reply.startswith(b"HTTP/1.1 200")
        assert reply.endswith(b"}")
        writer.close()
