"""A connection's way out, on which small pieces that are written together are sent together.

uvicorn writes a reply's head and its body by themselves, and each sending is a system call that wakes the client. As
one they save a fiftieth of a small picture's request.
"""

from __future__ import annotations

import asyncio
from typing import Any

_SENT_AT_ONCE = 16 << 10  # bytes; more is not copied once more, and what the client does not read is soon seen


class Gathered:
    """``transport``, but that small pieces wait for each other until the end of the event loop's turn."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Send, soon."""
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.append(data)
        if len(data) >= _SENT_AT_ONCE:
            self._send()

    def close(self) -> None:
        """Close when all that was written is sent."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and not self._transport.is_closing():
            self._transport.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
