"""Requests for a small model with rows of patches, as the gateway would build them for an SGLang."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import MappingProxyType

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2_grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

from pixelgate.engines.engine import EngineRequest, Images, Sampling, Span
from pixelgate.engines.sglang_grpc import SERVICE, SglangGrpcEngine
from pixelgate.pixels.affine import Affine
from pixelgate.pixels.plan import ImagePlan, Tiles, View
from pixelgate.pixels.tensor import Tensor
from pixelgate.testing.strict_layouts import Rows
from pixelgate.testing.strict_rules import StrictFacts

IMG, BREAK, END = 900, 901, 902
PATCH = 4
AFFINE = Affine("pil", (0.5,) * 3, (0.5,) * 3)
FACTS = StrictFacts(
    model_type="mistral3",
    vocab_size=1000,
    image_token_id=IMG,
    layout=Rows((3, None, None), patch=PATCH),
    eos_token_ids=(999,),
    encoder_dtype="float32",
    max_context=512,
    max_images=3,
)


def plan(rows, columns):
    size = (rows * PATCH, columns * PATCH)
    aux = MappingProxyType({"image_sizes": np.array([size], np.int64)})
    return ImagePlan(*size, (View(size, None),), Tiles(), AFFINE, rows * columns, grid=(1, rows, columns), aux=aux)


def images(grids=((2, 3), (1, 2)), first_span=2):
    """Pictures of so many rows and columns of patches, with two tokens between the second's and the first's."""
    parts = tuple(
        np.random.default_rng(seed).normal(size=(1, 3, rows * PATCH, columns * PATCH)).astype(np.float32)
        for seed, (rows, columns) in enumerate(grids)
    )
    spans, offset = [], first_span
    for rows, columns in grids:
        spans.append(Span(offset, rows * (columns + 1)))
        offset += rows * (columns + 1)
    pixels = Tensor("pixel_values", "float32", parts, "batched")
    return Images((pixels,), tuple(spans), ("0" * 64,) * len(grids), IMG, tuple(plan(*grid) for grid in grids))


def prompt(pictures):
    """Token ids around pictures that follow each other at once."""
    ids = [1, 5]
    for each in pictures.plans:
        _, rows, columns = each.grid
        picture = [*[IMG] * columns, BREAK] * rows
        ids += [*picture[:-1], END]
    return (*ids, 6, 7)


def request(grids=None, *, request_id="r-1", stream=True, **sampling):
    """A text request, or with ``grids`` one with pictures."""
    sampling = Sampling(**{"temperature": 0.0, "max_tokens": 64, **sampling})
    if grids is None:
        return EngineRequest(request_id, (5, 6, 7), sampling, stream=stream)
    pictures = images(grids)
    return EngineRequest(request_id, prompt(pictures), sampling, pictures, stream)


@asynccontextmanager
async def client(url, **arguments):
    engine = SglangGrpcEngine(url, **arguments)
    try:
        yield engine
    finally:
        await engine.close()


class Scripted(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):
    """An engine that does what a test says: messages to send, then a status to end with."""

    def __init__(self, messages=(), status=None, trailer=(), **model):
        self.messages, self.status, self.trailer = messages, status, trailer
        self.model = {"served_model_name": "m", "model_type": "mistral3", **model}
        self.calls = 0

    async def Generate(self, request, context):
        self.calls += 1
        for message in self.messages:
            await context.write(pb.GenerateResponse(**message))
        if self.status is not None:
            await context.abort(self.status, "secret words of the engine", self.trailer)

    async def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(**self.model)

    async def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse()


@asynccontextmanager
async def scripted(*arguments, **model):
    """An engine, given by the arguments of a Scripted, with a client."""
    servicer = Scripted(*arguments, **model)
    server = grpc.aio.server()
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(servicer, server)
    checks = health.aio.HealthServicer()
    await checks.set(SERVICE, 1)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with client(f"sglang+grpc://127.0.0.1:{port}") as engine:
            yield engine, servicer
    finally:
        await server.stop(None)
