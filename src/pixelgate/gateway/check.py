"""The last look before anything is sent: a wrong count ends an engine, or makes it answer nonsense."""

from __future__ import annotations

from pixelgate.engines.engine import EngineFacts, EngineRequest
from pixelgate.errors import InternalError


def check(request: EngineRequest, facts: EngineFacts, placeholder_id: int) -> None:
    """Raise InternalError unless ids, spans, plans and tensors agree. Such a request must never leave the gateway."""
    images = request.images
    if images is None:
        if placeholder_id in request.token_ids:
            raise InternalError("a placeholder stands in a prompt without pictures")
        return
    if images.placeholder_id != placeholder_id:
        raise InternalError(f"the placeholder is {images.placeholder_id}, not {placeholder_id}")
    counts = {len(images.spans), len(images.hashes), len(images.plans), *(len(t.parts) for t in images.tensors)}
    if len(counts) != 1:
        raise InternalError("pictures, spans, hashes and tensors differ in number")
    end = 0
    embedded = 0
    for span, plan in zip(images.spans, images.plans, strict=True):
        if span.offset < end or span.length < 1:
            raise InternalError("spans overlap or are empty")
        end = span.offset + span.length
        inside = request.token_ids[span.offset : end].count(placeholder_id)
        if inside != plan.tokens:
            raise InternalError(f"a span embeds {inside} tokens where its plan says {plan.tokens}")
        embedded += inside
    if end > len(request.token_ids):
        raise InternalError("a span ends outside the prompt")
    if request.token_ids.count(placeholder_id) != embedded:
        raise InternalError("a placeholder stands outside every span")
    pixels = images.tensors[0]
    if pixels.dtype != facts.pixel_dtype:
        raise InternalError(f"pixels are {pixels.dtype} where the engine wants {facts.pixel_dtype}")
    for part, plan in zip(pixels.parts, images.plans, strict=True):
        if not _holds(part.shape, plan.shape) or part.dtype.name != pixels.dtype:
            raise InternalError(f"a tensor is {part.dtype}{list(part.shape)} where its plan says {list(plan.shape)}")
    by_name = {tensor.name: tensor for tensor in images.tensors}
    for tensor in images.tensors:
        for i, part in enumerate(tensor.parts):
            rows = int(by_name[tensor.sizes].parts[i].item()) if tensor.sizes else 1
            if len(part) != rows:
                raise InternalError(f"picture {i} has {len(part)} rows of {tensor.name} where {rows} are announced")
            if not facts.takes_mixed_shapes and part.shape[1:] != tensor.parts[0].shape[1:]:
                raise InternalError(f"pictures differ in the shape of {tensor.name}, which is one tensor for all")


def _holds(own: tuple[int, ...], planned: tuple[int, ...]) -> bool:
    """Whether a picture's part of the pixels is what was planned; tiles may be filled up to those of another."""
    if len(own) == len(planned) + 1:
        return own[0] == 1 and own[1] >= planned[0] and own[2:] == planned[1:]
    return own == planned
