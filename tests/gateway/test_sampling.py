from __future__ import annotations

import json

import pytest

from pixelgate.engines.engine import Constraint, Sampling
from pixelgate.errors import RequestError
from pixelgate.gateway.sampling import sampling
from pixelgate.gateway.wire import parse_chat

RECOMMENDED = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}


def chosen(generation=None, **fields):
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], **fields}
    return sampling(parse_chat(json.dumps(body).encode()), generation or {})


def test_neutral_where_nobody_says_anything():
    assert chosen() == Sampling(temperature=1.0)


def test_the_checkpoint_recommends():
    assert chosen({**RECOMMENDED, "do_sample": True, "eos_token_id": 5}) == Sampling(**RECOMMENDED)


def test_the_request_wins_even_with_zero():
    said = {"temperature": 0.0, "top_p": 0.5, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    assert chosen(RECOMMENDED, **said) == Sampling(**said)


@pytest.mark.parametrize("generation", [{"temperature": None}, {"temperature": "hot"}, {"temperature": True}])
def test_recommendations_that_are_no_numbers_are_left_out(generation):
    assert chosen(generation).temperature == 1.0


def test_top_k_is_a_whole_number():
    assert chosen({"top_k": 50.0}).top_k is None


def test_all_of_openais_spellings():
    assert chosen(
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        max_tokens=7,
        min_tokens=2,
        seed=42,
        stop="END",
        stop_token_ids=[3, 4],
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        n=3,
        logprobs=True,
        top_logprobs=2,
        logit_bias={"5": -1, "7": 0.5},
        response_format={"type": "json_object"},
    ) == Sampling(
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        max_tokens=7,
        min_tokens=2,
        seed=42,
        stop=("END",),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        n=3,
        logprobs=2,
        logit_bias=((5, -1.0), (7, 0.5)),
        constraint=Constraint("json_object"),
    )


def test_the_newer_name_of_max_tokens_wins():
    assert chosen(max_tokens=7, max_completion_tokens=9).max_tokens == 9


@pytest.mark.parametrize(("stop", "expected"), [(None, ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())])
def test_stop_in_either_spelling(stop, expected):
    assert chosen(stop=stop).stop == expected


@pytest.mark.parametrize(("fields", "expected"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0)])
def test_log_probabilities_without_alternatives(fields, expected):
    assert chosen(**fields).logprobs == expected


@pytest.mark.parametrize(
    ("logit_bias", "message"),
    [
        ({"a": 1}, "logit_bias has a key that is no token id of this model"),
        ({"-1": 1}, "logit_bias has a key that is no token id of this model"),
        ({"10": 1}, "logit_bias has a key that is no token id of this model"),
        ({"9" * 10: 1}, "logit_bias has a key that is no token id of this model"),
        ({"1": 100.5}, "a logit_bias must be between -100 and 100"),
        ({str(i): 1 for i in range(1025)}, "logit_bias may hold at most 1024 tokens, not 1025"),
    ],
)
def test_biases_that_cannot_be_meant(logit_bias, message):
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}], "logit_bias": logit_bias}
    with pytest.raises(RequestError) as caught:
        sampling(parse_chat(json.dumps(body).encode()), {}, vocab_size=10)
    assert (caught.value.param, caught.value.message) == ("logit_bias", message)
