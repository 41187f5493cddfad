"""A vLLM client for a test, and an engine that does what the test says."""

from __future__ import annotations

from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from pixelgate.engines.vllm_grpc import SERVICE, VllmGrpcEngine


@asynccontextmanager
async def client(url, **timeouts):
    engine = VllmGrpcEngine(url, **timeouts)
    try:
        yield engine
    finally:
        await engine.close()


class Scripted(vllm_engine_pb2_grpc.VllmEngineServicer):
    """An engine that does what a test says: messages to send, then a status to end with."""

    def __init__(self, messages=(), status=None, details="secret words of the engine", **server_info):
        self.messages, self.status, self.details = messages, status, details
        self.server_info = {"model_dtype": "torch.bfloat16", **server_info}
        self.calls = 0

    async def Generate(self, request, context):
        self.calls += 1
        for message in self.messages:
            await context.write(pb.GenerateResponse(**message))
        if self.status is not None:
            await context.abort(self.status, self.details)

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(served_model_name="m", model_type="qwen2_vl")

    async def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse(**self.server_info)


@asynccontextmanager
async def scripted(*args, port=0, **kwargs):
    """An engine, given as a Scripted or by the arguments of one, with a client."""
    servicer = args[0] if args and isinstance(args[0], Scripted) else Scripted(*args, **kwargs)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 16)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    checks = servicer.health = health.aio.HealthServicer()
    await checks.set(SERVICE, 1)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    servicer.url = f"vllm+grpc://127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        async with client(servicer.url) as engine:
            yield engine, servicer
    finally:
        await server.stop(None)


def complete(**fields):
    return {"complete": pb.GenerateComplete(**fields)}


def chunk(*ids):
    return {"chunk": pb.GenerateStreamChunk(token_ids=ids)}
