"""Server-sent events, whichever way they are cut."""

from __future__ import annotations

import pytest

from pixelgate.engines import sse
from pixelgate.errors import EngineError

STREAM = (
    b": hello\n\ndata: one\n\nevent: x\ndata:two\ndata:  lines\nid: 3\n\n\n\n"
    b"data: \xc3\xa9\r\n\r\ndata: [DONE]\n\ndata: lost"
)


async def pieces(size, stream=STREAM):
    for start in range(0, len(stream), size):
        yield stream[start : start + size]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
async def test_the_data_of_every_event_however_it_is_cut(size):
    found = [payload async for payload in sse.payloads(pieces(size))]
    assert found == [b"one", b"two\n lines", "é".encode(), sse.DONE]


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 200, b"data: 123456789\n" * 20])
async def test_an_event_above_the_limit_is_refused(stream, monkeypatch):
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EngineError, match="too long"):
        [payload async for payload in sse.payloads(pieces(50, stream))]
