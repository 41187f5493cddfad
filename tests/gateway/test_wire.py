from __future__ import annotations

import json

import pytest

from pixelgate.errors import RequestError
from pixelgate.gateway.wire import (
    MAX_STOPS,
    choice,
    chunk,
    completion,
    delta,
    error_body,
    parse_chat,
    refuse_unsupported,
    usage,
)

USER = {"role": "user", "content": "Hello"}


KINDS = "must be text, image_url, input_text, input_image, output_text or refusal"


def body(**fields):
    return json.dumps({"model": "demo", "messages": [USER], **fields}).encode()


def message(**fields):
    return body(messages=[{"role": "user", **fields}])


def part(**fields):
    return message(content=[{"type": "text", "text": "a"}, fields])


def raw(field):
    return body()[:-1] + b', "%b}' % field


def refused(sent):
    with pytest.raises(RequestError) as caught:
        refuse_unsupported(parse_chat(sent))
    assert caught.value.status == 400
    return caught.value.param, caught.value.message


@pytest.mark.parametrize(
    ("sent", "param", "reason"),
    [
        (b"{}", "model", "model is missing"),
        (b'{"model": "demo"}', "messages", "messages is missing"),
        (b"[]", None, "the body must be an object, not a list"),
        (body(model=3), "model", "model must be a string, not a whole number"),
        (body(model=None), "model", "model must be a string, not null"),
        (body(messages={}), "messages", "messages must be a list, not an object"),
        (body(messages=[]), "messages", "messages must hold at least one message"),
        (body(messages=[USER, 3]), "messages[1]", "messages[1] must be an object, not a whole number"),
        (body(messages=[{"content": "x"}]), "messages[0].role", "messages[0].role is missing"),
        (
            body(messages=[USER, {"role": "robot", "content": "x"}]),
            "messages[1].role",
            "messages[1].role must be system, developer, user, assistant or tool",
        ),
        (message(), "messages[0].content", "messages[0].content is missing"),
        (message(content=None), "messages[0].content", "messages[0].content is missing"),
        (message(content=1.5), "messages[0].content", "messages[0].content must be a string or a list, not a number"),
        (message(content="x", name=3), "messages[0].name", "messages[0].name must be a string, not a whole number"),
        (
            message(content="x", tool_calls=[1]),
            "messages[0].tool_calls[0]",
            "messages[0].tool_calls[0] must be an object, not a whole number",
        ),
        (message(content=["x"]), "messages[0].content[0]", "messages[0].content[0] must be an object, not a string"),
        (part(text="x"), "messages[0].content[1].type", "messages[0].content[1].type is missing"),
        (
            part(type="input_audio"),
            "messages[0].content[1].type",
            f"messages[0].content[1].type {KINDS}",
        ),
        (
            part(type=3),
            "messages[0].content[1].type",
            f"messages[0].content[1].type {KINDS}",
        ),
        (
            part(type="video - at `$.model`"),
            "messages[0].content[1].type",
            f"messages[0].content[1].type {KINDS}",
        ),
        (part(type="text"), "messages[0].content[1].text", "messages[0].content[1].text is missing"),
        (
            part(type="image_url"),
            "messages[0].content[1].image_url",
            "messages[0].content[1].image_url is missing, and there is no uuid",
        ),
        (
            part(type="image_url", image_url=None),
            "messages[0].content[1].image_url",
            "messages[0].content[1].image_url is missing, and there is no uuid",
        ),
        (
            part(type="image_url", image_url={}),
            "messages[0].content[1].image_url.url",
            "messages[0].content[1].image_url.url is missing",
        ),
        (
            part(type="image_url", image_url={"url": True}),
            "messages[0].content[1].image_url.url",
            "messages[0].content[1].image_url.url must be a string, not true or false",
        ),
        (body(stream="yes"), "stream", "stream must be true or false, not a string"),
        (
            body(stream_options={"include_usage": 1}),
            "stream_options.include_usage",
            "stream_options.include_usage must be true or false, not a whole number",
        ),
        (body(top_k=1.5), "top_k", "top_k must be a whole number, not a number"),
        (body(top_k=True), "top_k", "top_k must be a whole number, not true or false"),
        (body(temperature="1"), "temperature", "temperature must be a number, not a string"),
        (body(stop=3), "stop", "stop must be a string or a list, not a whole number"),
        (body(stop=["a", 3]), "stop[1]", "stop[1] must be a string, not a whole number"),
        (body(stop_token_ids=["a"]), "stop_token_ids[0]", "stop_token_ids[0] must be a whole number, not a string"),
        (body(logit_bias={"1": "a"}), "logit_bias[...]", "logit_bias[...] must be a number, not a string"),
        (body(tools=[3]), "tools[0]", "tools[0] must be an object, not a whole number"),
    ],
)
def test_what_is_wrong_is_named(sent, param, reason):
    assert refused(sent) == (param, reason)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"{",
        b"no JSON",
        body() + b" and more",
        "\ufeff".encode() + body(),
        body().replace(b"Hello", b"\xff\xfe"),
        body().replace(b"Hello", b"\\ud800"),
        body().replace(b"Hello", b"line\nbreak"),
        raw(b'temperature": NaN'),
        raw(b'temperature": Infinity'),
        raw(b'temperature": -Infinity'),
        raw(b'tool_choice": ' + b"[" * 5000 + b"]" * 5000),
        raw(b'unknown": ' + b'{"a":' * 100_000),
    ],
)
def test_what_is_no_json(sent):
    assert refused(sent) == (None, "the body is not valid JSON")


