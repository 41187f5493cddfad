"""Several answers to one request, and log-probabilities, over HTTP."""

from __future__ import annotations

import pytest
from running import EOS, REPLY, error_of, events, gateway, strict_engine, until

from pixelgate.demo import CHECKPOINT
from pixelgate.engines.engine import Delta, Sampling, TokenLogprob
from pixelgate.gateway.answers import Answer, Piece
from pixelgate.prompt.tokens import open_tokenizer
from pixelgate.testing.strict_http import StrictHttpEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")


def by_index(response, n):
    """Text, role, log-probabilities and finish reason of each answer of a stream."""
    found = [{"text": "", "roles": [], "logprobs": [], "reasons": []} for _ in range(n)]
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    for chunk in chunks:
        for choice in chunk["choices"]:
            answer = found[choice["index"]]
            assert not answer["reasons"]  # nothing follows the end
            answer["text"] += choice["delta"].get("content", "")
            answer["roles"] += [choice["delta"]["role"]] if "role" in choice["delta"] else []
            answer["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
            answer["reasons"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return found, chunks


async def test_three_answers(house):
    response = await house.ask(n=3)
    assert response.status_code == 200
    answer = response.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [REPLY] * 3
    assert house.received().sampling_params.n == 3
    assert answer["usage"]["completion_tokens"] == 3 * len(house.engines["demo"].reply_ids)


async def test_three_answers_in_a_stream(house):
    response = await house.ask(n=3, stream=True, stream_options={"include_usage": True}, max_tokens=3)
    answers, chunks = by_index(response, 3)
    assert len({answer["text"] for answer in answers}) == 1
    assert all(answer["roles"] == ["assistant"] and answer["reasons"] == ["length"] for answer in answers)
    assert chunks[-1]["usage"]["completion_tokens"] == 9


async def test_every_answer_ends_at_its_stop_string_and_then_the_request(house):
    response = await house.ask(n=2, stream=True, stop=["arrived"])
    answers, _ = by_index(response, 2)
    assert [(answer["text"], answer["reasons"]) for answer in answers] == [("The picture ", ["stop"])] * 2
    await until(lambda: not house.engines["demo"].running)


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_is_part_of_the_answer_if_asked_for(house, include):
    response = await house.ask(stop="arrived", include_stop_str_in_output=include)
    text = response.json()["choices"][0]["message"]["content"]
    assert text == "The picture arrived" if include else "The picture "
    assert house.received().sampling_params.include_stop_str_in_output is include


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 2])
async def test_log_probabilities_of_every_token(house, tokenizer, stream, top):
    response = await house.ask(logprobs=True, top_logprobs=top, stream=stream)
    if stream:
        [answer], _ = by_index(response, 1)
        content = answer["logprobs"]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    ids = house.engines["demo"].reply_ids
    assert ids[-1] == EOS
    assert [entry["token"] for entry in content] == [tokenizer.decode([id_], False) for id_ in ids]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == REPLY
    assert {entry["logprob"] for entry in content} == {-0.5}
    for entry, id_ in zip(content, ids, strict=True):
        assert [(each["token"], each["logprob"]) for each in entry["top_logprobs"]] == [
            (tokenizer.decode([id_ + k], False), -0.5 - k) for k in range(top)
        ]


async def test_without_being_asked_there_are_none(house):
    assert (await house.ask()).json()["choices"][0]["logprobs"] is None
    response = await house.ask(stream=True)
    assert by_index(response, 1)[0][0]["logprobs"] == []
    assert not house.received().sampling_params.HasField("logprobs")


async def test_everything_that_chooses_tokens_reaches_the_engine(house):
    await house.ask(
        logit_bias={"5": -100, "7": 2.5},
        structured_outputs={"choice": ["yes", "no"]},
        min_tokens=2,
        max_tokens=9,
        seed=-7,
    )
    sampling = house.received().sampling_params
    assert dict(sampling.logit_bias) == {5: -100.0, 7: 2.5}
    assert list(sampling.choice.choices) == ["yes", "no"]
    assert (sampling.min_tokens, sampling.max_tokens, sampling.seed) == (2, 9, -7)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    await house.ask(response_format=schema)
    assert house.received().sampling_params.json_schema == '{"type": "object"}'


@pytest.mark.parametrize("stream", [False, True])
async def test_over_http_it_is_the_same(tokenizer, stream):
    async with (
        StrictHttpEngine(CHECKPOINT, reply=REPLY, device_normalize=True, eos_token_ids=(EOS,)) as engine,
        gateway(engine.url) as running,
    ):
        asked = {"n": 2, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": -100}, "stream": stream}
        response = await running.ask(**asked, structured_outputs={"choice": ["yes", "no"]})
        assert response.status_code == 200
    sampling = engine.requests[-1].sampling_params
    assert (sampling.n, sampling.logprobs, dict(sampling.logit_bias)) == (2, 2, {5: -100.0})
    assert list(sampling.choice.choices) == ["yes", "no"]
    if stream:
        found = [(answer["text"], answer["logprobs"]) for answer in by_index(response, 2)[0]]
    else:
        choices = response.json()["choices"]
        found = [(choice["message"]["content"], choice["logprobs"]["content"]) for choice in choices]
    for text, content in found:
        assert text == REPLY
        assert [entry["token"] for entry in content] == [tokenizer.decode([i], False) for i in engine.reply_ids]
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_an_embedded_engine_refuses_what_it_cannot_do():
    async with strict_engine() as engine, gateway({"demo": "local:reader", "other": engine.url}) as running:
        for name, fields in {
            "n": {"n": 2},
            "logprobs": {"logprobs": True},
            "logit_bias": {"logit_bias": {"5": 1}},
            "response_format": {"response_format": {"type": "json_object"}},
        }.items():
            response = await running.ask(**fields)
            assert response.status_code == 400
            assert error_of(response)["param"] == name


async def test_log_probabilities_come_with_the_text_or_before_it(tokenizer):
    """A character in three tokens: its log-probabilities are not held back with its text."""
    ids = tokenizer.encode_text("\N{PILE OF POO}\N{PILE OF POO}")
    answer = Answer(4, open_tokenizer(CHECKPOINT / "tokenizer.json"), Sampling(), (EOS,))
    pieces = [
        answer.push(Delta((id_,), completion_tokens=i, logprobs=(TokenLogprob(id_, float("-inf")),)))
        for i, id_ in enumerate(ids, 1)
    ]
    assert len(ids) > 2
    assert all(len(piece.logprobs) == 1 and piece.index == 4 for piece in pieces)
    assert {piece.logprobs[0]["logprob"] for piece in pieces} == {-9999.0}
    assert b"".join(bytes(piece.logprobs[0]["bytes"]) for piece in pieces).decode() == "\N{PILE OF POO}" * 2
    assert answer.push(Delta((EOS,), "stop", completion_tokens=9)) == Piece(4, "", (), "stop")
    assert answer.push(Delta((5,))) is None
    assert answer.tokens == 9
