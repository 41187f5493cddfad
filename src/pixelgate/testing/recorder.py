"""A proxy between a gateway and a real engine that keeps what they say, byte for byte.

In a script::

    async with recorder("vllm+grpc://127.0.0.1:50051") as between:
        ...  # let a gateway speak to between.url
    between.exchanges
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Self

import aiohttp
import grpc
from aiohttp import web

from pixelgate.testing.recording import Exchange, speaks_grpc

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_MAX_BODY = 1 << 30
_PASSED_ON = ("content-type",)


def recorder(url: str) -> GrpcRecorder | HttpRecorder:
    """A recorder in front of the engine at ``url``, which is in pixelgate's notation."""
    scheme, _, address = url.partition("://")
    kind = GrpcRecorder if speaks_grpc(scheme) else HttpRecorder
    return kind(scheme, address)


class _Recorder:
    """What both have: ``url`` is where the gateway is to connect to, ``exchanges`` are in the order of their ends."""

    def __init__(self, scheme: str, address: str) -> None:
        self.exchanges: list[Exchange] = []
        self._scheme, self._address, self._port = scheme, address, 0

    @property
    def url(self) -> str:
        """The recorder's own address in pixelgate's notation."""
        return f"{self._scheme}://127.0.0.1:{self._port}"


class GrpcRecorder(_Recorder, grpc.GenericRpcHandler):  # type: ignore[misc]
    """For engines behind gRPC, of whatever service."""

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address, options=_UNLIMITED)
        self._server = grpc.aio.server(options=_UNLIMITED)
        self._server.add_generic_rpc_handlers((self,))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def service(self, handler_call_details: Any) -> Any:
        """Pass any method on; a single answer is a stream of one message."""
        name = handler_call_details.method
        there = self._channel.unary_stream(name)  # without serializers messages stay bytes

        async def passed_on(request: bytes, context: Any) -> AsyncIterator[bytes]:
            replies = []
            try:
                async for reply in there(request):
                    replies.append(reply)
                    yield reply
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details() or ""
                self.exchanges.append(Exchange(name, request, tuple(replies), code.value[0], details))
                await context.abort(code, details)
            self.exchanges.append(Exchange(name, request, tuple(replies), 0))

        return grpc.unary_stream_rpc_method_handler(passed_on)


class HttpRecorder(_Recorder):
    """For engines behind HTTP."""

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(f"http://{self._address}", trust_env=False)
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body, pieces = await request.read(), []
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        async with self._session.request(request.method, request.path_qs, data=body, headers=headers) as theirs:
            kind = theirs.headers.get("content-type", "")
            response = web.StreamResponse(status=theirs.status, headers={"content-type": kind})
            await response.prepare(request)
            async for piece in theirs.content.iter_any():
                pieces.append(piece)
                await response.write(piece)
        name = f"{request.method} {request.path_qs}"
        self.exchanges.append(Exchange(name, body, tuple(pieces), theirs.status, kind))
        return response
