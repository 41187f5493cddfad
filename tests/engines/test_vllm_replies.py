"""An engine's messages put together: several answers, log-probabilities, and what cannot be understood."""

from __future__ import annotations

import pytest
from engine_requests import FACTS, answer, request
from scripted_vllm import client, scripted
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.engine import Delta, TokenLogprob
from pixelgate.engines.grpc_replies import Answers
from pixelgate.errors import EngineError
from pixelgate.testing.strict_engine import StrictEngine


def logprobs(*values, top=()):
    tops = [pb.TopLogProbs(token_ids=[t for t, _ in top], values=[v for _, v in top])] * len(values) if top else []
    return pb.OutputLogProbs(token_logprobs=values, token_ids=range(len(values)), top_logprobs=tops)


def chunk(*ids, **fields):
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, **fields))


def complete(*ids, **fields):
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, **{"finish_reason": "stop", **fields}))


def test_answers_come_interleaved_and_end_one_by_one():
    answers = Answers(2, logprobs=False)
    assert answers.push(chunk(1)) == Delta((1,), completion_tokens=1)
    assert answers.push(chunk(2, 3, index=1)) == Delta((2, 3), completion_tokens=2, index=1)
    assert answers.push(chunk()) is None
    assert answers.push(complete(3, index=1, finish_reason="length")) == Delta((), "length", 0, 2, index=1)
    assert not answers.complete
    assert answers.push(chunk(4)) == Delta((4,), completion_tokens=2)
    assert answers.push(complete(4, matched_token_id=4)) == Delta((), "stop", 0, 2, 4)
    assert answers.complete


def test_log_probabilities_of_new_tokens():
    answers = Answers(1, logprobs=True)
    delta = answers.push(chunk(7, 8, output_logprobs=logprobs(-1, -2, top=((5, -1), (6, -3)))))
    top = ((5, -1.0), (6, -3.0))
    assert delta.logprobs == (TokenLogprob(7, -1.0, top), TokenLogprob(8, -2.0, top))
    delta = answers.push(complete(7, 8, 9, output_logprobs=logprobs(-1, -2, -4)))
    assert delta.token_ids == (9,)
    assert delta.logprobs == (TokenLogprob(9, -4.0),)


@pytest.mark.parametrize(
    "messages",
    [
        [pb.GenerateResponse()],
        [chunk(1, index=1)],
        [complete(1, index=9)],
        [complete(1), complete(1)],
        [complete(1), chunk(1)],
    ],
)
def test_garbage_is_an_error(messages):
    answers = Answers(1, logprobs=False)
    *good, garbage = messages
    for message in good:
        answers.push(message)
    with pytest.raises(EngineError, match="cannot be understood"):
        answers.push(garbage)


@pytest.mark.parametrize("told", [None, logprobs(-1), logprobs(-1, -2, -3)])
def test_log_probabilities_that_are_missing_are_an_error(told):
    with pytest.raises(EngineError, match="left out log-probabilities"):
        Answers(1, logprobs=True).push(chunk(7, 8, output_logprobs=told))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_strict_engine_gives_as_many_answers_as_asked_for(stream):
    async with StrictEngine(FACTS, reply_ids=(10, 999)) as server, client(server.url) as engine:
        deltas = await answer(engine, request(n=3, stream=stream, logprobs=1, temperature=1.0))
    ended = [delta for delta in deltas if delta.finish_reason]
    assert [(delta.index, delta.completion_tokens) for delta in ended] == [(0, 2), (1, 2), (2, 2)]
    tokens = {index: [t for d in deltas if d.index == index for t in d.token_ids] for index in range(3)}
    assert tokens == {index: [10, 999] for index in range(3)}
    entries = [entry for delta in deltas if delta.index == 2 for entry in delta.logprobs]
    assert entries == [TokenLogprob(10, -0.5, ((10, -0.5),)), TokenLogprob(999, -0.5, ((999, -0.5),))]


async def test_an_answer_that_is_missing_is_an_error():
    async with scripted([{"complete": complete(1).complete}]) as (engine, _):
        with pytest.raises(EngineError, match="before it was complete"):
            await answer(engine, request(n=2, temperature=1.0))
