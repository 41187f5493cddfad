"""What a client is told of a request that is not answered, and that no engine hears of it."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace

import pytest
from running import PATH, error_of, gateway, image, picture, strict_engine, text

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST, SECOND = "messages[0].content[0].image_url", "messages[0].content[1].image_url"


async def test_a_picture_that_is_not_there(house, host):
    url, _ = host
    before = len(house.engines["demo"].requests)
    response = await house.ask([image(picture(56, 56)), image(f"{url}/missing")])
    assert response.status_code == 400
    assert error_of(response) == {
        "message": "the picture's host answered with HTTP status 404",
        "type": "invalid_request_error",
        "param": "messages[0].content[1].image_url",
        "code": "image_fetch_failed",
    }
    assert len(house.engines["demo"].requests) == before


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": [{"role": "user", "content": "a" * 2_000_001}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 1_000_001}] * 2}]},
        {"messages": [{"role": "user", "content": ""}] * 10_001},
        {"messages": [{"role": "user", "content": ""}], "tools": [{"a": [{}]}] * 20_001},
        {"messages": [{"role": "assistant", "refusal": "a" * 2_000_001}, {"role": "user", "content": ""}]},
        {"messages": [{"role": "user", "content": ""}], "tools": [{"a": [10**4000] * 600}]},
    ],
)
async def test_more_text_than_is_allowed(house, request_):
    before = len(house.engines["demo"].requests)
    response = await house.client.post(PATH, json={"model": "demo", **request_})
    assert response.status_code == 413, response.text
    assert "more text than the limit of 2000000 characters" in error_of(response)["message"]
    assert len(house.engines["demo"].requests) == before


async def test_options_are_not_taken_from_strangers():
    async with strict_engine() as engine, gateway(engine.url) as running:
        response = await running.ask([image(picture(56, 56))], mm_processor_kwargs={"max_pixels": 5000})
    assert response.status_code == 400
    assert error_of(response)["param"] == "mm_processor_kwargs"
    assert "--trust-request-mm-kwargs" in error_of(response)["message"]


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"max_pixel": 5}, "max_pixel", "this processor knows min_pixels, max_pixels"),
        ({"max_pixels": "5"}, "max_pixels", "must be int"),
        ({"self": 5}, "self", "unknown option"),
        ({"image_mean": [0, 0, 0]}, "image_mean", "the engine normalises the pixels itself"),
        ([], "mm_processor_kwargs", "must be an object"),
    ],
)
async def test_options_that_are_refused(house, options, param, words):
    before = len(house.engines["demo"].requests)
    response = await house.ask([image(picture(56, 56))], mm_processor_kwargs=options)
    assert response.status_code == 400
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]
    assert len(house.engines["demo"].requests) == before


@pytest.mark.parametrize(
    ("content", "status", "param", "code", "words"),
    [
        ([image(b"no picture")], 400, FIRST, "image_decode_failed", "no known format"),
        ([text("a"), image(picture(56, 56)[:-700])], 400, SECOND, "image_decode_failed", "damaged"),
        ([image("data:image/png;base64,!!!")], 400, FIRST, "invalid_image", "not valid base64"),
        ([image("/etc/passwd")], 400, FIRST, "invalid_image", "file paths"),
        ([image("http://10.0.0.1/a.png")], 400, FIRST, "image_fetch_failed", "not allowed"),
        ([image(picture(201 * 2, 2))], 422, FIRST, "image_refused", "201 times as long"),
        ([image(picture(56, 56))] * 5, 400, "messages", None, "5 pictures; at most 4 are allowed"),
        ([image(picture(1100, 1100, form="JPEG"))] * 4, 413, "messages", "too_large", "28619136 bytes of tensors"),
    ],
)
async def test_pictures_that_are_refused(house, content, status, param, code, words):
    before = len(house.engines["demo"].requests)
    response = await house.ask(content)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
    assert words in error["message"]
    assert len(house.engines["demo"].requests) == before


@pytest.mark.parametrize(
    ("content", "status", "param", "words"),
    [
        ([image(picture(56, 56))] * 3, 400, "messages", "3 pictures; at most 2 are allowed"),
        (
            [text("a"), image(picture(500, 500))],
            422,
            "messages[0].content[1].image_url",
            "a picture of 500x500 takes 324 tokens; the engine accepts at most 150 for one picture",
        ),
        (
            [image(picture(336, 336))] * 2,
            400,
            "messages",
            r"the prompt has 3\d\d tokens, 288 of them for pictures; this model takes fewer than 300",
        ),
        ([image(picture(280, 420))] * 2, 400, "messages", "the pictures alone take 300 tokens"),
        ("word " * 400, 400, "messages", r"the prompt has \d+ tokens, 0 of them for pictures"),
    ],
)
async def test_the_engines_own_limits(house, content, status, param, words):
    response = await house.ask(content, model="tight")
    assert response.status_code == status, response.text
    assert error_of(response)["param"] == param
    assert re.search(words, error_of(response)["message"])
    assert not house.engines["tight"].requests


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_has_its_own_status(house, stream, monkeypatch):
    engine = house.engines["demo"]
    monkeypatch.setattr(engine, "facts", replace(engine.facts, max_context=4))  # which it does not say
    response = await house.ask(stream=stream)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert "The engine refused the request" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias"),
        ({"seed": 1 << 40}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ],
)
async def test_sampling_that_is_refused_names_the_field(house, fields, param):
    response = await house.ask(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == param


@pytest.mark.parametrize("fields", [{"stop": ""}, {"stop_token_ids": [10**30]}, {"stop_token_ids": [-1]}])
async def test_sampling_that_cannot_be_sent(house, fields):
    response = await house.ask(**fields)
    assert response.status_code == 400
    assert error_of(response)["param"] == next(iter(fields))


async def test_a_wrong_model(house):
    response = await house.ask(model="gpt-4o")
    assert response.status_code == 404
    error = error_of(response)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"].endswith("it serves demo, bfloat16, float32, tight")


async def test_a_body_that_is_no_request(house):
    response = await house.client.post(PATH, content=b"{")
    assert response.status_code == 400
    assert error_of(response)["message"] == "the body is not valid JSON"
    response = await house.ask(temperature=9)
    assert (response.status_code, error_of(response)["param"]) == (400, "temperature")


async def test_a_body_that_is_too_large(house):
    large = b'{"model": "' + b"a" * (9 << 20)

    async def in_pieces():
        for start in range(0, len(large), 1 << 20):
            yield large[start : start + (1 << 20)]

    for content in (large, in_pieces()):
        response = await house.client.post(PATH, content=content)
        assert response.status_code == 413
        assert error_of(response)["code"] == "too_large"
        assert error_of(response)["message"] == "the request body is larger than the limit of 8388608 bytes"
    assert (await house.ask()).status_code == 200


async def test_a_body_that_is_announced_too_large_is_not_waited_for(house):
    reader, writer = await asyncio.open_connection("127.0.0.1", house.running.port)
    writer.write(f"POST {PATH} HTTP/1.1\r\nhost: a\r\ncontent-length: 999999999\r\n\r\n".encode())
    assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 413")
    writer.close()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("POST", "/v2", 404), ("GET", PATH, 405), ("POST", "/health", 405)],
)
async def test_paths_and_methods_that_are_not_there(house, method, path, status):
    response = await house.client.request(method, path)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert error_of(response)["message"].startswith(("there is nothing", "this path does not"))
    assert ("allow" in response.headers) == (status == 405)
    assert "server" not in response.headers
