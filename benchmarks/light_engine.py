"""An engine stand-in that costs next to nothing: it takes the engines' own gRPC requests and looks at none.

    python benchmarks/light_engine.py --runtime vllm --checkpoint DIR --dtype uint8

Prints its address when it listens. A line on its standard input makes it print, as one line of JSON, what the request
that came last was: its tensors' names, dtypes, shapes and digests, and its token ids' count and digest. So a benchmark
can compare what two gateways sent without an engine that reads every request. Every answer is the same few tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import sys
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, sglang_scheduler_pb2, vllm_engine_pb2

MODULES = {"vllm": (vllm_engine_pb2, "VllmEngine"), "sglang": (sglang_scheduler_pb2, "SglangScheduler")}
REPLY_IDS = (40, 41, 42, 43)
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]


class LightEngine:
    """``dtype`` is how pixels are wanted; uint8 means that the engine normalises them itself, as only vLLM offers."""

    def __init__(self, runtime: str, checkpoint: Path, dtype: str) -> None:
        self.runtime, self.checkpoint, self.dtype = runtime, checkpoint, dtype
        self.pb, service = MODULES[runtime]
        self.service = self.pb.DESCRIPTOR.services_by_name[service].full_name
        config = json.loads((checkpoint / "config.json").read_text("utf-8"))
        self.config = config
        self.vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
        eos = config.get("eos_token_id") or 0
        self.eos = eos if isinstance(eos, list) else [eos]
        self.last = b""
        self.tokenizer = _bundle(checkpoint)

    async def generate(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """One message that completes the answer. SGLang's name the request, so it is read there."""
        self.last = raw
        counts = {"prompt_tokens": 10, "completion_tokens": len(REPLY_IDS)}
        body = {"complete": self.pb.GenerateComplete(output_ids=REPLY_IDS, finish_reason="stop", **counts)}
        if self.runtime == "sglang":
            body["request_id"] = self.pb.GenerateRequest.FromString(raw).request_id
        yield self.pb.GenerateResponse(**body).SerializeToString()

    async def server_info(self, request: Any, context: Any) -> Any:
        if self.runtime == "vllm":
            return self.pb.GetServerInfoResponse(
                server_type="vllm-grpc",
                data_parallel_size=1,
                max_num_seqs=256,
                model_dtype="torch.bfloat16",
                block_size=16,
                multimodal_encoder_dtype="bfloat16" if self.dtype == "uint8" else self.dtype,
                mm_device_do_normalize=self.dtype == "uint8",
            )
        info = self.pb.GetServerInfoResponse(sglang_version="0.5.23", server_type="grpc")
        info.server_args.update({"model_path": str(self.checkpoint), "served_model_name": self.checkpoint.name})
        info.server_args.update({"tp_size": 1, "dp_size": 1, "max_running_requests": 256})
        return info

    async def model_info(self, request: Any, context: Any) -> Any:
        return self.pb.GetModelInfoResponse(
            model_path=str(self.checkpoint),
            tokenizer_path=str(self.checkpoint),
            served_model_name=self.checkpoint.name,
            is_generation=True,
            supports_vision=True,
            model_type=self.config["model_type"],
            architectures=self.config.get("architectures", []),
            vocab_size=self.vocab_size,
            max_context_length=1 << 17,
            max_req_input_len=1 << 17,
            eos_token_ids=self.eos,
        )

    async def loads(self, request: Any, context: Any) -> Any:
        load = self.pb.SchedulerLoad(max_running_requests=256, max_total_num_tokens=1 << 20)
        return self.pb.GetLoadsResponse(dp_rank_count=1, loads=[load])

    async def healthy(self, request: Any, context: Any) -> Any:
        return self.pb.HealthCheckResponse(healthy=True, message="ok")

    async def abort(self, request: Any, context: Any) -> Any:
        return self.pb.AbortResponse()

    async def give_tokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        digest = hashlib.sha256(self.tokenizer).hexdigest()
        for start in range(0, len(self.tokenizer), 65536):
            last = start + 65536 >= len(self.tokenizer)
            piece = self.tokenizer[start : start + 65536]
            yield common_pb2.GetTokenizerChunk(data=piece, sha256=digest if last else "")

    def handlers(self) -> Any:
        def unary(work: Callable[..., Any], kind: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(work, kind.FromString, lambda reply: reply.SerializeToString())

        pb = self.pb
        return grpc.method_handlers_generic_handler(
            self.service,
            {
                "Generate": grpc.unary_stream_rpc_method_handler(self.generate),  # bytes both ways
                "GetServerInfo": unary(self.server_info, pb.GetServerInfoRequest),
                "GetModelInfo": unary(self.model_info, pb.GetModelInfoRequest),
                "GetLoads": unary(self.loads, pb.GetLoadsRequest),
                "HealthCheck": unary(self.healthy, pb.HealthCheckRequest),
                "Abort": unary(self.abort, pb.AbortRequest),
                "GetTokenizer": grpc.unary_stream_rpc_method_handler(
                    self.give_tokenizer, common_pb2.GetTokenizerRequest.FromString, lambda m: m.SerializeToString()
                ),
            },
        )

    def told(self) -> dict[str, Any]:
        """What the last request was."""
        if not self.last:
            return {}
        request = self.pb.GenerateRequest.FromString(self.last)
        mm = request.mm_inputs
        tensors = {name: _told(tensor) for name, tensor in mm.model_specific_tensors.items()}
        if mm.HasField("pixel_values"):
            tensors["pixel_values"] = _told(mm.pixel_values)
        ids = list(request.tokenized.input_ids)
        return {
            "bytes": len(self.last),
            "tokens": len(ids),
            "ids": hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16],
            "spans": [[span.offset, span.length] for span in mm.mm_placeholders],
            "tensors": tensors,
        }


def _told(tensor: Any) -> list[Any]:
    payload = tensor.inline if hasattr(tensor, "inline") else tensor.data
    return [tensor.dtype, list(tensor.shape), hashlib.sha256(payload).hexdigest()[:16]]


def _bundle(checkpoint: Path) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in sorted(checkpoint.iterdir()):
            if file.suffix in (".json", ".jinja"):
                bundle.write(file, file.name)
    return archive.getvalue()


async def serve(engine: LightEngine, port: int) -> None:
    server = grpc.aio.server(options=UNLIMITED)
    server.add_generic_rpc_handlers((engine.handlers(),))
    checks = health.aio.HealthServicer()
    for service in ("", engine.service):
        await checks.set(service, health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(engine.told()), flush=True)
    await server.stop(None)  # whoever started it is gone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runtime", choices=MODULES, default="vllm")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", help="of pixels; uint8: the engine normalises them")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    asyncio.run(serve(LightEngine(arguments.runtime, arguments.checkpoint, arguments.dtype), arguments.port))


if __name__ == "__main__":
    main()
