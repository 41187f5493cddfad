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
        {"role": "user", "content": [{"type": "image_url", "image_url": "u:3"}]},
    )
    assert list(references(messages)) == [
        ("messages[1].content[1].image_url", "u:1"),
        ("messages[1].content[3].image_url", "u:2"),
        ("messages[3].content[0].image_url", "u:3"),
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
            "tool_calls": [call('{"city": "Berlin"}'), call(""), call({"as": "object"}), {"id": "x"}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    )
    first, second = for_template(messages)
    assert first["content"] is None
    assert [c.get("function", {}).get("arguments") for c in first["tool_calls"]] == [
        {"city": "Berlin"},
        {},
        {"as": "object"},
        None,
    ]
    assert first["tool_calls"][0]["function"]["name"] == "f"
    assert second == {"role": "tool", "content": "rain", "tool_call_id": "1"}


@pytest.mark.parametrize("arguments", ["{", "no JSON", "[" * 100_000])
def test_tool_arguments_that_are_no_json(arguments):
    messages = parsed({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call(arguments)]})
    with pytest.raises(RequestError, match="not valid JSON") as caught:
        for_template(messages)
    assert caught.value.param == "messages[1].tool_calls"
