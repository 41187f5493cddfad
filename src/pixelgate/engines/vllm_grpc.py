"""vLLM over gRPC: the service ``vllm.grpc.engine.VllmEngine`` of smg-grpc-servicer."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator, Iterator
from typing import Any, NamedTuple, cast, get_args
from urllib.parse import urlsplit

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.engine import Delta, EngineFacts, EngineRequest, FinishReason
from pixelgate.engines.vllm_wire import encode
from pixelgate.errors import (
    ConfigError,
    EngineError,
    EngineTimeoutError,
    EngineUnavailableError,
    EngineUnreachableError,
    PixelgateError,
    RequestError,
    TooLargeError,
)

SCHEME = "vllm+grpc"
SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_FLOATS = ("float32", "bfloat16", "float16")
_ABORT_TIMEOUT = 1.0
_ARCHIVE_TIMEOUT = 60.0
_MAX_REPLY_BYTES = 64 << 20  # one message of an engine: token ids, or a piece of its files
_ENCODE_IN_THREAD_FROM = 1 << 20  # bytes; below, the copy is quicker than the way to a thread
_LOGGED_DETAILS = 500  # characters
_CLOSED = "The connection to the engine was closed."

log = logging.getLogger(__name__)


class _Connection(NamedTuple):
    channel: grpc.aio.Channel
    stub: Any
    health: Any
    generate: Any


class VllmGrpcEngine:
    """One vLLM engine at ``vllm+grpc://host:port``. Fulfils ``Engine``; timeouts are in seconds.

    ``generate_timeout`` is the deadline of a whole answer, ``call_timeout`` of every other call. The connection is
    opened at the first use, kept, and opened again when it breaks. Raises ConfigError for a malformed URL.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout: float = 5.0,
        call_timeout: float = 10.0,
        generate_timeout: float | None = 600.0,
    ) -> None:
        self._url = url
        self._target = _target(url)
        self._connect_timeout = connect_timeout
        self._call_timeout = call_timeout
        self._generate_timeout = generate_timeout
        self._connection: _Connection | None = None
        self._facts: EngineFacts | None = None  # as told over the present connection

    @property
    def url(self) -> str:
        """The address as configured; for the operator only, never for a client."""
        return self._url

    async def describe(self) -> EngineFacts:
        """Ask the engine for its facts. Raises EngineUnavailableError when it is down or not ready."""
        connection = await self._connected()
        if not await self._serving(connection):
            raise EngineUnavailableError("The engine is not ready to take requests.")
        model = await self._ask(connection.stub.GetModelInfo, pb.GetModelInfoRequest())
        server = await self._ask(connection.stub.GetServerInfo, pb.GetServerInfoRequest())
        self._facts = _facts(model, server)
        return self._facts

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
        box = [await _encoded(request)]
        connection = await self._ready_for(request)
        call = connection.generate(box, timeout=self._generate_timeout)
        over = False
        try:
            count, last = 0, None
            async for response in call:
                kind = response.WhichOneof("response")
                if kind == "complete":
                    last = _last_delta(response.complete, count)
                elif kind == "chunk" and response.chunk.token_ids:
                    ids = tuple(response.chunk.token_ids)
                    count += len(ids)
                    yield Delta(ids, prompt_tokens=response.chunk.prompt_tokens, completion_tokens=count)
            over = True
            if last is None:
                raise EngineError("The engine ended its answer before it was complete.")
            yield last
        except grpc.aio.AioRpcError as error:
            over = True
            raise self._failure(error) from None
        except asyncio.CancelledError:
            if _task_is_cancelled():
                raise
            # grpc's way to say that the channel was closed under the call
            raise EngineUnavailableError(_CLOSED) from None
        finally:
            if not over:
                call.cancel()
                if self._connection is connection:
                    await self._abort(connection, request.request_id)

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

    async def _ready_for(self, request: EngineRequest) -> _Connection:
        """The connection, ready to send ``request``. Only after this can a request have reached the engine."""
        connection = await self._connected()
        try:
            # A new connection may lead to an engine that was started again with other settings, and one that
            # wants other pixels would accept these and answer nonsense.
            facts = self._facts or await self.describe()
        except EngineError as error:
            raise EngineUnreachableError(error.message) from None
        if self._connection is not connection:
            raise EngineUnreachableError(_CLOSED)
        if request.images is not None and request.images.tensors[0].dtype != facts.pixel_dtype:
            raise EngineUnreachableError("The engine wants the pictures of this request in another form.")
        return connection

    async def _connected(self) -> _Connection:
        if self._connection is None:
            self._connection = self._open()
        connection = self._connection
        channel, ready = connection.channel, grpc.ChannelConnectivity.READY
        down = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)
        try:
            async with asyncio.timeout(self._connect_timeout):
                while (state := channel.get_state(try_to_connect=True)) is not ready:
                    self._facts = None
                    if state in down or self._connection is not connection:
                        raise EngineUnreachableError("The engine cannot be reached.")
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            raise EngineUnreachableError("The engine cannot be reached.") from None
        return connection

    def _open(self) -> _Connection:
        # Made here and not in the constructor: a channel belongs to the event loop that runs when it is made.
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", _MAX_REPLY_BYTES),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.initial_reconnect_backoff_ms", 200),
            ("grpc.max_reconnect_backoff_ms", 2_000),
            ("grpc.min_reconnect_backoff_ms", int(self._connect_timeout * 1000)),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),  # engines are inside; a proxy variable is meant for fetching
        ]
        channel = grpc.aio.insecure_channel(self._target, options=options)
        return _Connection(
            channel=channel,
            stub=vllm_engine_pb2_grpc.VllmEngineStub(channel),
            health=health_pb2_grpc.HealthStub(channel),
            generate=channel.unary_stream(
                f"/{SERVICE}/Generate",
                # A call keeps its request until the answer ends. Given the bytes in a list, from which they are taken
                # when they are sent, it keeps an empty list.
                request_serializer=list.pop,
                response_deserializer=pb.GenerateResponse.FromString,
            ),
        )

    async def _serving(self, connection: _Connection) -> bool:
        reply = await self._ask(connection.health.Check, health_pb2.HealthCheckRequest(service=SERVICE))
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def _ask(self, method: Any, message: Any) -> Any:
        with self._asking():
            return await method(message, timeout=self._call_timeout)

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

    async def _abort(self, connection: _Connection, request_id: str) -> None:
        # Cancelling the call is enough for a healthy engine; this is for one that missed it. It must not connect anew.
        if connection.channel.get_state() is not grpc.ChannelConnectivity.READY:
            return
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError):
            await connection.stub.Abort(pb.AbortRequest(request_ids=[request_id]), timeout=_ABORT_TIMEOUT)

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
            case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
                return TooLargeError("The request is larger than the engine takes: send fewer or smaller pictures.")
            case grpc.StatusCode.RESOURCE_EXHAUSTED:
                return EngineUnavailableError("The engine is full; try again later.")
            case grpc.StatusCode.UNAVAILABLE:
                return EngineUnavailableError("The engine is not available.")
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return EngineTimeoutError("The engine did not answer in time.")
            case _:
                return EngineError("The engine failed.")


