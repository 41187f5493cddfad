"""Everything that chooses tokens reaches a real engine and does what it is for, or is refused by name."""

from __future__ import annotations

import re

import pytest
from asking import ask
from kinds import VLLM
from questions import BASE, SAMPLED, greedy
from test_answers import CLOSE

from pixelgate.prompt.tokens import open_tokenizer

PAIRS = [(kind, SAMPLED) for kind in VLLM]
each_kind = pytest.mark.parametrize("served", PAIRS, ids=[kind for kind, _ in PAIRS], indirect=True)


class Asked:
    """Answers to the requests of `questions`, by title."""

    def __init__(self, served, stream):
        self._served, self._stream = served, stream
        self._found = {}
        self.tokenizer = open_tokenizer(served.checkpoints / SAMPLED / "tokenizer.json")
        self.greedy = served.expected[BASE]["tokens"]

    def __call__(self, title):
        if title not in self._found:
            answer = ask(self._served.gateway.client, self._served.questions[title], self._stream)
            assert answer.status == 200, answer.error
            assert answer.done
            self._found[title] = answer
        return self._found[title]

    def reason(self, title):
        (choice,) = self(title).choices
        return choice.reason

    def count(self, title):
        return self(title).usage["completion_tokens"]

    def text_of(self, tokens):
        return self.tokenizer.decode(tokens)


def repeats(asked, title):
    """How many of an answer's tokens had come before in it."""
    (choice,) = asked(title).choices
    return len(choice.logprobs) - len({tuple(entry["bytes"]) for entry in choice.logprobs})


EFFECTS = {
    "temperature": lambda a: a("temperature").text != a(BASE).text,
    "another seed": lambda a: a("another seed").text != a("temperature").text,
    "top_p": lambda a: a("top_p").text == a(BASE).text,
    "top_k": lambda a: a("top_k").text == a(BASE).text,
    "min_p": lambda a: a("min_p").text == a(BASE).text,
    "frequency_penalty": lambda a: repeats(a, "frequency_penalty") < repeats(a, "without a penalty"),
    "presence_penalty": lambda a: repeats(a, "presence_penalty") < repeats(a, "without a penalty"),
    "repetition_penalty": lambda a: repeats(a, "repetition_penalty") < repeats(a, "without a penalty"),
    "logit_bias": lambda a: a("logit_bias").text == a.text_of([7] * 16),
    "max_tokens": lambda a: a("max_tokens").text == a.text_of(a.greedy[:3]) and a.reason("max_tokens") == "length",
    "max_completion_tokens": lambda a: a("max_completion_tokens").text == a.text_of(a.greedy[:4]),
    "an end": lambda a: (a("an end").text, a.reason("an end"), a.count("an end")) == ("", "stop", 1),
    "min_tokens": lambda a: (a.reason("min_tokens"), a.count("min_tokens")) == ("stop", 7),
    "ignore_eos": lambda a: (a("ignore_eos").text, a.reason("ignore_eos"), a.count("ignore_eos")) == ("", "length", 16),
    "skip_special_tokens": lambda a: a("skip_special_tokens").text == "<|im_end|>" * 16,
    "stop_token_ids": lambda a: (
        (a("stop_token_ids").text, a.reason("stop_token_ids")) == (a.text_of(a.greedy[:5]), "stop")
    ),
    "stop": lambda a: (a("stop").text, a.reason("stop")) == (a("max_tokens").text, "stop"),
    "include_stop_str_in_output": lambda a: (
        a("include_stop_str_in_output").text == a.text_of(a.greedy[:4]) and a.count("include_stop_str_in_output") == 4
    ),
    "n": lambda a: len({choice.text for choice in a("n").choices}) == 3,
    "logprobs": lambda a: a("logprobs").choices[0].logprobs == [] and a("logprobs").text == a(BASE).text,
    "top_logprobs": lambda a: {len(e["top_logprobs"]) for e in a("top_logprobs").choices[0].logprobs} == {7},
    # a model without sense likes blanks, so that these answers may have no end
    "json_object": lambda a: re.match(r"\s*\{", a("json_object").text),
    "json_schema": lambda a: re.match(r'\s*\{\s*"count"\s*:\s*\d', a("json_schema").text),
    "json": lambda a: re.match(r'\s*\{\s*"count"\s*:\s*\d', a("json").text),
    "structural_tag": lambda a: (
        a("structural_tag").text != a(BASE).text
        and re.match(r"\s*(\{|$)", a("structural_tag").text.removeprefix(a.text_of(a.greedy[:4])))
    ),
    "regex": lambda a: re.fullmatch("[a-c]{4}-[0-9]{3}", a("regex").text),
    "choice": lambda a: a("choice").text in ("a harbour", "a ticket"),
    "grammar": lambda a: re.fullmatch("boats? [1-9][0-9]", a("grammar").text),
}


