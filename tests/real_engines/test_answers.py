"""An answer through the gateway is the engine's own to the same request, and that of transformers."""

from __future__ import annotations

import pytest
from asking import ask
from chats import CHATS, DIFFERENT, MODELS, WITH_MASKS, named
from kinds import KINDS, VLLM
from questions import greedy

from pixelgate.prompt.tokens import open_tokenizer

CLOSE = 1e-4  # how near log-probabilities are: batches differ in size, and sums in their order
EVERY = [(kind, model) for model in MODELS for kind in KINDS]


def pairs(kinds, models=MODELS):
    """Each of the models with each of the kinds of engine that serve it, by name."""
    return [(kind, model) for model in models for kind in kinds if model in KINDS[kind].models]


def every(kinds=VLLM, models=MODELS):
    """The mark of a test for engines of all these kinds with all these models."""
    found = pairs(kinds, models)
    return pytest.mark.parametrize("served", found, ids=["-".join(pair) for pair in found], indirect=True)


def not_carried(kind, model, title):
    """What a protocol has no way to express."""
    if model not in WITH_MASKS or not named(CHATS[title]):
        return False
    return kind == "vllm-http" or title == DIFFERENT


@every()
@pytest.mark.parametrize("title", CHATS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_equal_or_refused(served, title, stream):
    model = served.model
    answer = ask(served.gateway.client, greedy(model, title), stream)
    if not_carried(served.kind.name, model, title):
        assert (answer.status, answer.error["code"], answer.error["param"]) == (422, "not_carried", "messages")
        return
    assert answer.status == 200, answer.error
    assert answer.done
    (choice,) = answer.choices
    own, expected = served.own[title], served.expected[title]
    (their,) = own["choices"]
    tokenizer = open_tokenizer(served.checkpoints / model / "tokenizer.json")
    ids = their["token_ids"]

    assert ids == expected["tokens"]
    assert [bytes(entry["bytes"]) for entry in choice.logprobs] == [tokenizer.token_bytes(token) for token in ids]
    assert choice.text == tokenizer.decode(ids)
    # a vLLM leaves out what is no whole character at the end of an answer; transformers writes U+FFFD, and so do we
    assert choice.text.rstrip("\ufffd") == their["message"]["content"].rstrip("\ufffd")
    assert choice.reason == their["finish_reason"] == "length"
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.usage[name] == own["usage"][name]
    assert answer.usage["prompt_tokens"] == len(expected["prompt"])

    logprobs = [entry["logprob"] for entry in choice.logprobs]
    assert logprobs == pytest.approx([entry["logprob"] for entry in their["logprobs"]["content"]], abs=CLOSE)
    assert logprobs == pytest.approx(expected["logprobs"], abs=CLOSE)
    for ours, theirs in zip(choice.logprobs, their["logprobs"]["content"], strict=True):
        tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in (ours, theirs)]
        assert tops[0] == pytest.approx(tops[1], abs=CLOSE)


@every()
def test_another_picture_has_another_answer(served):
    """Without this all of the above could be true of an engine that does not look."""
    tokens = [served.expected[title]["tokens"] for title in ("one picture", "another picture")]
    assert tokens[0] != tokens[1]