def _target(url: str) -> str:
    """``host:port`` of an engine URL."""
    try:
        parts = urlsplit(url)
        plain = url == f"{SCHEME}://{parts.netloc}" and "@" not in parts.netloc
        if plain and parts.hostname and parts.port:
            return parts.netloc
    except ValueError:  # a port that is no number, or brackets that do not match
        pass
    raise ConfigError(f"{url!r} is not an engine address: it must look like {SCHEME}://host:port.")


async def _encoded(request: EngineRequest) -> bytes:
    if request.images is not None and request.images.tensors[0].nbytes >= _ENCODE_IN_THREAD_FROM:
        return await asyncio.to_thread(encode, request)
    return encode(request)


def _last_delta(complete: pb.GenerateComplete, count: int) -> Delta:
    """The delta that ends an answer, ``count`` tokens of which are known from chunks.

    After chunks some servicers repeat all ids here and some the last chunk's; beyond ``count`` is what is new in both.
    """
    if complete.finish_reason not in get_args(FinishReason):
        raise EngineError("The engine ended its answer with an error.")
    ids = tuple(complete.output_ids[count:])
    stop = complete.WhichOneof("matched_stop")
    return Delta(
        ids,
        cast(FinishReason, complete.finish_reason),
        complete.prompt_tokens,
        count + len(ids),
        getattr(complete, stop) if stop else None,
    )


def _facts(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> EngineFacts:
    dtype = (server.multimodal_encoder_dtype or server.model_dtype).removeprefix("torch.")
    if server.mm_device_do_normalize:
        dtype = "uint8"
    elif dtype not in _FLOATS:
        raise EngineError(f"The engine wants pictures as {dtype or 'nothing'}, which is none of {', '.join(_FLOATS)}.")
    return EngineFacts(
        model_name=model.served_model_name,
        model_type=model.model_type,
        pixel_dtype=cast(Any, dtype),
        max_context=model.max_context_length or None,
        max_images=_max_images(server.mm_item_limits),
        max_embeddings_per_image=server.mm_encoder_budget or None,
        takes_mixed_shapes=False,
        eos_token_ids=tuple(model.eos_token_ids),
    )


def _max_images(limits: str) -> int | None:
    """Images per prompt of a label such as ``image=8,video=2``; a modality that it leaves out has a limit of 0."""
    if not limits:
        return None
    try:
        return int(dict(pair.split("=") for pair in limits.split(",")).get("image", 0))
    except ValueError:
        raise EngineError(f"The engine's limits for pictures cannot be read: {limits!r}.") from None


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