@pytest.mark.parametrize(
    ("name", "low", "high", "outside"),
    [
        ("temperature", 0.0, 2.0, (-0.01, 2.01)),
        ("top_p", 0.0, 1.0, (-0.01, 1.01)),
        ("min_p", 0.0, 1.0, (-0.01, 1.01)),
        ("frequency_penalty", -2.0, 2.0, (-2.01, 2.01)),
        ("presence_penalty", -2.0, 2.0, (-2.01, 2.01)),
        ("repetition_penalty", 0.01, 10.0, (0, 10.01)),
        ("top_k", -1, 1 << 30, (-2, (1 << 30) + 1, 10**400)),
        ("max_tokens", 1, 1 << 30, (0, -1)),
        ("max_completion_tokens", 1, 1 << 30, (0,)),
        ("min_tokens", 0, 1 << 30, (-1,)),
        ("seed", -(1 << 63), (1 << 63) - 1, (1 << 63, 10**400)),
        ("n", 1, 16, (0, 17, 10**400)),
    ],
)
def test_ranges_include_their_ends(name, low, high, outside):
    for value in (low, high, None):
        assert getattr(parse_chat(body(**{name: value})), name) == value
    for value in outside:
        assert refused(body(**{name: value})) == (name, f"{name} must be between {low} and {high}")


@pytest.mark.parametrize(
    ("name", "digits"), [("temperature", b"1e999"), ("temperature", b"9" * 400), ("top_k", b"9" * 5000)]
)
def test_numbers_that_are_none(name, digits):
    assert refused(raw(b'%b": %b' % (name.encode(), digits))) == (name, f"{name} is not valid")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("chat_template", "{{ messages }}"),
        ("chat_template", ""),
        ("documents", [{"text": "x"}]),
    ],
)
def test_what_a_request_may_not_decide_is_refused_by_name(name, value):
    assert refused(body(**{name: value})) == (name, f"{name} with this value is not supported by this gateway")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("echo", True),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [1]),
        ("logprob_token_ids", [1]),
        ("prompt_logprobs", 1),
        ("truncate_prompt_tokens", 5),
        ("thinking_token_budget", 5),
    ],
)
def test_what_would_change_the_answer_and_cannot_be_carried_is_refused_by_name(name, value):
    assert refused(body(**{name: value})) == (name, f"{name} is not supported by this gateway")


@pytest.mark.parametrize("name", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_an_older_spelling_is_told_the_newer(name):
    message = f"{name} is not supported by this gateway; use structured_outputs"
    assert refused(body(**{name: "a"})) == (name, message)


def test_alternatives_go_with_log_probabilities():
    for top in (0, 20):
        assert parse_chat(body(logprobs=True, top_logprobs=top)).top_logprobs == top
    for fields in ({}, {"logprobs": False}):
        assert refused(body(top_logprobs=3, **fields)) == ("top_logprobs", "top_logprobs goes with logprobs: true")
    for top in (-1, 21):
        message = "top_logprobs must be between 0 and 20"
        assert refused(body(logprobs=True, top_logprobs=top)) == ("top_logprobs", message)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "tool_choice": "none"},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "stream_options": {"include_usage": None}},
        {"n": None, "response_format": None, "logit_bias": None, "tool_choice": None, "stream": None},
        {"chat_template": None, "documents": []},
        {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "echo": None, "guided_json": None},
        {"user": "u-1", "store": True, "metadata": {"a": [1, {}]}},
    ],
)
def test_neutral_values_and_unknown_fields_are_taken(fields):
    parsed = parse_chat(body(**fields))
    assert parsed.model == "demo"
    refuse_unsupported(parsed)


def test_stop_strings_are_limited():
    assert len(parse_chat(body(stop=["a"] * MAX_STOPS)).stop) == MAX_STOPS
    for empty in ("", ["a", ""]):
        assert refused(body(stop=empty)) == ("stop", "a stop string must not be empty")
    assert refused(body(stop=["a"] * 17)) == ("stop", "stop may hold at most 16 strings, not 17")
    assert parse_chat(body(stop="long text")).stop == "long text"


def test_a_picture_in_either_spelling():
    parts = (
        parse_chat(
            message(
                content=[
                    {"type": "image_url", "image_url": {"url": "https://a.example/1.png", "detail": "high"}},
                    {"type": "image_url", "image_url": "https://a.example/2.png"},
                ]
            )
        )
        .messages[0]
        .content
    )
    assert [part.url for part in parts] == ["https://a.example/1.png", "https://a.example/2.png"]


def test_only_an_assistant_may_say_nothing():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parsed = parse_chat(body(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call]}]))
    assert parsed.messages[1].content is None
    for role in ("system", "developer", "tool"):
        assert refused(body(messages=[USER, {"role": role}]))[0] == "messages[1].content"


def test_what_is_answered():
    counted = usage(10, 3, 8)
    assert counted == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"image_tokens": 8},
    }
    whole = completion("id-1", 5, "demo", [choice(0, "Hi", "stop", None)], counted)
    assert (whole["object"], whole["id"], whole["created"], whole["usage"]) == ("chat.completion", "id-1", 5, counted)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hi"}
    assert whole["choices"][0]["logprobs"] is None
    piece = chunk("id-1", 5, "demo", [delta(0, {"content": "H"})])
    assert (piece["object"], piece["choices"][0]["delta"]) == ("chat.completion.chunk", {"content": "H"})
    assert error_body(RequestError("no", param="model")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "model", "code": None}
    }
