"""What is sent over HTTP is the request that is sent over gRPC, picture by picture."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pybase64
import pytest
from engine_requests import FACTS, PAD, images, prompt, request
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines import vllm_http_wire, vllm_wire
from pixelgate.engines.engine import Constraint, EngineRequest, Images, Sampling, Span
from pixelgate.engines.vllm_http_wire import encode, refuse_masks
from pixelgate.engines.vllm_item import RAW
from pixelgate.errors import NotCarriedError, RequestError, TooLargeError
from pixelgate.pixels.tensor import Tensor
from pixelgate.testing.strict_http_rules import message


def body(sent, known=()):
    return msgspec.json.decode(encode(sent, "m", known))


def items(sent, known=()):
    texts = body(sent, known)["features"]["kwargs_data"]["image"]
    return [text and msgspec.msgpack.decode(pybase64.b64decode(text, validate=True)) for text in texts]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("grids", [((4, 4),), ((4, 4), (2, 6), (2, 2))])
def test_the_body_is_the_message_of_the_grpc_service(dtype, grids, stream):
    sent = request(dtype, grids=grids, stream=stream, top_p=0.5, stop=("a", "é"), stop_token_ids=(3,), seed=-5)
    received, _ = message(body(sent), {}, FACTS)
    assert received == pb.GenerateRequest.FromString(vllm_wire.encode(sent))


def test_the_head_of_a_body():
    found = body(request("uint8", grids=((4, 4),)))
    assert found["model"] == "m"
    assert found["stream_options"] == {"include_usage": True}
    assert found["features"]["mm_placeholders"] == {"image": [{"offset": 2, "length": 4}]}
    assert "stream_options" not in body(request(stream=False))
    assert "features" not in body(request())


def test_an_item_describes_itself_alone():
    sent = request("uint8", grids=((4, 4), (2, 6)))
    (first, second), pixels = items(sent), sent.images.tensors[0].parts
    assert sorted(first) == ["image_grid_thw", "pixel_values"]
    assert first["image_grid_thw"]["data"][:2] == ["int64", [3]]
    assert first["image_grid_thw"]["field"] == ["batched", {"keep_on_cpu": True}]
    dtype, shape, raw = second["pixel_values"]["data"]
    assert (dtype, shape, raw.code, raw.data) == ("uint8", [12, FACTS.layout.pixels[0]], RAW, pixels[1].tobytes())
    assert second["pixel_values"]["field"] == ["flat", {"keep_on_cpu": False, "slices": [[[0, 12, None]]], "dim": 0}]


@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 255, 65_536, 1 << 20])
@pytest.mark.parametrize("name", ["p", "pi", "pix"])
def test_payloads_of_every_length_arrive_whole(nbytes, name):
    payload = np.random.default_rng(nbytes).integers(0, 256, (1, nbytes), np.uint8)
    pixels = Tensor(name, "uint8", (payload,), "batched")
    sent = EngineRequest("r", (PAD,), images=Images((pixels,), (Span(0, 1),), ("0" * 64,), PAD, ()))
    (item,) = items(sent)
    assert item[name]["data"][2].data == payload.tobytes()


def test_a_part_that_is_no_contiguous_memory_is_sent_in_its_order():
    part = np.arange(12, dtype=np.uint8).reshape(1, 3, 4).transpose(0, 2, 1)
    pixels = Tensor("pixel_values", "uint8", (part,), "batched")
    (item,) = items(EngineRequest("r", (PAD,), images=Images((pixels,), (Span(0, 1),), ("0" * 64,), PAD, ())))
    assert item["pixel_values"]["data"][1:] == [[4, 3], msgspec.msgpack.Ext(RAW, part.tobytes())]


def test_pictures_that_the_engine_has_are_null():
    sent = request("uint8")
    first, second = items(sent, known={sent.images.hashes[0]})
    assert first is None
    assert second is not None
    assert items(sent, known=sent.images.hashes) == [None, None]


def test_sampling_parameters_are_those_of_vllm():
    sent = Sampling(
        temperature=0.5,
        top_p=0.0,
        top_k=-1,
        min_p=0.1,
        max_tokens=9,
        min_tokens=1,
        seed=3,
        stop=("x",),
        ignore_eos=True,
        include_stop_str_in_output=True,
        n=3,
        logprobs=0,
        logit_bias=((5, -100.0), (7, 2.5)),
    )
    found = body(EngineRequest("r", (1,), sent))["sampling_params"]
    assert found == {
        "temperature": 0.5,
        "top_p": 1e-6,
        "top_k": -1,
        "min_p": 0.1,
        "max_tokens": 9,
        "min_tokens": 1,
        "seed": 3,
        "stop": ["x"],
        "stop_token_ids": [],
        "ignore_eos": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
        "n": 3,
        "logprobs": 0,
        "logit_bias": {"5": -100.0, "7": 2.5},
        "detokenize": True,
    }
    assert body(request())["sampling_params"]["detokenize"] is False


@pytest.mark.parametrize(
    ("constraint", "structured"),
    [
        (Constraint("json_object"), {"json_object": True}),
        (Constraint("json_schema", '{"type": "object"}'), {"json": '{"type": "object"}'}),
        (Constraint("regex", "[0-9]+"), {"regex": "[0-9]+"}),
        (Constraint("grammar", "root ::= x"), {"grammar": "root ::= x"}),
        (Constraint("structural_tag", "{}"), {"structural_tag": "{}"}),
        (Constraint("choice", ("yes", "no")), {"choice": ["yes", "no"]}),
    ],
)
def test_what_an_answer_must_be_is_that_of_the_grpc_service(constraint, structured):
    more = {"logit_bias": ((5, 1.5),), "include_stop_str_in_output": True}
    sent = request(constraint=constraint, temperature=1.0, n=2, logprobs=3, **more)
    assert body(sent)["sampling_params"]["structured_outputs"] == structured
    received, _ = message(body(sent), {}, FACTS)
    assert received == pb.GenerateRequest.FromString(vllm_wire.encode(sent))


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"n": 2, "temperature": 0.0}, "n"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ],
)
def test_what_vllm_refuses_is_refused_by_name(sampling, param):
    with pytest.raises(RequestError, match=param) as caught:
        encode(request(**sampling), "m")
    assert caught.value.param == param


def test_a_picture_above_the_limit_of_msgpack_is_refused(monkeypatch):
    monkeypatch.setattr(vllm_http_wire, "MAX_PICTURE_BYTES", 100)
    with pytest.raises(TooLargeError, match="a smaller one"):
        encode(request("uint8"), "m")


def test_spans_with_tokens_of_their_own_are_not_carried():
    pictures = images()
    ids = list(prompt(pictures))
    refuse_masks(EngineRequest("r", tuple(ids), images=pictures))
    refuse_masks(request())
    wider = replace(
        pictures, spans=(replace(pictures.spans[0], length=pictures.spans[0].length + 1), pictures.spans[1])
    )
    with pytest.raises(NotCarriedError, match="cannot tell them apart") as caught:
        refuse_masks(EngineRequest("r", tuple(ids), images=wider))
    assert (caught.value.status, caught.value.param) == (422, "messages")
