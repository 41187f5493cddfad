"""A small server around SGLang's ``Engine``, for pictures that are tensors: also of models with M-RoPE.

SGLang's own gRPC servicer hands tensors to the scheduler, which loses the positions of pictures. Its ``Engine`` takes
them as the output of a Hugging Face processor and computes positions as for its own HTTP. This server speaks the same
protocol, ``sglang.grpc.scheduler.SglangScheduler``, in front of that. It runs in SGLang's environment, with grpcio,
grpcio-health-checking and smg-grpc-proto beside it, and needs nothing else of pixelgate::

    python sglang_engine.py --model-path MODEL --host 127.0.0.1 --port 50052 [SGLang's own options]
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

SERVICE = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name
SERVER_TYPE = "pixelgate"  # by which a gateway tells it from SGLang's own servicer

_SCALARS = ("temperature", "min_p", "frequency_penalty", "presence_penalty", "min_new_tokens", "ignore_eos")
_UNSET = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}  # what a 0 means, which nobody can mean
_CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_STATUS = {400: grpc.StatusCode.INVALID_ARGUMENT, 429: grpc.StatusCode.RESOURCE_EXHAUSTED}

ToTensor = Callable[[bytes, list[int], str], Any]
"""Makes a tensor of bytes, a shape and the name of a dtype."""


class Servicer(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]  # the stubs have no types
    """SGLang's protocol in front of an ``engine``, an ``sglang.Engine``."""

    def __init__(self, engine: Any, to_tensor: ToTensor) -> None:
        self._engine = engine
        self._to_tensor = to_tensor

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        """The answers as they come; each is a request of its own to the engine, whose ids begin with the request's."""
        arguments = self._arguments(request)
        manager = self._engine.tokenizer_manager
        names = [f"{request.request_id}-{i}" for i in range(max(request.sampling_params.n, 1))]
        replies: asyncio.Queue[Any] = asyncio.Queue()
        answers = [
            asyncio.create_task(self._answer(arguments, name, i, request.stream, replies))
            for i, name in enumerate(names)
        ]
        left = len(answers)
        try:
            while left:
                reply = await replies.get()
                if isinstance(reply, Exception):
                    code = grpc.StatusCode.INVALID_ARGUMENT if isinstance(reply, ValueError) else _code(reply)
                    await context.abort(code, str(reply))
                left -= reply.HasField("complete")
                yield reply
        finally:
            for answer in answers:
                answer.cancel()
            for name in names:
                manager.abort_request(rid=name)  # of one that has ended nothing is known any more

    async def _answer(self, arguments: Any, name: str, index: int, stream: bool, replies: asyncio.Queue[Any]) -> None:
        try:
            parts = await self._engine.async_generate(**arguments, rid=name, stream=True)
            sent = 0
            async for part in parts:
                meta, ids = part["meta_info"], part["output_ids"]
                ended = meta["finish_reason"]
                if ended and ended.get("status_code"):
                    raise _AbortedError(ended)
                counts = {"prompt_tokens": meta["prompt_tokens"], "completion_tokens": len(ids), "index": index}
                if stream and len(ids) > sent:
                    told = _logprobs(meta, sent)
                    chunk = pb.GenerateStreamChunk(token_ids=ids[sent:], output_logprobs=told, **counts)
                    await replies.put(pb.GenerateResponse(chunk=chunk))
                    sent = len(ids)
                if ended:
                    complete = pb.GenerateComplete(output_ids=ids, output_logprobs=_logprobs(meta, 0), **counts)
                    complete.finish_reason = ended["type"]
                    if isinstance(matched := ended.get("matched"), int):
                        complete.matched_token_id = matched
                    elif isinstance(matched, str):
                        complete.matched_stop_str = matched
                    await replies.put(pb.GenerateResponse(complete=complete))
        except Exception as failure:
            await replies.put(failure)

    def _arguments(self, request: pb.GenerateRequest) -> dict[str, Any]:
        """What the engine is called with."""
        arguments: dict[str, Any] = {
            "input_ids": list(request.tokenized.input_ids),
            "sampling_params": sampling(request.sampling_params),
            "return_logprob": request.return_logprob,
            "logprob_start_len": -1,
            "top_logprobs_num": request.top_logprobs_num,
        }
        if request.HasField("mm_inputs"):
            mm = request.mm_inputs
            tensors = {"pixel_values": mm.pixel_values, **mm.model_specific_tensors}
            made = {name: self._to_tensor(each.data, list(each.shape), each.dtype) for name, each in tensors.items()}
            arguments["image_data"] = [{"format": "processor_output", "modality": "IMAGE", **made}]
        return arguments

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Nothing to do: the call that is given up has aborted all of its request."""
        return pb.AbortResponse(success=True)

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """The engine takes this process along when it ends."""
        return pb.HealthCheckResponse(healthy=True)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """Which model it is."""
        arguments = self._engine.server_args
        return pb.GetModelInfoResponse(
            model_path=arguments.model_path,
            served_model_name=arguments.served_model_name,
            model_type=self._engine.tokenizer_manager.model_config.hf_config.model_type,
            is_generation=True,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """That it is this server, and how long a prompt may be."""
        info = pb.GetServerInfoResponse(server_type=SERVER_TYPE)
        info.scheduler_info.update({"max_req_input_len": self._engine.tokenizer_manager.max_req_input_len})
        return info


class _AbortedError(Exception):
    """The engine's own end of a request."""

    def __init__(self, ended: Any) -> None:
        super().__init__(ended.get("message", "aborted"))
        self.status = int(ended["status_code"])


