"""The bytes sent to vLLM are those of the message built with the official stubs alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_requests import PAD, images, prompt, request
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.engine import Constraint, EngineRequest, Images, Sampling, Span
from pixelgate.engines.vllm_wire import encode
from pixelgate.errors import EngineError, RequestError, TooLargeError
from pixelgate.pixels.tensor import Tensor


def decoded(sent):
    return pb.GenerateRequest.FromString(encode(sent))


def tensor(array, dtype):
    return pb.TensorData(shape=array.shape, dtype=dtype, inline=array.tobytes())


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize("grids", [((4, 4),), ((4, 4), (2, 6), (2, 2))])
def test_the_bytes_are_the_message_that_the_stubs_build(dtype, grids):
    pictures = images(grids, dtype)
    sent = EngineRequest("r-7", prompt(pictures), Sampling(temperature=0.5, max_tokens=9), pictures, stream=True)
    pixels = np.concatenate(pictures.tensors[0].parts)
    expected = pb.GenerateRequest(
        request_id="r-7",
        tokenized=pb.TokenizedInput(input_ids=prompt(pictures)),
        sampling_params=pb.SamplingParams(temperature=0.5, max_tokens=9, skip_special_tokens=True),
        stream=True,
        mm_inputs=pb.MultimodalInputs(
            pixel_values=tensor(pixels, dtype),
            model_specific_tensors={
                "image_grid_thw": tensor(np.array([[1, *grid] for grid in grids]), "int64"),
                "patches_per_image": tensor(np.array([h * w for h, w in grids]), "int64"),
            },
            im_token_id=PAD,
            mm_placeholders=[pb.PlaceholderRange(offset=s.offset, length=s.length) for s in pictures.spans],
            mm_hashes=pictures.hashes,
            batched_keys=["image_grid_thw", "patches_per_image"],
            flat_keys={"pixel_values": "patches_per_image"},
            keep_on_cpu_keys=["image_grid_thw"],
            modality=common_pb2.IMAGE,
        ),
    )
    assert decoded(sent) == expected


@pytest.mark.parametrize("nbytes", [1, 127, 128, 16_383, 16_384, 1 << 21])
def test_payloads_of_every_length_arrive_whole(nbytes):
    payload = np.random.default_rng(nbytes).integers(0, 256, (1, nbytes), np.uint8)
    pixels = Tensor("pixel_values", "uint8", (payload,), "batched")
    got = decoded(EngineRequest("r", (PAD,), images=Images((pixels,), (Span(0, 1),), ("0" * 64,), PAD, ())))
    assert got.mm_inputs.pixel_values.inline == payload.tobytes()
    assert got.mm_inputs.pixel_values.shape == [1, nbytes]
    assert got.mm_inputs.batched_keys == ["pixel_values"]
    assert not got.mm_inputs.flat_keys


def test_a_part_that_is_no_contiguous_memory_is_sent_in_its_order():
    part = np.arange(12, dtype=np.uint8).reshape(3, 4).T
    pixels = Tensor("pixel_values", "uint8", (part,), "batched")
    got = decoded(EngineRequest("r", (PAD,), images=Images((pixels,), (Span(0, 1),), ("0" * 64,), PAD, ())))
    assert got.mm_inputs.pixel_values.inline == part.tobytes()


def test_a_text_request_has_no_images():
    got = decoded(request())
    assert not got.HasField("mm_inputs")
    assert got.tokenized.input_ids == [5, 6, 7]


def test_another_name_of_the_pixel_tensor_is_told_to_the_engine():
    pictures = images()
    pixels = replace(pictures.tensors[0], name="input_image_embeds")
    got = decoded(replace(request("uint8"), images=replace(pictures, tensors=(pixels, *pictures.tensors[1:]))))
    assert got.mm_inputs.encoder_input_key == "input_image_embeds"
    assert got.mm_inputs.flat_keys == {"input_image_embeds": "patches_per_image"}
    assert got.mm_inputs.pixel_values.shape == [28, 24]


def test_a_flat_tensor_must_name_its_sizes():
    pictures = images()
    pixels = replace(pictures.tensors[0], sizes=None)
    with pytest.raises(EngineError, match="pixel_values does not name"):
        encode(replace(request("uint8"), images=replace(pictures, tensors=(pixels, *pictures.tensors[1:]))))


def test_more_than_protobuf_can_hold_is_refused_before_it_is_copied():
    huge = np.broadcast_to(np.uint8(0), (1, 1 << 31))
    pixels = Tensor("pixel_values", "uint8", (huge,), "batched")
    with pytest.raises(TooLargeError, match="2 GiB"):
        encode(EngineRequest("r", (PAD,), images=Images((pixels,), (Span(0, 1),), ("0" * 64,), PAD, ())))


def test_unset_sampling_values_stay_unset():
    got = decoded(EngineRequest("r", (1,), Sampling())).sampling_params
    assert got == pb.SamplingParams(temperature=1.0, skip_special_tokens=True)
    assert not got.HasField("max_tokens")
    assert not got.HasField("seed")


def test_every_sampling_value_arrives():
    sampling = Sampling(
        temperature=0.5,
        top_p=0.5,
        top_k=20,
        min_p=0.25,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_tokens=7,
        min_tokens=2,
        seed=-3,
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        n=3,
        logprobs=0,
        logit_bias=((7, -100.0), (8, 0.5)),
    )
    got = decoded(EngineRequest("r", (1,), sampling, stream=False))
    assert not got.stream
    assert got.sampling_params == pb.SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=20,
        min_p=0.25,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_tokens=7,
        min_tokens=2,
        seed=-3,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        include_stop_str_in_output=True,
        n=3,
        logprobs=0,
        logit_bias={7: -100.0, 8: 0.5},
    )
    assert got.sampling_params.HasField("temperature")
    assert got.sampling_params.HasField("logprobs")


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("json_object"), {"json_object": True}),
        (Constraint("json_schema", "{}"), {"json_schema": "{}"}),
        (Constraint("regex", "a+"), {"regex": "a+"}),
        (Constraint("grammar", "root ::= 'a'"), {"grammar": "root ::= 'a'"}),
        (Constraint("structural_tag", "{}"), {"structural_tag": "{}"}),
        (Constraint("choice", ("a", "b")), {"choice": pb.ChoiceConstraint(choices=["a", "b"])}),
    ],
)
def test_every_constraint_arrives(constraint, expected):
    got = decoded(request(constraint=constraint)).sampling_params
    assert got == pb.SamplingParams(temperature=0.0, max_tokens=64, skip_special_tokens=True, **expected)


def test_a_top_p_of_zero_is_not_mistaken_for_none():
    for tiny in (0.0, 1e-300):
        assert 0 < decoded(request(top_p=tiny)).sampling_params.top_p < 1e-5


@pytest.mark.parametrize("all_tokens", [-1, 0])
def test_a_top_k_that_means_all_tokens_arrives_as_that(all_tokens):
    assert decoded(request(top_k=all_tokens)).sampling_params.top_k == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1 << 31),
        ("top_k", -2),
        ("max_tokens", 1 << 32),
        ("stop_token_ids", (-1,)),
        ("repetition_penalty", 0.0),
        ("min_tokens", 65),
        ("n", 2),
        ("logit_bias", ((1 << 31, 1.0),)),
    ],
)
def test_a_value_that_the_protocol_cannot_carry_is_the_clients_mistake(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        encode(request(**{name: value}))
    assert caught.value.param == name
