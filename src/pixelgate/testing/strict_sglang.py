"""The strict engine behind SGLang's gRPC service, as ``sglang serve --smg-grpc-mode`` has it.

In a test::

    async with StrictSglangEngine(checkpoint) as engine:
        ...  # engine.url is the address; engine.requests holds what arrived

As a command: ``python -m pixelgate.testing.strict_sglang --checkpoint DIR``.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2_grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.testing.strict_engine import StrictEngine, files, main, set_within
from pixelgate.testing.strict_layouts import Refused
from pixelgate.testing.strict_rules import StrictFacts
from pixelgate.testing.strict_sglang_rules import check

SERVICE = pb.DESCRIPTOR.services_by_name["SglangScheduler"].full_name


class StrictSglangEngine(StrictEngine):
    """`StrictEngine` that speaks SGLang's protocol; its arguments and attributes are the same.

    It wants float32 pixels and shares no memory, whatever the arguments say. ``well`` is what it answers to a probe.
    """

    scheme = "sglang+grpc"
    service = SERVICE
    max_message_bytes = 256 << 20

    def __init__(self, model: Path | str | StrictFacts, **settings: Any) -> None:
        floats = {} if isinstance(model, StrictFacts) else {"device_normalize": False, "encoder_dtype": "float32"}
        super().__init__(model, **{**settings, **floats, "shm": False})
        self.well = True

    def _serve_on(self, server: Any) -> None:
        sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server(_Servicer(self), server)


class _Servicer(sglang_scheduler_pb2_grpc.SglangSchedulerServicer):  # type: ignore[misc]  # the stubs have no types
    def __init__(self, engine: StrictSglangEngine) -> None:
        self._engine = engine

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        engine, name = self._engine, request.request_id
        engine.requests.append(request)
        try:
            check(request, engine.facts)
        except Refused as why:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(why))
        aborted = engine.running[name] = asyncio.Event()
        try:
            await self._answer(request, context, aborted)
        except asyncio.CancelledError:
            engine.cancelled.append(name)
            raise
        finally:
            del engine.running[name]

    async def _answer(self, request: pb.GenerateRequest, context: Any, aborted: asyncio.Event) -> None:
        """The same reply for each of the answers asked for, a token of each at a time."""
        sampling = request.sampling_params
        answers = range(max(sampling.n, 1))
        sent: list[int] = []
        ending: dict[str, Any] = {"finish_reason": "stop"}
        for token in self._engine.reply_ids:
            if await set_within(aborted, self._engine.delay):
                await asyncio.Event().wait()  # the real one says nothing more, and leaves the call open
            sent.append(token)
            for index in answers if request.stream else ():
                chunk = pb.GenerateStreamChunk(
                    token_ids=[token],
                    prompt_tokens=len(request.tokenized.input_ids),
                    completion_tokens=len(sent),
                    output_logprobs=_logprobs([token], request),
                    index=index,
                )
                await context.write(pb.GenerateResponse(request_id=request.request_id, chunk=chunk))
            if token in sampling.stop_token_ids:
                ending = {"finish_reason": "stop", "matched_token_id": token}
                break
            if sampling.HasField("max_new_tokens") and len(sent) == sampling.max_new_tokens:
                ending = {"finish_reason": "length"}
                break
        ids = sent[-1:] if request.stream else sent
        for index in answers:
            complete = pb.GenerateComplete(
                output_ids=ids,
                prompt_tokens=len(request.tokenized.input_ids),
                completion_tokens=len(sent),
                output_logprobs=_logprobs(ids, request),
                index=index,
                **ending,
            )
            await context.write(pb.GenerateResponse(request_id=request.request_id, complete=complete))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        self._engine.aborted.append(request.request_id)
        running = self._engine.running.get(request.request_id)
        if running is not None:
            running.set()
        return pb.AbortResponse(success=True)

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=self._engine.well)

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        """As the real one: the numbers are defaults."""
        facts, checkpoint = self._engine.facts, self._engine.checkpoint
        return pb.GetModelInfoResponse(
            model_path=str(checkpoint or facts.model_type),
            served_model_name=checkpoint.name if checkpoint else facts.model_type,
            is_generation=True,
            model_type=facts.model_type,
            vocab_size=128_256,
            max_context_length=8192,
            max_req_input_len=8192,
            eos_token_ids=facts.eos_token_ids,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        facts, info = self._engine.facts, pb.GetServerInfoResponse(server_type="grpc", sglang_version="strict")
        info.scheduler_info.update({"max_req_input_len": facts.max_context, "status": "ready"})
        info.server_args.update({"mm_item_limits": f"image={facts.max_images}", "context_length": None})
        return info

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        for chunk in files(self._engine.checkpoint):
            yield chunk


def _logprobs(ids: list[int], request: pb.GenerateRequest) -> pb.OutputLogProbs | None:
    """What an engine tells: a token's is -0.5, and those of the ids after it come next, each 1 less."""
    if not request.return_logprob:
        return None
    likely = range(request.top_logprobs_num)
    tops = [pb.TopLogProbs(token_ids=[i + k for k in likely], values=[-0.5 - k for k in likely]) for i in ids]
    return pb.OutputLogProbs(token_logprobs=[-0.5] * len(ids), token_ids=ids, top_logprobs=tops if likely else [])


if __name__ == "__main__":
    sys.exit(main(StrictSglangEngine, "strict_sglang"))
