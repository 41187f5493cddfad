from __future__ import annotations

import json

import pytest

from pixelgate.errors import RequestError
from pixelgate.gateway.messages import for_template, references
from pixelgate.gateway.wire import parse_chat


def parsed(*messages):
    return parse_chat(json.dumps({"model": "demo", "messages": messages}).encode()).messages


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def text(words):
    return {"type": "text", "text": words}


def call(arguments):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_references_are_in_authored_order_and_say_where_they_stand():
    messages = parsed(
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [text("one"), image("u:1"), text("two"), image("u:2")]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "image_url", "image_url": "u:3", "uuid": "mine"}]},
    )
    assert list(references(messages)) == [
        ("messages[1].content[1].image_url", "u:1", None),
        ("messages[1].content[3].image_url", "u:2", None),
        ("messages[3].content[0].image_url", "u:3", "mine"),
    ]


def test_templates_see_parts_without_urls():
    messages = parsed(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": [image("u:1"), text("What is it?")]},
    )
    assert for_template(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "name": "Ann", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    ]


def test_tool_calls_have_their_arguments_parsed():
    messages = parsed(
        {
            "role": "assistant",
            "tool_calls": [call('{"city": "Berlin"}'), call(""), call({"as": "object"})],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    )
    first, second = for_template(messages)
    assert first["content"] is None
    assert [c.get("function", {}).get("arguments") for c in first["tool_calls"]] == [
        {"city": "Berlin"},
        {},
        {"as": "object"},
    ]
    assert first["tool_calls"][0]["function"]["name"] == "f"
    assert second == {"role": "tool", "content": "rain", "tool_call_id": "1"}


@pytest.mark.parametrize("arguments", ["{", "no JSON", "[" * 100_000, "[1]", "3", None, ["a"]])
def test_arguments_that_a_model_got_wrong_end_no_conversation(arguments):
    messages = parsed({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call(arguments)]})
    assert for_template(messages)[1]["tool_calls"] == [call({})]


def test_a_tool_call_without_its_function():
    messages = parsed({"role": "assistant", "tool_calls": [call("{}"), {"id": "x"}]})
    with pytest.raises(RequestError, match="function is missing") as caught:
        for_template(messages)
    assert caught.value.param == "messages[0].tool_calls[1]"


def test_every_spelling_of_a_part():
    messages = parsed(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "u:1"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": {"url": "u:2", "detail": "low"}}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": "u:3", "uuid": "abc", "detail": "high"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": []},
        {"role": "user", "content": ""},
    )
    assert [reference.url for reference in references(messages)] == ["u:1", "u:2", "u:3"]
    assert [m["content"] for m in for_template(messages)] == [
        [{"type": "text", "text": "a"}, {"type": "image"}],
        [{"type": "image"}],
        [{"type": "image"}],
        [{"type": "text", "text": "b"}, {"type": "text", "text": "no"}],
        [],
        "",
    ]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_both_its_names(name):
    (message,) = for_template(parsed({"role": "assistant", "content": "a", name: "because"}))
    assert message == {"role": "assistant", "content": "a", "reasoning": "because", "reasoning_content": "because"}


SYSTEM, DEVELOPER, USER = ({"role": role, "content": f"I am the {role}."} for role in ("system", "developer", "user"))


def test_a_developer_is_the_system_for_templates_that_know_none():
    of = lambda *messages: for_template(parsed(*messages))  # noqa: E731
    assert of(DEVELOPER, USER) == [{"role": "system", "content": "I am the developer."}, USER]
    both = [{"role": "system", "content": "I am the system.\n\nI am the developer."}, USER]
    assert of(SYSTEM, DEVELOPER, USER) == of(SYSTEM, USER, DEVELOPER) == both
    in_parts = {"role": "developer", "content": [text("one"), text("two")]}
    assert of(USER, in_parts)[0] == {"role": "system", "content": "one\ntwo"}
    assert for_template(parsed(DEVELOPER, USER), developers=True) == [DEVELOPER, USER]
    assert of(SYSTEM, USER, SYSTEM) == [SYSTEM, USER, SYSTEM]


def test_systems_with_pictures_stay_where_they_are():
    seeing = {"role": "developer", "content": [text("see"), image("u:1")]}
    assert [m["role"] for m in for_template(parsed(USER, seeing))] == ["user", "system"]


def test_a_refusal_is_what_the_assistant_said():
    (message,) = for_template(parsed({"role": "assistant", "content": None, "refusal": "I cannot."}))
    assert message["content"] == "I cannot."