@pytest.fixture(scope="module")
def asked_of():
    """Answers are asked for once for all tests of an engine."""
    return {}


@each_kind
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("title", EFFECTS)
def test_effect(served, asked_of, title, stream):
    """Each parameter has its effect, and the engine's own chat API answers the same."""
    asked = asked_of.setdefault((served.kind.name, stream), Asked(served, stream))
    assert EFFECTS[title](asked), (asked(title), asked(BASE).text)
    own = served.own[title]
    for ours, theirs in zip(asked(title).choices, own["choices"], strict=True):
        assert ours.text.rstrip("\ufffd") == theirs["message"]["content"].rstrip("\ufffd")
        assert ours.reason == theirs["finish_reason"]
        logprobs = [entry["logprob"] for entry in (theirs["logprobs"] or {"content": []})["content"]]
        assert [entry["logprob"] for entry in ours.logprobs] == pytest.approx(logprobs, abs=CLOSE)
    assert asked.count(title) == own["usage"]["completion_tokens"]


REFUSED = {
    "best_of": 2,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "echo": True,
    "bad_words": ["boat"],
    "allowed_token_ids": [1, 2],
    "logprob_token_ids": [1],
    "prompt_logprobs": 1,
    "truncate_prompt_tokens": 5,
    "thinking_token_budget": 5,
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
    "chat_template": "x",
    "documents": [{}],
    "temperature": -1,
    "top_p": 2,
    "top_k": -2,
    "min_p": 2,
    "n": 2,  # all answers would be the same
    "min_tokens": 17,  # more than max_tokens
    "seed": 1 << 63,
    "stop": [""],
    "logit_bias": {"100000": 1},
    "top_logprobs": 21,
}
REFUSED_DEEPER = {
    "structured_outputs.whitespace_pattern": {"structured_outputs": {"whitespace_pattern": " "}},
    "response_format.type": {"response_format": {"type": "poem"}},
    "tool_choice": {"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
}


@each_kind
@pytest.mark.parametrize("param", [*REFUSED, *REFUSED_DEEPER])
def test_refused_by_name(served, param):
    fields = REFUSED_DEEPER.get(param) or {param: REFUSED[param]}
    answer = ask(served.gateway.client, greedy(SAMPLED, "no picture", **fields))
    assert (answer.status, answer.error["param"]) == (400, param)


@each_kind
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "(["}},
        {"structured_outputs": {"grammar": "root ::= (["}},
        {"stop_token_ids": [1 << 31]},
    ],
    ids=["regex", "grammar", "stop_token_ids"],
)
def test_what_only_the_engine_can_refuse(served, fields):
    """The client hears that its request is wrong, and the engine answers the next one."""
    answer = ask(served.gateway.client, greedy(SAMPLED, "no picture", **fields))
    assert answer.status == 400, answer
    assert ask(served.gateway.client, greedy(SAMPLED, "no picture")).status == 200


@each_kind
def test_an_answer_ends_with_the_context(served):
    """A vLLM's own chat API refuses to be asked for more tokens than a context has."""
    almost = [{"role": "user", "content": "7" * 2000}]
    answer = ask(served.gateway.client, {**greedy(SAMPLED, "no picture"), "messages": almost, "max_tokens": 5000})
    assert answer.status == 200, answer.error
    assert answer.usage["prompt_tokens"] > 2000
    assert (answer.choices[0].reason, answer.usage["total_tokens"]) == ("length", 2048)
