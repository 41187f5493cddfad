"""The last look before anything is sent: a wrong count ends an engine, or makes it answer nonsense."""

from __future__ import annotations

from pixelgate.engines.engine import EngineFacts, EngineRequest, Images, Span
from pixelgate.errors import InternalError
from pixelgate.models.family import Family
from pixelgate.pixels.affine import NUMPY_DTYPES
from pixelgate.pixels.plan import ImagePlan
from pixelgate.pixels.tensor import Tensor


def check(request: EngineRequest, facts: EngineFacts, family: Family) -> None:
    """Raise InternalError unless ids, spans, plans and tensors agree. Such a request must never leave the gateway."""
    images = request.images
    if images is None:
        if family.placeholder_id in request.token_ids:
            raise InternalError("a placeholder stands in a prompt without pictures")
        return
    if images.placeholder_id != family.placeholder_id:
        raise InternalError(f"the placeholder is {images.placeholder_id}, not {family.placeholder_id}")
    counts = {len(images.spans), len(images.hashes), len(images.plans), *(len(t.parts) for t in images.tensors)}
    if len(counts) != 1:
        raise InternalError("pictures, spans, hashes and tensors differ in number")
    _check_spans(request.token_ids, images, family)
    _check_pixels(images.tensors[0], images.plans, facts)
    _check_layout(images, facts, family)


def _check_spans(ids: tuple[int, ...], images: Images, family: Family) -> None:
    end = embedded = 0
    for span, plan in zip(images.spans, images.plans, strict=True):
        if span.offset < end or span.length < 1:
            raise InternalError("spans overlap or are empty")
        end = span.offset + span.length
        inside = ids[span.offset : end].count(family.placeholder_id)
        if inside != plan.tokens:
            raise InternalError(f"a span embeds {inside} tokens where its plan says {plan.tokens}")
        embedded += inside
    if end > len(ids):
        raise InternalError("a span ends outside the prompt")
    if ids.count(family.placeholder_id) != embedded:
        raise InternalError("a placeholder stands outside every span")
    for span, plan in zip(images.spans, images.plans, strict=True):
        _check_runs(ids, span, family.expansion(plan), family)


def _check_runs(ids: tuple[int, ...], span: Span, runs: list[tuple[str, int]], family: Family) -> None:
    """Whether a span has its placeholders where they belong, and other tokens where these belong."""
    start = span.offset
    for token, count in runs:
        expected = count if token == family.embedded else 0
        if ids[start : start + count].count(family.placeholder_id) != expected:
            raise InternalError("a span has a placeholder in the place of another token")
        start += count
    if start != span.offset + span.length:
        raise InternalError(f"a span has {span.length} tokens where its plan has {start - span.offset}")


def _check_pixels(pixels: Tensor, plans: tuple[ImagePlan, ...], facts: EngineFacts) -> None:
    if pixels.dtype != facts.pixel_dtype:
        raise InternalError(f"pixels are {pixels.dtype} where the engine wants {facts.pixel_dtype}")
    for part, plan in zip(pixels.parts, plans, strict=True):
        if not _holds(part.shape, plan.shape) or part.dtype != NUMPY_DTYPES[pixels.dtype]:
            raise InternalError(f"a tensor is {part.dtype}{list(part.shape)} where its plan says {list(plan.shape)}")


def _holds(own: tuple[int, ...], planned: tuple[int, ...]) -> bool:
    """Whether a picture's part of the pixels is what was planned; tiles may be filled up to those of another."""
    if len(own) == len(planned) + 1:
        return own[0] == 1 and own[1] >= planned[0] and own[2:] == planned[1:]
    return own == planned


def _check_layout(images: Images, facts: EngineFacts, family: Family) -> None:
    """Whether the tensors are those that the family makes of such plans and pixels."""
    pixels = images.tensors[0]
    if not facts.takes_mixed_shapes and len({part.shape[1:] for part in pixels.parts}) > 1:
        raise InternalError(f"pictures differ in the shape of {pixels.name}, which is one tensor for all")
    pairs = zip(pixels.parts, images.plans, strict=True)
    expected = family.tensors(images.plans, [part[0] if part.ndim > len(plan.shape) else part for part, plan in pairs])
    if [tensor.name for tensor in images.tensors] != [tensor.name for tensor in expected]:
        raise InternalError(f"the tensors are {', '.join(tensor.name for tensor in images.tensors)}")
    for tensor, own in zip(images.tensors, expected, strict=True):
        if tensor.layout != own.layout:
            raise InternalError(f"{tensor.name} has another layout than its family's")
        for i, (part, other) in enumerate(zip(tensor.parts, own.parts, strict=True)):
            if (part.dtype, part.shape) != (other.dtype, other.shape):
                found, wanted = (f"{each.dtype}{list(each.shape)}" for each in (part, other))
                raise InternalError(f"{tensor.name} of picture {i} is {found}, not {wanted}")
            if tensor is not pixels and part.tobytes() != other.tobytes():
                raise InternalError(f"{tensor.name} of picture {i} is not what its plan says")
