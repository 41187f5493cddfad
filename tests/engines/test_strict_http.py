"""The strict engine over HTTP: what only its own protocol shows. What it shares with the other is tested there."""

from __future__ import annotations

import sys
from dataclasses import replace

import aiohttp
import msgspec
import pybase64
import pytest
from engine_requests import FACTS, request

from pixelgate.engines.vllm_http_wire import encode
from pixelgate.testing import strict_engine
from pixelgate.testing.strict_http import StrictHttpEngine

RAW = 3


def body(sent=None, **changes):
    return {**msgspec.json.decode(encode(sent or request("uint8", stream=False), "qwen2_5_vl")), **changes}


def item(number=0, sent=None, **changes):
    """One item of a body with some of its elements changed; None takes one away."""
    text = body(sent)["features"]["kwargs_data"]["image"][number]
    elements = msgspec.msgpack.decode(pybase64.b64decode(text)) | changes
    kept = {name: element for name, element in elements.items() if element is not None}
    return pybase64.b64encode_as_string(msgspec.msgpack.encode(kept))


def with_items(*texts):
    found = body()
    found["features"]["kwargs_data"]["image"] = list(texts)
    return found


def features(**changes):
    found = body()
    found["features"] |= changes
    return found


async def post(engine, sent):
    url = engine.url.removeprefix("vllm+") + "/inference/v1/generate"
    async with aiohttp.ClientSession() as session, session.post(url, data=msgspec.json.encode(sent)) as response:
        return response.status, (await response.json()).get("error", {}).get("message")


PIXELS, GRID, SIZES = "pixel_values", "image_grid_thw", "patches_per_image"
ROWS = bytes(16 * FACTS.layout.pixels[0])
FLAT = ["flat", {"keep_on_cpu": False, "slices": [[[0, 16, None]]], "dim": 0}]
ON_CPU = ["batched", {"keep_on_cpu": True}]


def element(dtype, shape, data, field):
    return {"data": [dtype, shape, msgspec.msgpack.Ext(RAW, data)], "field": field}


SECOND = item(1)
NUMBER = (1).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (body(messages=[]), "messages is not expected"),
        (body(token_ids="x"), "no list of token ids"),
        (body(token_ids=[-1]), "no list of token ids"),
        (body(request(stream=False), token_ids=[]), "there are no input_ids"),
        (body(request_id=""), "request_id is empty"),
        (body(sampling_params=None), "sampling_params is missing"),
        (body(sampling_params={"max_tokens": 3}), "temperature is unset"),
        (body(sampling_params={"temperature": 0, "best_of": 3}), "best_of is not expected"),
        (body(sampling_params={"temperature": 0, "max_tokens": "x"}), "max_tokens is not expected, or has no value"),
        (body(sampling_params={"temperature": 0, "stop": ["x"], "detokenize": False}), "without detokenize"),
        (body(features=3), "features must be"),
        (features(mm_metadata={}), "features must be"),
        (features(mm_hashes={"video": []}), "not that of images alone"),
        (features(mm_hashes={"image": ["0" * 64]}), "differ in number"),
        (features(mm_hashes={"image": ["x", "y"]}), "not 64 lowercase hex digits"),
        (features(mm_placeholders={"image": [{"offset": 1, "length": 4}, {"offset": 8, "length": 3}]}), "no mask"),
        (features(mm_placeholders={"image": [{"offset": 2, "length": 3}, {"offset": 8, "length": 3}]}), "4 embeddings"),
        (with_items("x", SECOND), "no base64 of a msgpack map"),
        (with_items(3, SECOND), "no base64 of a msgpack map"),
        (with_items(pybase64.b64encode_as_string(b"\x01"), SECOND), "no base64 of a msgpack map"),
        (with_items(item(pixel_values={"data": 3}), SECOND), "no base64 of a msgpack map"),
        (with_items(item(patches_per_image=element("int64", [1], NUMBER, ON_CPU)), SECOND), "no place in an item"),
        (with_items(item(pixel_values=element("int4", [16, 24], ROWS, FLAT)), SECOND), "dtype 'int4'"),
        (with_items(item(pixel_values=element("uint8", [16, 25], ROWS, FLAT)), SECOND), "where its shape needs 400"),
        (with_items(item(pixel_values={"data": ["uint8", [16, 24], ROWS], "field": FLAT}), SECOND), "not raw bytes"),
        (with_items(item(image_grid_thw=element("int64", [3], NUMBER * 3, FLAT)), SECOND), "image_grid_thw is flat"),
        (with_items(item(image_grid_thw=element("int64", [1], NUMBER, ON_CPU)), SECOND), "differs in shape"),
        (with_items(item(image_grid_thw=None), SECOND), "items are not alike"),
        (with_items(item(pixel_values=element("float32", [4, 24], ROWS, ["flat", {"keep_on_cpu": False,
            "slices": [[[0, 4, None]]], "dim": 0}])), item(1, image_grid_thw=None)), "items are not alike"),
    ],
)  # fmt: skip
async def test_what_would_break_a_real_engine_is_refused(sent, words):
    async with StrictHttpEngine(FACTS) as engine:
        status, message = await post(engine, sent)
        assert status == 400
        assert words in message
        assert (await post(engine, body()))[0] == 200


async def test_a_hash_stands_for_one_picture():
    async with StrictHttpEngine(FACTS) as engine:
        assert (await post(engine, body()))[0] == 200
        other = body(request("uint8", grids=((4, 4), (2, 2)), stream=False))
        other["features"]["mm_hashes"]["image"][1] = body()["features"]["mm_hashes"]["image"][1]
        status, message = await post(engine, other)
    assert (status, "belonged to another picture" in message) == (400, True)


async def test_a_null_that_is_not_known_is_an_internal_error():
    async with StrictHttpEngine(FACTS) as engine:
        assert await post(engine, with_items(None, SECOND)) == (500, "Internal server error")
        assert (await post(engine, body()))[0] == 200
        assert (await post(engine, with_items(None, None)))[0] == 200
        assert engine.nulls == 3


async def test_another_model_is_not_found():
    async with StrictHttpEngine(FACTS) as engine:
        assert (await post(engine, body(model="x")))[0] == 404


async def test_one_request_id_at_a_time():
    async with StrictHttpEngine(FACTS, delay=0.1) as engine:
        engine.running["r-1"] = None
        status, message = await post(engine, body())
        assert (status, "is in use" in message) == (400, True)


def test_the_command_says_where_it_cannot_listen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["strict_http", "--checkpoint", str(tmp_path)])
    assert strict_engine.main(StrictHttpEngine, "strict_http") == 1
    assert "strict_http: " in capsys.readouterr().err


async def test_it_waits_until_it_is_stopped():
    engine = await StrictHttpEngine(replace(FACTS, max_images=1)).__aenter__()
    await engine.stop()
    await engine.wait()