def _code(failure: Exception) -> grpc.StatusCode:
    status = failure.status if isinstance(failure, _AbortedError) else 500
    return _STATUS.get(status, grpc.StatusCode.INTERNAL)


def sampling(sent: pb.SamplingParams) -> dict[str, Any]:
    """The engine's sampling parameters, for one answer."""
    chosen: dict[str, Any] = {name: getattr(sent, name) for name in _SCALARS}
    chosen |= {name: getattr(sent, name) or neutral for name, neutral in _UNSET.items()}
    chosen |= {"stop": list(sent.stop), "stop_token_ids": list(sent.stop_token_ids)}
    chosen |= {"skip_special_tokens": sent.skip_special_tokens, "no_stop_trim": sent.no_stop_trim}
    chosen["max_new_tokens"] = sent.max_new_tokens if sent.HasField("max_new_tokens") else None
    if sent.logit_bias:
        chosen["logit_bias"] = dict(sent.logit_bias)
    if kind := sent.WhichOneof("constraint"):
        chosen[_CONSTRAINTS[kind]] = getattr(sent, kind)
    return chosen


def _logprobs(meta: Any, start: int) -> pb.OutputLogProbs | None:
    """Those of the tokens from ``start`` on, where they were asked for."""
    if "output_token_logprobs" not in meta:
        return None
    own = meta["output_token_logprobs"][start:]
    tops = [
        pb.TopLogProbs(values=[entry[0] for entry in row or ()], token_ids=[entry[1] for entry in row or ()])
        for row in meta.get("output_top_logprobs", ())[start:]
    ]
    return pb.OutputLogProbs(
        token_logprobs=[entry[0] for entry in own], token_ids=[entry[1] for entry in own], top_logprobs=tops
    )


@contextlib.asynccontextmanager
async def serving(engine: Any, to_tensor: ToTensor, address: str) -> AsyncIterator[tuple[Any, int]]:
    """Serve ``engine`` at ``host:port`` (0: any free one) as long as the block runs; gives the server and its port."""
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
        ]
    )
    sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(Servicer(engine, to_tensor), server)
    checks = health.aio.HealthServicer()
    for service in ("", SERVICE):
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield server, port
    finally:
        await server.stop(None)


async def _serve(engine: Any, to_tensor: ToTensor, address: str) -> None:
    async with serving(engine, to_tensor, address) as (server, port):
        print(f"sglang+engine://{address.rpartition(':')[0]}:{port}", flush=True)
        await server.wait_for_termination()


def main(arguments: list[str]) -> None:
    """Start the engine with SGLang's own options and serve it until the process is ended."""
    import sglang
    import torch
    from sglang.srt.server_args import prepare_server_args

    def to_tensor(data: bytes, shape: list[int], dtype: str) -> Any:
        # a copy, because torch wants memory that can be written
        return torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(shape)

    options = prepare_server_args(arguments)
    engine = sglang.Engine(server_args=options)
    try:
        asyncio.run(_serve(engine, to_tensor, f"{options.host}:{options.port}"))
    finally:
        engine.shutdown()


if __name__ == "__main__":  # the engine's processes import this file again
    main(sys.argv[1:])
