"""Every rule refuses the request that breaks it, and it alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from goldens.tokenizers_of import CHECKPOINTS
from pixelgate.demo import CHECKPOINT
from pixelgate.engines.engine import EngineFacts, EngineRequest, Images, Span
from pixelgate.errors import InternalError
from pixelgate.gateway.check import check
from pixelgate.processor import load

PROCESSOR = load(CHECKPOINT)
FACTS = EngineFacts("m", "qwen2_5_vl", "float32")
PAD = PROCESSOR.family.placeholder_id


def good(sizes=((56, 56), (28, 84))):
    """A request with pictures of 4 and 3 tokens in a prompt of 12."""
    plans = tuple(PROCESSOR.plan(height=height, width=width, min_pixels=1) for height, width in sizes)
    pixels = [np.zeros(plan.shape, np.float32) for plan in plans]
    images = Images(
        tensors=PROCESSOR.family.tensors(plans, pixels),
        spans=(Span(1, 4), Span(7, 3)),
        hashes=("a" * 64, "b" * 64),
        placeholder_id=PAD,
        plans=plans,
    )
    return EngineRequest("r", (5, *[PAD] * 4, 6, 7, *[PAD] * 3, 8, 9), images=images)


def changed(**fields):
    request = good()
    return replace(request, images=replace(request.images, **fields))


def with_tensor(index, **fields):
    tensors = list(good().images.tensors)
    tensors[index] = replace(tensors[index], **fields)
    return changed(tensors=tuple(tensors))


def with_ids(*ids):
    return replace(good(), token_ids=ids)


def with_part(part):
    pixels = good().images.tensors[0]
    return with_tensor(0, parts=(pixels.parts[0], part))


def test_what_agrees_passes():
    check(good(), FACTS, PROCESSOR.family)
    check(EngineRequest("r", (5, 6)), FACTS, PROCESSOR.family)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (EngineRequest("r", (5, PAD, 6)), "a placeholder stands in a prompt without pictures"),
        (changed(placeholder_id=PAD + 1), f"the placeholder is {PAD + 1}, not {PAD}"),
        (changed(spans=(Span(1, 4),)), "differ in number"),
        (changed(hashes=("a" * 64,)), "differ in number"),
        (changed(plans=good().images.plans[:1]), "differ in number"),
        (with_tensor(0, parts=good().images.tensors[0].parts[:1]), "differ in number"),
        (with_tensor(1, parts=good().images.tensors[1].parts[:1]), "differ in number"),
        (with_tensor(2, parts=good().images.tensors[2].parts * 2), "differ in number"),
        (changed(spans=(Span(7, 3), Span(1, 4))), "embeds 3 tokens where its plan says 4"),
        (changed(spans=(Span(1, 4), Span(4, 6))), "spans overlap"),
        (changed(spans=(Span(-1, 6), Span(7, 3))), "spans overlap"),
        (changed(spans=(Span(1, 0), Span(7, 3))), "spans overlap or are empty"),
        (changed(spans=(Span(1, 3), Span(7, 3))), "embeds 3 tokens where its plan says 4"),
        (changed(spans=(Span(2, 4), Span(7, 3))), "embeds 3 tokens where its plan says 4"),
        (changed(spans=(Span(1, 4), Span(7, 6))), "a span ends outside the prompt"),
        (with_ids(5, *[PAD] * 4, 6, 7, *[PAD] * 3, 8, PAD), "a placeholder stands outside every span"),
        (with_ids(5, *[PAD] * 4, 6, 7, PAD, 7, PAD, 8, 9), "embeds 2 tokens where its plan says 3"),
        (with_tensor(0, dtype="uint8"), "pixels are uint8 where the engine wants float32"),
        (changed(spans=(Span(1, 5), Span(7, 3))), "a span has 5 tokens where its plan has 4"),
        (with_ids(5, *[PAD] * 3, 6, PAD, 7, *[PAD] * 3, 8, 9), "embeds 3 tokens"),
        (changed(tensors=good().images.tensors[:2]), "the tensors are pixel_values, image_grid_thw"),
        (with_tensor(1, keep_on_cpu=False), "image_grid_thw has another layout"),
        (with_tensor(0, sizes=None), "pixel_values has another layout"),
        (with_part(np.zeros((12, 1176), np.uint8)), r"a tensor is uint8\[12, 1176\]"),
        (with_part(np.zeros((8, 1176), np.float32)), r"float32\[8, 1176\] where its plan says \[12, 1176\]"),
        (with_part(np.zeros((12, 588), np.float32)), r"float32\[12, 588\] where its plan says"),
    ],
)
def test_what_does_not_agree_is_never_sent(request_, reason):
    with pytest.raises(InternalError, match=reason) as caught:
        check(request_, FACTS, PROCESSOR.family)
    assert caught.value.status == 500


def test_an_engine_that_wants_other_pixels():
    with pytest.raises(InternalError, match="pixels are float32 where the engine wants bfloat16"):
        check(good(), replace(FACTS, pixel_dtype="bfloat16"), PROCESSOR.family)


def tiled():
    """Two pictures of LLaVA-NeXT, the first with fewer tiles than the second."""
    processor = load(CHECKPOINTS / "llava_next")
    plans = tuple(processor.plan(height=height, width=width) for height, width in ((300, 300), (300, 900)))
    pixels = [np.zeros(plan.shape, np.float32) for plan in plans]
    tensors = processor.family.tensors(plans, pixels)
    first, second = plans[0].tokens, plans[1].tokens
    image = processor.family.placeholder_id
    images = Images(tensors, (Span(1, first), Span(first + 2, second)), ("a" * 64, "b" * 64), image, plans)
    request = EngineRequest("r", (5, *[image] * first, 6, *[image] * second, 7), images=images)
    return request, processor.family


def test_tiles_may_be_filled_up():
    request_, family = tiled()
    check(request_, FACTS, family)


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (lambda part: part[:, 1:], "where its plan says"),
        (lambda part: np.concatenate([part, part]), "where its plan says"),
        (lambda part: np.concatenate([part, part], axis=1), "pictures differ in the shape of pixel_values"),
    ],
)
def test_tiles_that_no_plan_has(part, reason):
    request_, family = tiled()
    pixels, *small = request_.images.tensors
    wrong = replace(pixels, parts=(pixels.parts[0], part(pixels.parts[1])))
    wrong_request = replace(request_, images=replace(request_.images, tensors=(wrong, *small)))
    facts = replace(FACTS, takes_mixed_shapes=False)
    with pytest.raises(InternalError, match=reason):
        check(wrong_request, facts, family)


@pytest.mark.parametrize(
    ("index", "wrong", "reason"),
    [
        (2, [[16], [8]], "patches_per_image of picture 1 is not what its plan says"),
        (1, [[[1, 4, 4]], [[1, 6, 2]]], "image_grid_thw of picture 1 is not what its plan says"),
        (1, [[[1, 4, 4]], [[12]]], r"image_grid_thw of picture 1 is int64\[1, 1\], not int64\[1, 3\]"),
    ],
)
def test_small_tensors_that_say_something_else(index, wrong, reason):
    parts = tuple(np.array(part, np.int64) for part in wrong)
    with pytest.raises(InternalError, match=reason):
        check(with_tensor(index, parts=parts), FACTS, PROCESSOR.family)


def test_a_placeholder_in_the_place_of_another_token():
    """Of Pixtral's spans the last token is never one."""
    processor = load(CHECKPOINTS / "pixtral")
    plan = processor.plan(height=32, width=64)
    tensors = processor.family.tensors([plan], [np.zeros(plan.shape, np.float32)])
    image = processor.family.placeholder_id
    images = Images(tensors, (Span(1, 10),), ("a" * 64,), image, (plan,))
    check(EngineRequest("r", (5, *[image] * 4, 12, *[image] * 4, 13, 6), images=images), FACTS, processor.family)
    with pytest.raises(InternalError, match="a placeholder in the place of another token"):
        check(EngineRequest("r", (5, *[image] * 5, 12, *[image] * 3, 13, 6), images=images), FACTS, processor.family)
