"""Requests of every family changed at random: what passes the last look also passes a strict engine's rules."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import gateway, image, picture, text
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from test_every_family import DEVICE, FAMILIES, ONE_SIZE

from goldens.tokenizers_of import CHECKPOINTS, SPECIALS, complete
from pixelgate.engines import vllm_http_wire, vllm_wire
from pixelgate.engines.engine import EngineFacts, EngineRequest, Images, Sampling, Span
from pixelgate.errors import InternalError, NotCarriedError
from pixelgate.gateway import chat
from pixelgate.gateway.check import check
from pixelgate.processor import load
from pixelgate.testing import strict_http_rules, strict_rules
from pixelgate.testing.strict_engine import StrictEngine
from pixelgate.testing.strict_http import StrictHttpEngine

SIZES = [(32, 64), (64, 32), (40, 40), (120, 200), (333, 61)]
DTYPES = ["float32", "uint8", "float16", "int64"]


@lru_cache
def known(family):
    """A family's processor, the facts of an engine over gRPC, and those in the engine's own words."""
    processor = load(CHECKPOINTS / family)
    dtype = "uint8" if family in DEVICE else "float32"
    strict = strict_rules.StrictFacts.from_checkpoint(
        CHECKPOINTS / family, vocab_size=300_000, device_normalize=family in DEVICE, encoder_dtype="float32"
    )
    return processor, EngineFacts("m", strict.model_type, dtype, takes_mixed_shapes=False), strict


def made(family, sizes):
    """A request as the gateway makes it, with pixels that are not all the same."""
    processor, facts, _ = known(family)
    own = processor.family
    plans = tuple(processor.plan(height=height, width=width) for height, width in sizes)
    pixels = [np.arange(np.prod(plan.shape)).reshape(plan.shape).astype(facts.pixel_dtype) for plan in plans]
    ids, spans = [7], []
    for plan in plans:
        inside = [SPECIALS[family][token] for token, count in own.expansion(plan) for _ in range(count)]
        spans.append(Span(len(ids), len(inside)))
        ids += [*inside, 8, 9]
    hashes = tuple(f"{number:064x}" for number in range(len(plans)))
    images = Images(own.tensors(plans, pixels), tuple(spans), hashes, own.placeholder_id, plans)
    return EngineRequest("r", tuple(ids), Sampling(temperature=0.0), images)


def with_part(images, tensor, index, part):
    parts = list(images.tensors[tensor].parts)
    parts[index : index + 1] = part
    return with_tensor(images, tensor, parts=tuple(parts))


def with_tensor(images, tensor, **fields):
    tensors = list(images.tensors)
    tensors[tensor] = replace(tensors[tensor], **fields)
    return replace(images, tensors=tuple(tensors))


def swapped(values, i, j):
    found = list(values)
    found[i], found[j] = found[j], found[i]
    return tuple(found)


def change(draw, request):
    """``request`` with one thing changed at random."""
    images = request.images
    count = len(images.plans)
    one, other = (draw(st.integers(0, count - 1)) for _ in range(2))
    where = draw(st.integers(0, len(images.tensors) - 1))
    part = images.tensors[where].parts[one]
    span = images.spans[one]
    by = draw(st.integers(-3, 3))

    def spans(*changed):
        return replace(images, spans=(*images.spans[:one], *changed, *images.spans[one + 1 :]))

    def cut():
        axis = draw(st.integers(0, part.ndim - 1))
        few = np.take(part, range(draw(st.integers(0, part.shape[axis]))), axis)
        return with_part(images, where, one, [np.ascontiguousarray(few)])

    def values():
        found = part.copy()
        found.reshape(-1)[draw(st.integers(0, part.size - 1))] += 1
        return with_part(images, where, one, [found])

    def cast(part, dtype):
        with np.errstate(over="ignore"):  # the values do not matter
            return part.astype(dtype)

    # pixels may be any, so their values are not changed
    changes = {
        "a part is lost": lambda: with_part(images, where, one, []),
        "a part is there twice": lambda: with_part(images, where, one, [part, part]),
        "a part is longer": lambda: with_part(images, where, one, [np.concatenate([part, part])]),
        "a part is shorter": cut,
        "a part has other values": values if where else cut,
        "a part has another dtype": lambda: with_part(images, where, one, [cast(part, draw(st.sampled_from(DTYPES)))]),
        "parts are swapped": lambda: with_tensor(images, where, parts=swapped(images.tensors[where].parts, one, other)),
        "another dtype is said": lambda: with_tensor(images, where, dtype=draw(st.sampled_from(DTYPES))),
        "another layout is said": lambda: with_tensor(images, where, field=draw(st.sampled_from(["flat", "batched"]))),
        "it stays elsewhere": lambda: with_tensor(images, where, keep_on_cpu=not images.tensors[where].keep_on_cpu),
        "a tensor is lost": lambda: replace(images, tensors=images.tensors[:where] + images.tensors[where + 1 :]),
        "a span is moved": lambda: spans(Span(span.offset + by, span.length)),
        "a span is longer or shorter": lambda: spans(Span(span.offset, span.length + by)),
        "a span begins elsewhere": lambda: spans(Span(span.offset + by, span.length - by)),
        "a span is lost": lambda: spans(),
        "a span is there twice": lambda: spans(span, span),
        "spans are swapped": lambda: replace(images, spans=swapped(images.spans, one, other)),
        "a plan has other tokens": lambda: replace(
            images, plans=tuple(replace(p, tokens=p.tokens + by * (i == one)) for i, p in enumerate(images.plans))
        ),
        "a plan is lost": lambda: replace(images, plans=images.plans[:one] + images.plans[one + 1 :]),
        "plans are swapped": lambda: replace(images, plans=swapped(images.plans, one, other)),
        "a hash is lost": lambda: replace(images, hashes=images.hashes[1:]),
        "another placeholder": lambda: replace(images, placeholder_id=images.placeholder_id + by),
    }
    name = draw(st.sampled_from([*changes, "ids"]))
    if name != "ids":
        found = changes[name]()
        return replace(request, images=found) if found.tensors else request
    at = draw(st.integers(0, len(request.token_ids) - 1))
    put = draw(st.sampled_from([(), (8,), (images.placeholder_id,), (images.placeholder_id, 8)]))
    return replace(request, token_ids=(*request.token_ids[:at], *put, *request.token_ids[at + 1 :]))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_made_passes(family):
    sizes = [(40, 40)] * 2 if family in ONE_SIZE else [(40, 40), (120, 200), (40, 40)]
    request = made(family, sizes)
    _, facts, _ = known(family)
    check(request, facts, known(family)[0].family)
    assert_taken(family, request)


def assert_taken(family, request):
    """An engine behind either protocol takes a request."""
    strict = known(family)[2]
    strict_rules.check(pb.GenerateRequest.FromString(vllm_wire.encode(request)), strict)
    try:
        vllm_http_wire.refuse_masks(request)
    except NotCarriedError:
        return
    body = msgspec.json.decode(vllm_http_wire.encode(request, "m"))
    strict_rules.check(strict_http_rules.message(body, {}, strict)[0], strict)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_passes_is_taken(family, data):
    processor, facts, _ = known(family)
    sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3))
    if family in ONE_SIZE:
        sizes = sizes[:1] * len(sizes)
    request = change(data.draw, made(family, sizes))
    try:
        check(request, facts, processor.family)
    except InternalError:
        return
    assert_taken(family, request)


SPOILT = {
    "a span more": lambda i: replace(i, spans=(*i.spans, Span(0, 1))),
    "a span that is too long": lambda i: replace(i, spans=(Span(i.spans[0].offset, i.spans[0].length + 1),)),
    "a picture more": lambda i: with_tensor(i, 0, parts=i.tensors[0].parts * 2),
    "a row less": lambda i: with_part(i, 0, 0, [np.ascontiguousarray(i.tensors[0].parts[0][..., :-1])]),
    "another dtype": lambda i: with_part(i, 0, 0, [i.tensors[0].parts[0].astype(np.float64)]),
    "another dtype that is said": lambda i: with_tensor(i, 0, dtype="float16"),
    "a token more": lambda i: replace(i, plans=tuple(replace(plan, tokens=plan.tokens + 1) for plan in i.plans)),
}


@pytest.mark.parametrize("family", FAMILIES)
async def test_what_does_not_agree_never_leaves_the_gateway(family, tmp_path, monkeypatch):
    folder = complete(family, tmp_path / family)
    vocab_size = json.loads((folder / "config.json").read_text()).get("vocab_size", 210_000)
    facts = {"vocab_size": vocab_size, "device_normalize": family in DEVICE, "encoder_dtype": "float32"}
    good = chat.images
    async with (
        StrictEngine(folder, reply_ids=(5,), **facts) as grpc,
        StrictHttpEngine(folder, reply_ids=(5,), **facts) as http,
        gateway({"grpc": grpc.url, "http": http.url}, checkpoint=folder) as running,
    ):
        for spoil in SPOILT.values():
            monkeypatch.setattr(chat, "images", lambda *arguments, spoil=spoil: spoil(good(*arguments)))
            for model in ("grpc", "http"):
                answer = await running.ask([image(picture(40, 60)), text("Well?")], model=model)
                assert answer.status_code == 500
                assert answer.json()["error"]["code"] == "internal_error"
        assert not grpc.requests
        assert not http.requests
        monkeypatch.setattr(chat, "images", good)
        assert (await running.ask([image(picture(40, 60)), text("Well?")], model="grpc")).status_code == 200
