"""A vLLM engine without a model: it speaks the real protocol, refuses what would break a real one, and answers a text.

In a test::

    async with StrictEngine(checkpoint, device_normalize=True) as engine:
        ...  # engine.url is the address; engine.requests holds what arrived

As a command: ``python -m pixelgate.testing.strict_engine --checkpoint DIR``.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import sys
import time
import zipfile
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer

from pixelgate.errors import CheckpointError
from pixelgate.testing.strict_layouts import Refused
from pixelgate.testing.strict_rules import Identities, StrictFacts, check
from pixelgate.testing.strict_shm import namespace, take_in

SERVICE = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name

_TOKENIZER_CHUNK = 64 * 1024


class StrictEngine:
    """A gRPC server on ``host``:``port`` (0: any free one) for a checkpoint directory or for given facts.

    The answer is ``reply_ids``, or else ``reply`` in the checkpoint's tokenizer (without one: its UTF-8 bytes as ids)
    and the end-of-sequence token, with ``delay`` seconds before each token. ``settings`` are fields of StrictFacts,
    such as ``device_normalize``. The last ``keep`` messages that arrived are in ``requests``, with their tensors inline
    also where they came in shared memory, which the engine offers with ``shm``; the files' names are in ``shared``.
    ``cancelled`` has the ids of requests whose call was given up, ``aborted`` those that Abort named.
    """

    scheme: ClassVar[str] = "vllm+grpc"
    service: ClassVar[str] = SERVICE
    max_message_bytes: int = -1

    def __init__(
        self,
        model: Path | str | StrictFacts,
        *,
        reply: str = "The picture arrived in order.",
        reply_ids: Sequence[int] | None = None,
        delay: float = 0.0,
        host: str = "127.0.0.1",
        port: int = 0,
        keep: int = 8,
        shm: bool = True,
        **settings: Any,
    ) -> None:
        self.checkpoint = None if isinstance(model, StrictFacts) else Path(model)
        self.facts = model if isinstance(model, StrictFacts) else StrictFacts.from_checkpoint(Path(model), **settings)
        self.reply_ids = tuple(self._ids_of(reply) if reply_ids is None else reply_ids)
        self.delay = delay
        self.requests: deque[Any] = deque(maxlen=keep)
        self.shm_namespace = namespace() if shm else ""
        self.shared: deque[str] = deque(maxlen=keep)
        self.cancelled: list[str] = []
        self.aborted: list[str] = []
        self.running: dict[str, asyncio.Event] = {}
        self.identities = Identities()
        self._host, self._port = host, port
        self._server: Any = None
        self._health: Any = None

    @property
    def url(self) -> str:
        """The address in pixelgate's notation; the port is known once the server runs."""
        return f"{self.scheme}://{self._host}:{self._port}"

    async def __aenter__(self) -> Self:
        options = [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            # long silent answers are normal, and so are pings meanwhile
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = grpc.aio.server(options=options)
        self._serve_on(self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(True)
        self._port = self._server.add_insecure_port(f"{self._host}:{self._port}")
        await self._server.start()
        return self

    def _serve_on(self, server: Any) -> None:
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(_Servicer(self), server)

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """End at once, in the middle of whatever is being answered."""
        await self._server.stop(None)

    async def wait(self) -> None:
        """Wait until the server has ended."""
        await self._server.wait_for_termination()

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers from now on."""
        status = health_pb2.HealthCheckResponse
        for service in ("", self.service):
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)

    def _ids_of(self, reply: str) -> list[int]:
        tokenizer = self.checkpoint / "tokenizer.json" if self.checkpoint else None
        if tokenizer is not None and tokenizer.is_file():
            ids = list(Tokenizer.from_file(str(tokenizer)).encode(reply, add_special_tokens=False).ids)
        else:
            ids = list(reply.encode())
        return ids + list(self.facts.eos_token_ids[:1])


class _Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the stubs have no types
    def __init__(self, engine: StrictEngine) -> None:
        self._engine = engine
        self._started = time.monotonic()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        engine, name = self._engine, request.request_id
        try:
            engine.shared.extend(take_in(request.mm_inputs))
        except Refused as why:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(why))
        except OSError as failure:
            await context.abort(grpc.StatusCode.INTERNAL, str(failure))
        engine.requests.append(request)
        try:
            check(request, engine.facts)
            engine.identities.remember(request, engine.facts.layout)
            if name in engine.running:
                raise Refused(f"the request id {name} is in use")
        except Refused as why:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(why))
        abort = engine.running[name] = asyncio.Event()
        try:
            await self._answer(request, context, abort)
        except asyncio.CancelledError:
            engine.cancelled.append(name)
            raise
        finally:
            del engine.running[name]

    async def _answer(self, request: pb.GenerateRequest, context: Any, abort: asyncio.Event) -> None:
        """The same reply for each of the answers asked for, a token of each at a time."""
        sampling, prompt_tokens = request.sampling_params, len(request.tokenized.input_ids)
        answers = range(max(sampling.n, 1))
        sent: list[int] = []
        ending: dict[str, Any] = {"finish_reason": "stop"}
        for token in self._engine.reply_ids:
            if await set_within(abort, self._engine.delay):
                ending = {"finish_reason": "abort"}
                break
            sent.append(token)
            for index in answers if request.stream else ():
                chunk = pb.GenerateStreamChunk(
                    token_ids=[token],
                    prompt_tokens=prompt_tokens,
                    completion_tokens=1,
                    output_logprobs=logprobs([token], sampling),
                    index=index,
                )
                await context.write(pb.GenerateResponse(chunk=chunk))
            if token in sampling.stop_token_ids:
                ending = {"finish_reason": "stop", "matched_token_id": token}
                break
            if sampling.HasField("max_tokens") and len(sent) == sampling.max_tokens:
                ending = {"finish_reason": "length"}
                break
        # Like the real servicer: after chunks, complete repeats the last chunk only.
        ids = sent[-1:] if request.stream else sent
        for index in answers:
            complete = pb.GenerateComplete(
                output_ids=ids,
                prompt_tokens=prompt_tokens,
                completion_tokens=len(ids),
                output_logprobs=logprobs(ids, sampling),
                index=index,
                **ending,
            )
            await context.write(pb.GenerateResponse(complete=complete))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        for name in request.request_ids:
            self._engine.aborted.append(name)
            if name in self._engine.running:
                self._engine.running[name].set()
        return pb.AbortResponse()

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=True, message="Health")

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        facts, checkpoint = self._engine.facts, self._engine.checkpoint
        return pb.GetModelInfoResponse(
            model_path=str(checkpoint or facts.model_type),
            tokenizer_path=str(checkpoint or facts.model_type),
            served_model_name=checkpoint.name if checkpoint else facts.model_type,
            is_generation=True,
            supports_vision=True,
            model_type=facts.model_type,
            vocab_size=facts.vocab_size,
            max_context_length=facts.max_context,
            max_req_input_len=facts.max_context,
            eos_token_ids=facts.eos_token_ids,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        facts = self._engine.facts
        return pb.GetServerInfoResponse(
            active_requests=len(self._engine.running),
            uptime_seconds=time.monotonic() - self._started,
            data_parallel_size=1,
            max_num_seqs=256,
            model_dtype=f"torch.{facts.encoder_dtype}",
            multimodal_encoder_dtype=facts.encoder_dtype,
            mm_device_do_normalize=facts.device_normalize,
            mm_item_limits=f"image={facts.max_images},video=999",
            mm_encoder_budget=facts.max_embeddings_per_image,
            shm_namespace_id=self._engine.shm_namespace,
        )

    async def GetLoads(self, request: pb.GetLoadsRequest, context: Any) -> pb.GetLoadsResponse:
        running = len(self._engine.running)
        load = pb.SchedulerLoad(num_running_reqs=running, num_total_reqs=running, max_running_requests=256)
        return pb.GetLoadsResponse(dp_rank_count=1, loads=[load])

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        if self._engine.checkpoint is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this engine has no checkpoint")
        for chunk in files(self._engine.checkpoint):
            yield chunk


def files(checkpoint: Path | None) -> Iterator[common_pb2.GetTokenizerChunk]:
    """The files of a checkpoint as GetTokenizer gives them."""
    data = _bundle(checkpoint)
    for start in range(0, len(data), _TOKENIZER_CHUNK):
        last = start + _TOKENIZER_CHUNK >= len(data)
        yield common_pb2.GetTokenizerChunk(
            data=data[start : start + _TOKENIZER_CHUNK], sha256=hashlib.sha256(data).hexdigest() if last else ""
        )


def logprobs(ids: Sequence[int], sampling: pb.SamplingParams) -> pb.OutputLogProbs | None:
    """What an engine tells: a token's is -0.5, and those of the ids after it come next, each 1 less."""
    if not ids or not sampling.HasField("logprobs"):
        return None
    likely = range(sampling.logprobs)
    tops = [pb.TopLogProbs(token_ids=[i + k for k in likely], values=[-0.5 - k for k in likely]) for i in ids]
    return pb.OutputLogProbs(token_logprobs=[-0.5] * len(ids), token_ids=ids, top_logprobs=tops if likely else [])


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` is set by then."""
    if seconds and not event.is_set():
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return False
    return event.is_set()


def _bundle(checkpoint: Path | None) -> bytes:
    assert checkpoint is not None
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for file in sorted(checkpoint.iterdir()):
            if file.suffix in (".json", ".jinja"):
                bundle.write(file, file.name)
    return archive.getvalue()


def _parser(module: str = "strict_engine") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m pixelgate.testing.{module}", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="directory with config.json and the rest")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0 is any free one (default)")
    parser.add_argument("--device-normalize", action="store_true", help="want uint8 pixels")
    parser.add_argument("--encoder-dtype", default="bfloat16", help="dtype of pixels otherwise (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, help="for a checkpoint whose config.json does not say it")
    parser.add_argument(
        "--shm", action=argparse.BooleanOptionalAction, default=True, help="take tensors from shared memory"
    )
    parser.add_argument("--reply", help="the text of every answer")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each token (default: %(default)s)")
    return parser


async def serve(arguments: argparse.Namespace, kind: type[StrictEngine] = StrictEngine) -> None:
    """Run an engine as the command line says, and print its address when it listens."""
    settings = {name: value for name, value in vars(arguments).items() if value is not None}
    async with kind(settings.pop("checkpoint"), **settings) as engine:
        print(engine.url, flush=True)
        await engine.wait()


def main(kind: type[StrictEngine] = StrictEngine, module: str = "strict_engine") -> int:
    """The command; 1 with a message for a checkpoint or an address that cannot be used."""
    arguments = _parser(module).parse_args()
    try:
        asyncio.run(serve(arguments, kind))
    except CheckpointError as error:
        print(f"{module}: {error.message}", file=sys.stderr)
    except (RuntimeError, OSError):  # grpc's and asyncio's ways to say that the address is taken
        print(f"{module}: cannot listen on {arguments.host}:{arguments.port}", file=sys.stderr)
    except KeyboardInterrupt:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
