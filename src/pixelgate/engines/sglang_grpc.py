"""SGLang over gRPC, ``--smg-grpc-mode``: service ``sglang.grpc.scheduler.SglangScheduler`` of smg-grpc-servicer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

from pixelgate.engines.grpc_channel import Connection
from pixelgate.engines.grpc_engine import Dialect, GrpcEngine
from pixelgate.engines.grpc_wire import MAX_TENSOR_BYTES
from pixelgate.engines.sglang_replies import told, told_beside
from pixelgate.engines.sglang_served import not_served, not_served_beside
from pixelgate.engines.sglang_wire import encode
from pixelgate.errors import ConfigError

SCHEME = "sglang+grpc"
BESIDE_SCHEME = "sglang+engine"
SERVICE = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name

_PROBE_TIMEOUT = 25.0  # seconds; the servicer gives its scheduler 20


class SglangGrpcEngine(GrpcEngine):
    """One SGLang engine at ``sglang+grpc://host:port``, for a checkpoint of ``model_type`` and ``image_processor``.

    Raises ConfigError for a malformed URL, and for a checkpoint that SGLang would answer wrong over this protocol.
    """

    dialect = Dialect(
        scheme=SCHEME,
        service=SERVICE,
        messages=pb,
        stub=sglang_scheduler_pb2_grpc.SglangSchedulerStub,
        told=told,
        encode=lambda request, segments: encode(request),  # it never says that it shares memory
        abort=lambda request_id: pb.AbortRequest(request_id=request_id, reason="the client is gone"),
    )

    def __init__(self, url: str, *, model_type: str = "", image_processor: str = "", **timeouts: Any) -> None:
        super().__init__(url, shm=False, **timeouts)
        if complaint := self._refusal(model_type, image_processor):
            raise ConfigError(f"{url}: {complaint}")

    def _refusal(self, model_type: str, image_processor: str) -> str:
        return not_served(model_type, image_processor)

    async def _serving(self, connection: Connection) -> bool:
        """Whether it takes requests.

        The first request after half a minute of rest makes its health service say that the scheduler is stuck, until
        the answer begins. So that alone is not believed: a scheduler that answers a probe is well.
        """
        if await super()._serving(connection):
            return True
        reply = await self._ask(connection, connection.stub.HealthCheck, pb.HealthCheckRequest(), _PROBE_TIMEOUT)
        return bool(reply.healthy)


class SglangBesideEngine(SglangGrpcEngine):
    """The same at ``sglang+engine://host:port`` for pixelgate's own server beside SGLang's engine: for Qwen-VL."""

    dialect = replace(
        SglangGrpcEngine.dialect,
        scheme=BESIDE_SCHEME,
        told=told_beside,
        encode=lambda request, segments: encode(request, MAX_TENSOR_BYTES),
    )

    def _refusal(self, model_type: str, image_processor: str) -> str:
        return not_served_beside(model_type)
