"""What engines behind gRPC services of smg-grpc-servicer share: a connection, its facts, and what failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import grpc
from grpc_health.v1 import health_pb2
from smg_grpc_proto.generated import common_pb2

from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest, misfit
from pixelgate.engines.grpc_call import Call
from pixelgate.engines.grpc_channel import Connection, connection, target
from pixelgate.engines.grpc_replies import Answers
from pixelgate.engines.grpc_wire import own_memory
from pixelgate.engines.same_model import SameModel
from pixelgate.engines.shm import Segments, namespace
from pixelgate.errors import (
    BusyError,
    EngineDeclinedError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnreachableError,
    PixelgateError,
    RequestError,
    TooLargeError,
)
from pixelgate.pixels.tensor import Tensor

_ABORT_TIMEOUT = 1.0
_NOTICED_AFTER = 0.05  # seconds, until the library has noticed that a connection is lost over which a call has failed
_ARCHIVE_TIMEOUT = 60.0
_COPIED_HERE = 8 << 20  # bytes
_WRITTEN_HERE = 1 << 20  # bytes of shared memory, whose pages are new each time
_LOGGED_DETAILS = 500  # characters
_LATE = "The engine did not answer in time."
_CLOSED = "The connection to the engine was closed."
_CONSTRAINT_FAILED = "smg-constraint-failed"  # the trailer with which a servicer says so

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dialect:
    """What the engines of one gRPC service have for themselves: its name, its messages and stub, and how they are read.

    ``told`` makes facts of a GetModelInfoResponse and a GetServerInfoResponse, ``encode`` the bytes of a request, with
    segments for its tensors where memory is shared, ``abort`` the message that aborts the request of that id.
    """

    scheme: str
    service: str
    messages: Any
    stub: Any
    told: Callable[[Any, Any], EngineFacts]
    encode: Callable[[EngineRequest, Segments | None], bytes]
    abort: Callable[[str], Any]


class GrpcEngine:
    """One engine at ``scheme://host:port``. Fulfils ``EngineWithFiles``; timeouts are in seconds.

    ``generate_timeout`` is the deadline of a whole answer, ``call_timeout`` of every other call. The connection is
    opened at the first use, kept, and opened again when it breaks. With ``shm`` large tensors are handed over in
    shared memory if the engine sees the same. Raises ConfigError for a malformed URL.
    """

    dialect: ClassVar[Dialect]

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 5.0,
        call_timeout: float = 10.0,
        generate_timeout: float | None = 600.0,
        shm: bool = True,
    ) -> None:
        self._url = url
        self._target = target(url, self.dialect.scheme)
        self._connect_timeout = connect_timeout
        self._call_timeout = call_timeout
        self._generate_timeout = generate_timeout
        self._memory = namespace() if shm else ""
        self._connection: Connection | None = None
        self._same = SameModel(url)

    @property
    def url(self) -> str:
        """The address as configured; for the operator only, never for a client."""
        return self._url

    async def describe(self) -> EngineFacts:
        """Ask the engine for its facts.

        Raises EngineUnavailableError when it is down or not ready, EngineError when it came back with another model
        than it had when it was asked first.
        """
        connection = await self._connected()
        drops = connection.drops
        if not await self._serving(connection):
            raise EngineUnavailableError("The engine is not ready to take requests.")
        pb = self.dialect.messages
        model = await self._ask(connection, connection.stub.GetModelInfo, pb.GetModelInfoRequest())
        server = await self._ask(connection, connection.stub.GetServerInfo, pb.GetServerInfoRequest())
        facts = self.dialect.told(model, server)
        self._same.check(facts)
        if not connection.up() or connection.drops != drops:
            raise EngineUnreachableError(_CLOSED)
        connection.facts = facts
        return facts

    async def healthy(self) -> bool:
        """Whether the engine takes requests now. Never raises."""
        try:
            return await self._serving(await self._connected())
        except PixelgateError:
            return False

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Delta, None]:
        """Send one request and yield its deltas; closing the iterator aborts the request on the engine.

        Raises EngineUnreachableError when the request was certainly not sent, and other errors of
        ``pixelgate.errors`` when it may have been.
        """
        connection, facts = await self._ready_for(request)
        drops = connection.drops  # of another connection what has been told may not be true
        segments = Segments() if self._memory and facts.shared_memory == self._memory else None
        call, begun, over, since = None, False, False, inf
        try:
            async with _turn(connection, request):
                message = await self._encoded(request, segments)
                if not connection.up() or connection.drops != drops:
                    raise EngineUnreachableError(_CLOSED)
                # From here on the request may have reached the engine.
                trace = (("traceparent", request.traceparent),) if request.traceparent else None
                since = time.monotonic()
                call = Call(connection, request, message, timeout=self._generate_timeout, metadata=trace)
                del message
                await call.send()
            answers, last = Answers(request.sampling.n, request.sampling.logprobs is not None), None
            async for response in call:
                delta, begun = answers.push(response), True
                if answers.complete:
                    last = last or delta
                elif delta is not None:
                    yield delta
            over = True
            call.close()
            if last is None:
                raise EngineError("The engine ended its answer before it was complete.")
            yield last
        except grpc.aio.AioRpcError as error:
            over = True
            failure = self._unread(error, segments) or self._failure(error)
            if error.code() is grpc.StatusCode.INTERNAL and time.monotonic() - since >= (self._generate_timeout or inf):
                failure = EngineTimeoutError(_LATE)  # the library's way to say so while it is sending
            if type(failure) is EngineUnavailableError and not begun and await self._well(connection, drops):
                failure = EngineDeclinedError(failure.message)
            try:
                raise failure from None
            finally:
                del failure  # whose traceback has this frame, which would keep the tensors
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            # grpc's way to say that the channel was closed under the call
            raise EngineUnavailableError(_CLOSED) from None
        finally:
            if call is not None:
                call.close()
            if segments is not None:
                segments.remove()
            if call is not None and not over and self._connection is connection:
                await self._abort(connection, request.request_id)

    async def _encoded(self, request: EngineRequest, segments: Segments | None) -> bytes:
        try:
            if request.images is not None and _takes_long(request.images.tensors[0], segments):
                return await asyncio.to_thread(self.dialect.encode, request, segments)
            return self.dialect.encode(request, segments)
        except OSError as failure:
            if segments is None:
                raise
            log.warning("tensors cannot be written to shared memory and go in the message: %s", failure.strerror)
            segments.remove()  # what is there of them would be in the engine's way
            return await self._encoded(request, None)

    def _unread(self, error: grpc.aio.AioRpcError, segments: Segments | None) -> EngineError | None:
        """What became of a request whose tensors the engine could not read. It has not begun with it then."""
        if segments is None or error.code() is not grpc.StatusCode.INTERNAL or not segments.unread():
            return None
        log.error(
            "%s cannot read what this process writes to shared memory, so it gets it in messages from now on: "
            "let both run as one user, or set shm to off",
            self._url,
        )
        self._memory = ""
        return EngineDeclinedError("The engine could not read the pictures.")

    async def archive(self, max_bytes: int) -> bytes:
        """The engine's configuration and tokenizer files as a ZIP of at most ``max_bytes``.

        Raises EngineUnavailableError when it is down, EngineError when it gives no files, too many or damaged ones.
        """
        connection = await self._connected()
        data, digest = bytearray(), ""
        with self._asking():
            call = connection.stub.GetTokenizer(common_pb2.GetTokenizerRequest(), timeout=_ARCHIVE_TIMEOUT)
            try:
                async for chunk in call:
                    data += chunk.data
                    digest = chunk.sha256  # of all the data, and only in the last chunk
                    if len(data) > max_bytes:
                        raise EngineError(f"The engine's files are more than {max_bytes >> 20} MiB.")
            finally:
                call.cancel()
        if hashlib.sha256(data).hexdigest() != digest:
            raise EngineError("The engine's files arrived incomplete or damaged.")
        return bytes(data)

    async def close(self) -> None:
        """Give the connection back; requests under way end with EngineUnavailableError."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.channel.close()

    async def _ready_for(self, request: EngineRequest) -> tuple[Connection, EngineFacts]:
        """The connection, over which the engine has told facts that ``request`` fits."""
        connection = await self._connected()
        try:
            facts = connection.facts or await self.describe()
        except EngineError as error:
            raise EngineUnreachableError(error.message) from None
        if reason := misfit(request, facts):
            raise EngineUnreachableError(reason)
        return connection, facts

    async def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self._open()
        connection = self._connection
        down = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
        try:
            async with asyncio.timeout(self._connect_timeout):
                while not connection.up():
                    state = connection.channel.get_state(try_to_connect=True)
                    if state in down or self._connection is not connection:
                        raise EngineUnreachableError("The engine cannot be reached.")
                    if state is not grpc.ChannelConnectivity.READY:
                        await connection.channel.wait_for_state_change(state)
        except TimeoutError:
            raise EngineUnreachableError("The engine cannot be reached.") from None
        return connection

    def _open(self) -> Connection:
        # Made here and not in the constructor: a channel belongs to the event loop that runs when it is made.
        dialect = self.dialect
        reply = dialect.messages.GenerateResponse
        return connection(self._target, dialect.stub, dialect.service, reply, self._connect_timeout)

    async def _well(self, connection: Connection, drops: int) -> bool:
        """Whether the engine takes requests, and over a connection that was not lost since it had been ``drops`` times.

        Over another it may be a new process, after a request that ended the one before.
        """
        await asyncio.sleep(_NOTICED_AFTER)
        try:
            return await self._serving(connection) and connection.drops == drops and self._connection is connection
        except PixelgateError:
            return False

    async def _serving(self, connection: Connection) -> bool:
        reply = await self._ask(
            connection, connection.health.Check, health_pb2.HealthCheckRequest(service=self.dialect.service)
        )
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def _ask(self, connection: Connection, method: Any, message: Any, within: float | None = None) -> Any:
        if not connection.up():
            raise EngineUnavailableError(_CLOSED)
        with self._asking():
            return await method(message, timeout=within or self._call_timeout)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Raises what becomes of a question about the engine itself that it does not answer."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            failure = self._failure(error)
            # Nothing a client sent is at fault here, and an engine that does not answer is one that is down.
            if isinstance(failure, EngineTimeoutError):
                raise EngineUnavailableError(failure.message) from None
            if isinstance(failure, EngineError):
                raise failure from None
            raise EngineError("The engine does not answer questions about itself.") from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            if _task_is_cancelled():
                raise
            raise EngineUnavailableError(_CLOSED) from None

    async def _abort(self, connection: Connection, request_id: str) -> None:
        # Cancelling the call is enough for a healthy engine; this is for one that missed it. It must not connect anew.
        if connection.channel.get_state() is not grpc.ChannelConnectivity.READY:
            return
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            await connection.stub.Abort(self.dialect.abort(request_id), timeout=_ABORT_TIMEOUT)

    def _failure(self, error: grpc.aio.AioRpcError) -> PixelgateError:
        """The error for a failed call. The engine's own words go to the log and no further."""
        code, details = error.code(), error.details() or ""
        log.warning("%s answered %s: %.*s", self._url, code.name, _LOGGED_DETAILS, details)
        match code:
            case grpc.StatusCode.INVALID_ARGUMENT:
                return RequestError(
                    "The engine refused the request: check the sampling parameters, "
                    "and that the prompt fits into the model's context."
                )
            case grpc.StatusCode.FAILED_PRECONDITION if _CONSTRAINT_FAILED in dict(error.trailing_metadata() or ()):
                return RequestError("The engine could not keep to the form that the request wants of its answer.")
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
                return TooLargeError("The request is larger than the engine takes: send fewer or smaller pictures.")
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return EngineUnavailableError("The engine is full; try again later.")
            case grpc.StatusCode.UNAVAILABLE:
                return EngineUnavailableError("The engine is not available.")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return EngineTimeoutError(_LATE)
            case _:
                return EngineError("The engine failed.")


@contextlib.asynccontextmanager
async def _turn(connection: Connection, request: EngineRequest) -> AsyncIterator[None]:
    """A request with pictures waits until few others are being sent. Raises EngineDeclinedError if it waits too long.

    An engine that has stopped reading keeps theirs for as long as an answer may take.
    """
    if request.images is None:
        yield
        return
    with connection.sending.share(request.owner) as sending:
        try:
            await sending.take(1)
        except BusyError:
            raise EngineDeclinedError("The engine does not take in the pictures of others.") from None
        yield


def _takes_long(pixels: Tensor, segments: Segments | None) -> bool:
    """Whether encoding takes longer than the way to a thread and back."""
    if segments is not None:
        return pixels.nbytes >= _WRITTEN_HERE
    return pixels.nbytes >= _COPIED_HERE and own_memory(pixels.parts) is None


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
