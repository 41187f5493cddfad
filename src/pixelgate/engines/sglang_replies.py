"""What an SGLang says of itself over gRPC."""

from __future__ import annotations

from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.grpc_replies import item_limits
from pixelgate.engines.sglang_served import not_served
from pixelgate.engines.sglang_wire import MAX_PIXEL_BYTES
from pixelgate.errors import EngineError


def told(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> EngineFacts:
    """An engine's facts. Raises EngineError for a model that it would answer wrong, or what cannot be understood.

    Of GetModelInfo the numbers are the servicer's defaults, unless the scheduler has told it others: those count.
    """
    if complaint := not_served(model.model_type):
        raise EngineError(complaint)
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
