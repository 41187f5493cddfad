"""The bytes sent to SGLang are those of the message built with the official stubs alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sglang_requests import IMG, images, prompt, request
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.engines.constraints import any_of
from pixelgate.engines.engine import Constraint, EngineRequest, Sampling
from pixelgate.engines.sglang_served import not_served
from pixelgate.engines.sglang_wire import MAX_MESSAGE_BYTES, encode
from pixelgate.errors import NotCarriedError, RequestError, TooLargeError

NEUTRAL = {"skip_special_tokens": True, "spaces_between_special_tokens": True, "n": 1}


def decoded(sent):
    return pb.GenerateRequest.FromString(encode(sent))


def tensor(array):
    return pb.TensorData(shape=array.shape, dtype=array.dtype.name, data=array.tobytes())


@pytest.mark.parametrize("grids", [((2, 3),), ((2, 3), (2, 3)), ((2, 3), (1, 2), (4, 1))])
def test_the_bytes_are_the_message_that_the_stubs_build(grids):
    """All pictures are one tensor, smaller ones with 0.0 around; each row of placeholders is a range."""
    pictures = images(grids)
    sent = EngineRequest("r-7", prompt(pictures), Sampling(temperature=0.5, max_tokens=9), pictures, stream=True)
    parts = pictures.tensors[0].parts
    pixels = np.zeros((len(grids), 3, max(p.shape[2] for p in parts), max(p.shape[3] for p in parts)), np.float32)
    for whole, part in zip(pixels, parts, strict=True):
        whole[:, : part.shape[2], : part.shape[3]] = part[0]
    ranges, offset = [], 2
    for rows, columns in grids:
        for _ in range(rows):
            ranges.append(pb.PlaceholderRange(offset=offset, length=columns))
            offset += columns + 1
    expected = pb.GenerateRequest(
        request_id="r-7",
        tokenized=pb.TokenizedInput(input_ids=prompt(pictures)),
        sampling_params=pb.SamplingParams(temperature=0.5, max_new_tokens=9, **NEUTRAL),
        logprob_start_len=-1,
        stream=True,
        mm_inputs=pb.MultimodalInputs(
            pixel_values=tensor(pixels),
            model_specific_tensors={"image_sizes": tensor(np.array([[4 * h, 4 * w] for h, w in grids], np.int64))},
            im_token_id=IMG,
            mm_placeholders=ranges,
            modalities=["image"],
        ),
    )
    assert decoded(sent) == expected


def test_a_text_request_has_no_images():
    got = decoded(request())
    assert not got.HasField("mm_inputs")
    assert got.tokenized.input_ids == [5, 6, 7]


@pytest.mark.parametrize("above", [False, True])
def test_more_than_the_engine_takes_is_refused_before_it_is_copied(above, monkeypatch):
    sent = request(((2, 3),))
    nbytes = len(encode(sent))
    monkeypatch.setattr("pixelgate.engines.sglang_wire.MAX_MESSAGE_BYTES", nbytes - above)
    if not above:
        assert len(encode(sent)) == nbytes
        return
    with pytest.raises(TooLargeError, match="that the engine takes: send fewer"):
        encode(sent)


def test_the_limit_is_that_of_the_servicer():
    assert MAX_MESSAGE_BYTES == 268_435_456
    huge = np.broadcast_to(np.float32(0), (1, 3, 8192, 8192))  # no memory is behind it
    pictures = images(((1, 1),))
    pixels = replace(pictures.tensors[0], parts=(huge,))
    with pytest.raises(TooLargeError):
        encode(EngineRequest("r", prompt(pictures), images=replace(pictures, tensors=(pixels,))))


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
        stop=("a", "b"),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        n=3,
        logprobs=2,
        logit_bias=((7, -100.0), (8, 0.5)),
    )
    got = decoded(EngineRequest("r", (1,), sampling, stream=False))
    assert got.stream  # so that each answer has its number
    assert (got.return_logprob, got.top_logprobs_num, got.logprob_start_len) == (True, 2, -1)
    assert got.sampling_params == pb.SamplingParams(
        temperature=0.5,
        top_p=0.5,
        top_k=20,
        min_p=0.25,
        frequency_penalty=-0.5,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        max_new_tokens=7,
        min_new_tokens=2,
        stop=["a", "b"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        spaces_between_special_tokens=True,
        no_stop_trim=True,
        n=3,
        logit_bias={"7": -100.0, "8": 0.5},
    )


def test_unset_sampling_values_stay_unset():
    got = decoded(EngineRequest("r", (1,), Sampling(), stream=False))
    assert got.sampling_params == pb.SamplingParams(temperature=1.0, **NEUTRAL)
    assert not got.stream
    assert not got.return_logprob


def test_log_probabilities_of_the_token_alone():
    got = decoded(request(logprobs=0))
    assert (got.return_logprob, got.top_logprobs_num) == (True, 0)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint("json_object"), {"json_schema": '{"type": "object"}'}),
        (Constraint("json_schema", "{}"), {"json_schema": "{}"}),
        (Constraint("regex", "a+"), {"regex": "a+"}),
        (Constraint("grammar", "root ::= 'a'"), {"ebnf_grammar": "root ::= 'a'"}),
        (Constraint("structural_tag", "{}"), {"structural_tag": "{}"}),
        (Constraint("choice", ("yes", "a.b (c)")), {"regex": r"(yes|a\.b \(c\))"}),
    ],
)
def test_every_constraint_arrives(constraint, expected):
    got = decoded(request(constraint=constraint)).sampling_params
    assert got == pb.SamplingParams(temperature=0.0, max_new_tokens=64, **NEUTRAL, **expected)


def test_one_of_several_texts_as_a_regular_expression():
    import re

    texts = [".", "\\", "a|b", "(?i)x", "[^]", "{2}", "$^*+?", "two words", "1-2"]
    for wanted in texts:
        assert [text for text in texts if re.fullmatch(any_of([wanted]), text)] == [wanted]
    assert all(re.fullmatch(any_of(texts), text) for text in texts)


def test_a_top_p_of_zero_is_not_mistaken_for_none():
    assert 0 < decoded(request(top_p=0.0)).sampling_params.top_p < 1e-5


@pytest.mark.parametrize("all_tokens", [-1, 0])
def test_a_top_k_that_means_all_tokens_is_taken_for_that(all_tokens):
    assert decoded(request(top_k=all_tokens)).sampling_params.top_k == all_tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -2),
        ("top_k", 1 << 31),
        ("max_tokens", 1 << 32),
        ("min_tokens", 65),
        ("stop_token_ids", (-1,)),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.5),
        ("n", 2),
    ],
)
def test_a_value_that_the_engine_cannot_take_is_the_clients_mistake(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        encode(request(**{name: value}))
    assert caught.value.param == name


def test_a_seed_cannot_be_said():
    with pytest.raises(NotCarriedError, match="seed") as caught:
        encode(request(seed=1))
    assert caught.value.param == "seed"


@pytest.mark.parametrize(
    ("model_type", "image_processor", "words"),
    [
        ("qwen2_5_vl", "Qwen2VLImageProcessor", "M-RoPE"),
        ("qwen3_vl", "", "M-RoPE"),
        ("llava", "CLIPImageProcessor", "llava with CLIPImageProcessor"),
        ("llama4", "", "llama4"),
        ("llava_next", "PixtralImageProcessor", "not been tried"),
    ],
)
def test_models_that_would_be_answered_wrong(model_type, image_processor, words):
    complaint = not_served(model_type, image_processor)
    assert words in complaint
    assert "sglang+http://" in complaint


@pytest.mark.parametrize(
    ("model_type", "image_processor"),
    [("llava", "PixtralImageProcessor"), ("llava_next", "LlavaNextImageProcessor"), ("mistral3", ""), ("", "")],
)
def test_models_that_are_served(model_type, image_processor):
    assert not not_served(model_type, image_processor)
