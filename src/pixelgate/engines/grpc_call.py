"""One request on its way to an engine over gRPC, and the replies.

On the wire every call is the same. For the library it is a stream of one message, which tells when it has been handed
on and keeps nothing of it then; or, where a single reply will come, one step, which costs less and keeps the message
until then. If more came that would never end, so an engine first has to answer such a request as a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from pixelgate.engines.engine import EngineRequest
from pixelgate.engines.grpc_channel import Connection

_STEP = 8 << 20  # bytes of a message that is sent in one step
_STEPS = 64 << 20  # bytes of all such messages of a connection


class Call:
    """The call of ``request``, of which ``message`` is the encoded form. ``options`` are gRPC's: timeout and metadata.

    Iterating it gives the engine's messages, or raises grpc.aio.AioRpcError.
    """

    def __init__(self, connection: Connection, request: EngineRequest, message: bytes, **options: Any) -> None:
        self._connection = connection
        self._message: bytes | None = message
        self._one_reply = not request.stream and request.sampling.n == 1
        fits = len(message) <= _STEP and connection.kept + len(message) <= _STEPS
        self._one_step = self._one_reply and connection.one_reply and fits
        self._call = connection.complete(message, **options) if self._one_step else connection.generate(**options)
        self._kept = len(message) if self._one_step else 0
        connection.kept += self._kept

    async def send(self) -> None:
        """Send the message, until the library has handed all of it on, where it tells so."""
        if not self._one_step:
            # Both are of a call that has ended already; reading it says why.
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.InternalError):
                await self._call.write(self._message)
                await self._call.done_writing()
        self._message = None

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._one_step:
            return self._only()
        return self._counted() if self._one_reply else self._call.__aiter__()

    async def _only(self) -> AsyncIterator[Any]:
        try:
            reply = await self._call
        except grpc.aio.AioRpcError:
            self._connection.one_reply = False  # to be shown again: perhaps there was more, for which nobody waited
            raise
        if reply is not None:
            yield reply

    async def _counted(self) -> AsyncIterator[Any]:
        replies = 0
        async for reply in self._call:
            replies += 1
            yield reply
        self._connection.one_reply = replies == 1

    def close(self) -> None:
        """End it if it has not ended, and keep nothing of it. May be called again."""
        if self._call is not None:
            self._call.cancel()
        self._connection.kept -= self._kept
        self._kept, self._call, self._message = 0, None, None
