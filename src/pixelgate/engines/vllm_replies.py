"""What a vLLM says of itself over gRPC."""

from __future__ import annotations

from typing import Any, cast

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.engine import EngineFacts
from pixelgate.engines.grpc_replies import item_limits
from pixelgate.engines.grpc_wire import MAX_TENSOR_BYTES
from pixelgate.errors import EngineError

_FLOATS = ("float32", "bfloat16", "float16")


def told(model: pb.GetModelInfoResponse, server: pb.GetServerInfoResponse) -> EngineFacts:
    """An engine's facts. Raises EngineError for what cannot be understood."""
    dtype = (server.multimodal_encoder_dtype or server.model_dtype).removeprefix("torch.")
    if server.mm_device_do_normalize:
        dtype = "uint8"
    elif dtype not in _FLOATS:
        raise EngineError(f"The engine wants pictures as {dtype or 'nothing'}, which is none of {', '.join(_FLOATS)}.")
    return EngineFacts(
        model_name=model.served_model_name,
        model_type=model.model_type,
        pixel_dtype=cast(Any, dtype),
        max_context=model.max_context_length or None,
        max_images=_max_images(server.mm_item_limits),
        max_embeddings_per_image=server.mm_encoder_budget or None,
        max_pixel_bytes=MAX_TENSOR_BYTES,
        takes_mixed_shapes=False,
        eos_token_ids=tuple(model.eos_token_ids),
        checkpoint=model.model_path,
        vocab_size=model.vocab_size or None,
        shared_memory=server.shm_namespace_id,
    )


def _max_images(label: str) -> int | None:
    """Images per prompt of a label; a modality that it leaves out has a limit of 0."""
    return item_limits(label).get("image", 0) if label else None
