"""What is made of a vLLM's choices over HTTP, and what is not taken for an answer."""

from __future__ import annotations

import msgspec
import pytest
from engine_requests import request

from pixelgate.engines.engine import Delta, TokenLogprob
from pixelgate.engines.vllm_http_replies import Answers, Reply
from pixelgate.errors import EngineError


def choices(*found):
    return msgspec.convert({"choices": found}, Reply).choices


def told(*ids):
    content = [{"token_id": id_, "logprob": -1.0, "rank": 1, "top_logprobs": []} for id_ in ids]
    return {"content": content}


def test_answers_are_kept_apart_and_each_has_its_end():
    answers = Answers(request(n=2))
    prompt = len(request().token_ids)
    first, nothing, second, last = choices(
        {"index": 1, "token_ids": [5, 6]},
        {"index": 0, "token_ids": []},
        {"index": 1, "finish_reason": "length"},
        {"token_ids": [7], "finish_reason": "stop", "stop_reason": 7},
    )
    assert answers.push(first) == Delta((5, 6), None, prompt, 2, index=1)
    assert answers.push(nothing) is None
    assert answers.push(second) == Delta((), "length", prompt, 2, index=1)
    assert not answers.complete
    assert answers.push(last) == Delta((7,), "stop", prompt, 1, 7)
    assert answers.complete


def test_log_probabilities_belong_to_their_tokens():
    answers = Answers(request(logprobs=0))
    (choice,) = choices({"token_ids": [5, 6], "logprobs": told(5, 6)})
    assert answers.push(choice).logprobs == (TokenLogprob(5, -1.0), TokenLogprob(6, -1.0))
    (end,) = choices({"finish_reason": "stop"})
    assert answers.push(end).logprobs == ()
    (unasked,) = choices({"token_ids": [5], "logprobs": told(5), "finish_reason": "stop"})
    assert Answers(request()).push(unasked).logprobs == ()


def older(*tops, chosen=5):
    top = [{"token": f"token_id:{id_}", "logprob": -1.0 - id_, "bytes": None} for id_ in tops]
    return {"content": [{"token": f"token_id:{chosen}", "logprob": -1.5, "bytes": None, "top_logprobs": top}]}


def test_an_older_vllm_writes_ids_as_texts():
    (choice,) = choices({"token_ids": [5], "logprobs": older(5, 6, 7)})
    assert Answers(request(logprobs=2)).push(choice).logprobs == (TokenLogprob(5, -1.5, ((5, -6.0), (6, -7.0))),)
    assert Answers(request(logprobs=0)).push(choice).logprobs == (TokenLogprob(5, -1.5),)
    (unlikely,) = choices({"token_ids": [5], "logprobs": {"content": [{"token": "token_id:5"}]}})
    assert Answers(request(logprobs=1)).push(unlikely).logprobs == (TokenLogprob(5, -9999.0),)


def test_the_oldest_calls_all_alternatives_by_one_id():
    (choice,) = choices({"token_ids": [5], "logprobs": older(5, 5, 5)})
    assert Answers(request(logprobs=1)).push(choice).logprobs == (TokenLogprob(5, -1.5, ((5, -6.0),)),)
    with pytest.raises(EngineError, match="too old for top_logprobs above 1"):
        Answers(request(logprobs=2)).push(choice)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([{"index": 1, "token_ids": [5]}], "cannot be understood"),
        ([{"index": -1, "token_ids": [5]}], "cannot be understood"),
        ([{"finish_reason": "stop"}, {"token_ids": [5]}], "cannot be understood"),
        ([{"finish_reason": "error"}], "ended its answer with an error"),
        ([{"token_ids": [5]}], "left out log-probabilities"),
        ([{"token_ids": [5], "logprobs": told(5, 6)}], "left out log-probabilities"),
        ([{"token_ids": [5], "logprobs": older(chosen="")}], "cannot be understood"),
        ([{"token_ids": [5], "logprobs": {"content": [{"token": "5", "logprob": -1.0}]}}], "cannot be understood"),
    ],
)
def test_what_cannot_be_understood_is_an_engine_error(found, words):
    answers = Answers(request(logprobs=1))
    *before, wrong = choices(*found)
    for choice in before:
        answers.push(choice)
    with pytest.raises(EngineError, match=words):
        answers.push(wrong)
