"""Server-sent events as engines stream them, over a body that may be cut anywhere."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

from pixelgate.errors import EngineError

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 << 20


async def payloads(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of every event, as it arrives; comments and other fields are passed over.

    Raises EngineError for an event above MAX_EVENT_BYTES. What follows the last blank line is no event.
    """
    data: list[bytes] = []
    async for line in _lines(chunks):
        if line.startswith(b"data:"):
            data.append(line[len(b"data:") :].removeprefix(b" "))
            if sum(map(len, data)) > MAX_EVENT_BYTES:
                raise _too_long()
        elif not line and data:
            yield b"\n".join(data)
            data = []


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    held = bytearray()
    async for chunk in chunks:
        searched = len(held)
        held += chunk
        start = 0
        while (end := held.find(b"\n", max(start, searched))) >= 0:
            yield bytes(held[start:end]).removesuffix(b"\r")
            start = end + 1
        del held[:start]
        if len(held) > MAX_EVENT_BYTES:
            raise _too_long()


def _too_long() -> EngineError:
    return EngineError("The engine sent an event that is too long.")
