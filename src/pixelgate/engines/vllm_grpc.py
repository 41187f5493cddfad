"""vLLM over gRPC: the service ``vllm.grpc.engine.VllmEngine`` of smg-grpc-servicer."""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from pixelgate.engines.grpc_engine import Dialect, GrpcEngine
from pixelgate.engines.vllm_replies import told
from pixelgate.engines.vllm_wire import encode

SCHEME = "vllm+grpc"
SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name


class VllmGrpcEngine(GrpcEngine):
    """One vLLM engine at ``vllm+grpc://host:port``."""

    dialect = Dialect(
        scheme=SCHEME,
        service=SERVICE,
        messages=pb,
        stub=vllm_engine_pb2_grpc.VllmEngineStub,
        told=told,
        encode=encode,
        abort=lambda request_id: pb.AbortRequest(request_ids=[request_id]),
    )
