"""What an SGLang says of itself over gRPC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.grpc_replies import item_limits
from pixelgate.engines.sglang_served import not_served, not_served_beside
from pixelgate.engines.sglang_wire import MAX_PIXEL_BYTES
from pixelgate.errors import EngineError

BESIDE = "pixelgate"  # what our own server beside SGLang's engine calls itself


def told_beside(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> EngineFacts:
    """The facts of our own server beside SGLang's engine. Raises EngineError for another."""
    if server.server_type != BESIDE:
        raise EngineError("This is SGLang's own gRPC, and not pixelgate's server beside SGLang's engine.")
    if complaint := not_served_beside(model.model_type):
        raise EngineError(complaint)
    return replace(_facts(model, server), max_pixel_bytes=None)


def told(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> EngineFacts:
    """An engine's facts. Raises EngineError for a model that it would answer wrong, or what cannot be understood.

    Of GetModelInfo the numbers are the servicer's defaults, unless the scheduler has told it others: those count.
    """
    if complaint := not_served(model.model_type):
        raise EngineError(complaint)
    return _facts(model, server)


def _facts(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> EngineFacts:
    scheduler, arguments = (dict(struct.items()) for struct in (server.scheduler_info, server.server_args))
    return EngineFacts(
        model_name=model.served_model_name,
        model_type=model.model_type,
        pixel_dtype="float32",
        max_context=_number(scheduler.get("max_req_input_len")),
        max_images=item_limits(str(arguments.get("mm_item_limits") or "")).get("image"),
        max_pixel_bytes=MAX_PIXEL_BYTES,
        eos_token_ids=tuple(model.eos_token_ids),
        checkpoint=model.model_path,
        vocab_size=_number(scheduler.get("vocab_size")),
    )


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, float) else None
