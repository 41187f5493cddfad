"""An engine that answers as a real one has answered, to a gateway that asks as one has asked.

In a test::

    async with replay(Recording.load(file)) as engine:
        ...  # a gateway speaks to engine.url
    assert engine.differences == []
    assert engine.left == 0
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

import grpc
import msgspec
from aiohttp import web
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor_pool import Default
from grpc_health.v1 import health_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2, vllm_engine_pb2

from pixelgate.testing.recording import Exchange, Recording

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_MAX_BODY = 1 << 30
_GENERATE = ("/Generate", "/generate", "/v1/chat/completions")
_STATUSES = {code.value[0]: code for code in grpc.StatusCode}
_SERVICES = (vllm_engine_pb2, sglang_scheduler_pb2, health_pb2)  # imported, so that messages can be read field by field
_NOTHING = object()


def replay(recording: Recording) -> GrpcReplay | HttpReplay:
    """An engine that answers as in ``recording``."""
    return GrpcReplay(recording) if recording.over_grpc else HttpReplay(recording)


class Replay(ABC):
    """Requests for answers must come in the order of the recording; the engine's facts may be asked for at any time.

    A request is the recorded one if every field is equal. Two are new each time: its own id, and the names by which the
    engine's caches know pictures, which depend on the versions of what decodes them; of these it counts which are
    equal. ``differences`` says what else was asked, which is refused; ``left`` counts what was not asked.
    """

    def __init__(self, recording: Recording) -> None:
        self.differences: list[str] = []
        self._recording = recording
        self._answers = [each for each in recording.exchanges if each.name.endswith(_GENERATE)]
        self._named: tuple[dict[str, str], dict[str, str]] = ({}, {})
        self._port = 0

    @property
    def url(self) -> str:
        """The address in pixelgate's notation; the port is known once the server runs."""
        return f"{self._recording.scheme}://127.0.0.1:{self._port}"

    @property
    def left(self) -> int:
        """How many of the recorded answers nobody has asked for."""
        return len(self._answers)

    def _next(self, name: str, request: bytes) -> Exchange | None:
        """The exchange that a request belongs to."""
        if name.endswith(_GENERATE):
            if not self._answers or self._answers[0].name != name:
                self.differences.append(f"{name} is not expected now")
                return None
            found = self._answers.pop(0)
        else:
            known = [each for each in self._recording.exchanges if each.name == name]
            if not known:
                self.differences.append(f"{name} is not in the recording")
                return None
            found = known[-1]
        both = (self._fields(name, found.request), self._fields(name, request))
        for fields, named in zip(both, self._named, strict=True):
            _rename(fields, named)
        before = len(self.differences)
        self.differences += [f"{name}: {difference}" for difference in _differences("", *both)]
        return found if len(self.differences) == before else None

    @abstractmethod
    def _fields(self, name: str, request: bytes) -> Any:
        """A request as dicts, lists and values."""


class GrpcReplay(Replay, grpc.GenericRpcHandler):  # type: ignore[misc]
    """An engine behind gRPC. Fields are compared and not bytes, since the order of a map's entries means nothing."""

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=_UNLIMITED)
        self._server.add_generic_rpc_handlers((self,))
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._server.stop(None)

    def service(self, handler_call_details: Any) -> Any:
        """Answer any method of the recording."""
        name = handler_call_details.method

        async def answered(request: bytes, context: Any) -> AsyncIterator[bytes]:
            exchange = self._next(name, request)
            if exchange is None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is not in the recording")
                return
            for reply in exchange.replies:
                yield reply
            if exchange.status:
                await context.abort(_STATUSES[exchange.status], exchange.details)

        return grpc.unary_stream_rpc_method_handler(answered)

    def _fields(self, name: str, request: bytes) -> Any:
        service, method = name.removeprefix("/").split("/")
        described = Default().FindServiceByName(service).FindMethodByName(method).input_type
        message = message_factory.GetMessageClass(described).FromString(request)
        return json_format.MessageToDict(message, preserving_proto_field_name=True)


class HttpReplay(Replay):
    """An engine behind HTTP."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        exchange = self._next(f"{request.method} {request.path_qs}", await request.read())
        if exchange is None:
            return web.json_response({"error": {"message": "this is not in the recording"}}, status=400)
        response = web.StreamResponse(status=exchange.status, headers={"content-type": exchange.details})
        await response.prepare(request)
        for piece in exchange.replies:
            await response.write(piece)
            await asyncio.sleep(0)
        return response

    def _fields(self, name: str, request: bytes) -> Any:
        return msgspec.json.decode(request) if request else {}


def _rename(fields: Any, named: dict[str, str]) -> None:
    """Take a request's id away, and call its pictures by the order in which they came up first."""
    fields.pop("request_id", None)
    holder = fields.get("mm_inputs") or fields.get("features") or {}
    hashes = holder.get("mm_hashes")
    for names in hashes.values() if isinstance(hashes, dict) else [hashes or []]:
        names[:] = [named.setdefault(name, f"picture {len(named)}") for name in names]


def _differences(place: str, recorded: Any, asked: Any) -> Iterator[str]:
    """Where two requests differ, by field."""
    if isinstance(recorded, dict) and isinstance(asked, dict):
        for name in Counter([*recorded, *asked]):
            yield from _differences(f"{place}.{name}", recorded.get(name, _NOTHING), asked.get(name, _NOTHING))
    elif recorded != asked:
        yield f"{place.removeprefix('.')} is {_shown(asked)} and was {_shown(recorded)}"


def _shown(value: Any) -> str:
    text = "not there" if value is _NOTHING else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
