"""POST /v1/chat/completions/render: the request as it would be sent, and nothing sent."""

from __future__ import annotations

import asyncio
import base64

import pytest
from running import error_of, gateway, image, picture, strict_engine, text

from pixelgate.budget import Budget
from pixelgate.demo import CHECKPOINT
from pixelgate.engines import vllm_item
from pixelgate.gateway import services
from pixelgate.parity import against_engine
from pixelgate.processor import load

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATH = "/v1/chat/completions/render"


async def render(house, content, *, model="demo", query="", **fields):
    body = {"model": model, "messages": [{"role": "user", "content": content}], **fields}
    return await house.client.post(PATH + query, json=body)


async def test_it_is_what_the_engine_gets(house):
    pictures = [picture(224, 280), picture(61, 333)]
    content = [image(pictures[0]), text("and"), image(pictures[1])]
    fields = {"temperature": 0.5, "max_tokens": 3, "stop": ["x"], "stream": True}
    before = len(house.engines["demo"].requests)
    response = await render(house, content, **fields)
    assert response.status_code == 200
    assert len(house.engines["demo"].requests) == before
    rendered = response.json()
    await house.ask(content, **fields)
    sent = house.received()
    assert rendered["token_ids"] == list(sent.tokenized.input_ids)
    features = rendered["features"]
    assert set(features) == {"mm_hashes", "mm_placeholders"}
    assert features["mm_hashes"] == {"image": list(sent.mm_inputs.mm_hashes)}
    spans = features["mm_placeholders"]["image"]
    assert [(span["offset"], span["length"]) for span in spans] == [
        (span.offset, span.length) for span in sent.mm_inputs.mm_placeholders
    ]
    assert [span["embedded"] for span in spans] == [80, 24]
    assert rendered["model"] == "demo"
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["stream"] is True
    assert rendered["sampling_params"]["temperature"] == 0.5
    assert (rendered["sampling_params"]["max_tokens"], rendered["sampling_params"]["stop"]) == (3, ["x"])
    assert "min_tokens" not in rendered["sampling_params"]
    pixels, grid, rows = rendered["tensors"]
    assert pixels == {
        "name": "pixel_values",
        "dtype": "uint8",
        "shape": list(sent.mm_inputs.pixel_values.shape),
        "field": "flat",
        "sizes": "patches_per_image",
        "keep_on_cpu": False,
    }
    assert (grid["name"], grid["dtype"], grid["shape"], grid["keep_on_cpu"]) == (
        "image_grid_thw",
        "int64",
        [2, 3],
        True,
    )
    assert rows["name"] == "patches_per_image"


async def test_a_text_alone(house):
    rendered = (await render(house, "Hello", query="?tensors=1")).json()
    assert (rendered["features"], rendered["tensors"]) == (None, [])
    assert len(rendered["token_ids"]) > 5


@pytest.mark.parametrize(("model", "dtype"), [("demo", "uint8"), ("bfloat16", "bfloat16"), ("float32", "float32")])
async def test_the_tensors_as_vllm_writes_them(house, processor, model, dtype):
    pictures = [picture(224, 280), picture(61, 333)]
    rendered = (await render(house, [*map(image, pictures)], model=model, query="?tensors=1")).json()
    items = rendered["features"]["kwargs_data"]["image"]
    assert len(items) == 2
    for data, item in zip(pictures, items, strict=True):
        expected = processor(data, dtype=dtype)
        arrays = vllm_item.unpack(base64.b64decode(item))
        assert set(arrays) == {"pixel_values", "image_grid_thw"}
        assert arrays["pixel_values"].dtype.name == dtype
        assert arrays["pixel_values"].tobytes() == expected["pixel_values"].tobytes()
        assert arrays["image_grid_thw"].tolist() == expected["image_grid_thw"][0].tolist()


async def test_parity_asks_a_gateway_as_it_asks_an_engine(house, tmp_path):
    (tmp_path / "a.png").write_bytes(picture(224, 280))
    url = str(house.client.base_url)
    verdicts = await asyncio.to_thread(asyncio.run, against_engine(load(CHECKPOINT), [str(tmp_path / "a.png")], url))
    assert sorted((verdict.name, verdict.equal) for verdict in verdicts) == [
        ("image_grid_thw", True),
        ("pixel_values", True),
        ("tokens", True),
    ]


@pytest.mark.parametrize(
    ("content", "fields", "status", "param"),
    [
        ([image(b"no picture")], {}, 400, "messages[0].content[0].image_url"),
        ([image(picture(56, 56))] * 5, {}, 400, "messages"),
        ([image(picture(1100, 1100, form="JPEG"))] * 4, {}, 413, "messages"),
        ([image(picture(402, 2))], {}, 422, "messages[0].content[0].image_url"),
        ("a", {"model": "other"}, 404, "model"),
        ("a " * 300, {"model": "tight"}, 400, "messages"),
        ("a", {"temperature": 9}, 400, "temperature"),
        ("a", {"query": "?tensors=yes"}, 400, "tensors"),
    ],
)
async def test_refusals_are_those_of_a_chat(house, content, fields, status, param):
    response = await render(house, content, **fields)
    assert response.status_code == status
    assert error_of(response)["param"] == param


async def test_memory_is_given_back_and_the_answer_counts(monkeypatch, tensors_made):
    budgets = {}

    def budget(unit, *rest):
        budgets[unit] = Budget(unit, *rest)
        return budgets[unit]

    monkeypatch.setattr(services, "Budget", budget)
    data = picture(300, 300)
    async with (
        strict_engine() as engine,
        gateway(engine.url, max_bytes_in_flight=1_000_000, tensor_cache_bytes=0) as running,
    ):
        response = await render(running, [image(data)])
        assert response.status_code == 200
        assert [made() for made in tensors_made] == [None]
        assert {budget.used for budget in budgets.values()} == {0}
        response = await render(running, [image(data)], query="?tensors=1")
        assert response.status_code == 413
        assert "1000000 bytes" in error_of(response)["message"]
        assert error_of(response)["param"] == "messages"
        assert {budget.used for budget in budgets.values()} == {0}
        assert not engine.requests
        assert await running.metric("pixelgate_requests_total", path=PATH, status="200") == 1
        assert await running.metric("pixelgate_requests_total", path=PATH, status="413") == 1
