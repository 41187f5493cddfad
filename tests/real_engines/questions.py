"""The requests of the suite: every chat greedily, and one of them with everything that chooses tokens."""

from __future__ import annotations

from typing import Any

from chats import ANSWER, CHATS, messages

SAMPLED = "qwen2_5_vl"  # the model that is asked with every parameter
BASE = "one picture"
_SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 9}, "red": {"type": "boolean"}},
    "required": ["count", "red"],
    "additionalProperties": False,
}
_HOT = {"temperature": 1.5, "seed": 3}


def greedy(model: str, title: str, **more: Any) -> dict[str, Any]:
    """A chat as a request for a greedy answer with log-probabilities."""
    fixed = {"temperature": 0, "max_tokens": ANSWER, "logprobs": True, "top_logprobs": 3}
    return {"model": model, "messages": messages(CHATS[title]), **fixed, **more}


def questions(model: str, expected: dict[str, Any], maker: str) -> dict[str, dict[str, Any]]:
    """All requests to be made of a model, by title. ``expected`` is what transformers answers to the chats.

    The parameters are vLLM's: SGLang has narrower ranges for some.
    """
    asked = {title: greedy(model, title) for title in CHATS}
    if model == SAMPLED and maker == "vllm":
        for title, fields in sampled(expected[BASE]).items():
            asked[title] = {name: value for name, value in greedy(model, BASE, **fields).items() if value is not None}
    return asked


def sampled(greedy: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Parameters by name, each of which changes the answer ``greedy``; None takes a field away."""
    eos = 522  # of the tiny tokenizer of Qwen, whose answers do not end by themselves
    after = greedy["texts"][3]
    tag = {"structures": [{"begin": after, "schema": _SCHEMA, "end": "</f>"}], "triggers": [after]}
    ends = {"logit_bias": {str(eos): 100}}
    return {
        "temperature": _HOT,
        "another seed": {**_HOT, "seed": 4},
        "top_p": {**_HOT, "top_p": 0.000001},
        "top_k": {**_HOT, "top_k": 1},
        "min_p": {**_HOT, "min_p": 1.0},
        "frequency_penalty": {"frequency_penalty": 2.0, "max_tokens": 48},
        "presence_penalty": {"presence_penalty": 2.0, "max_tokens": 48},
        "repetition_penalty": {"repetition_penalty": 5.0, "max_tokens": 48},
        "without a penalty": {"max_tokens": 48},
        "logit_bias": {"logit_bias": {"7": 100}},
        "max_tokens": {"max_tokens": 3},
        "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 4},
        "an end": ends,
        "min_tokens": {**ends, "min_tokens": 6},
        "ignore_eos": {**ends, "ignore_eos": True},
        "skip_special_tokens": {**ends, "ignore_eos": True, "skip_special_tokens": False},
        "stop": {"stop": [greedy["texts"][3]]},
        "include_stop_str_in_output": {"stop": greedy["texts"][3], "include_stop_str_in_output": True},
        "stop_token_ids": {"stop_token_ids": [greedy["tokens"][5]]},
        "n": {**_HOT, "n": 3},
        "logprobs": {"logprobs": None, "top_logprobs": None},
        "top_logprobs": {"top_logprobs": 7},
        "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 64},
        "json_schema": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}},
            "max_tokens": 96,
        },
        "structural_tag": {"response_format": {"type": "structural_tag", **tag}, "max_tokens": 24},
        "json": {"structured_outputs": {"json": _SCHEMA}, "max_tokens": 96},
        "regex": {"structured_outputs": {"regex": "[a-c]{4}-[0-9]{3}"}},
        "choice": {"structured_outputs": {"choice": ["a harbour", "a ticket"]}},
        "grammar": {"structured_outputs": {"grammar": 'root ::= "boat" ("s" | "") " " [1-9] [0-9]'}},
    }
