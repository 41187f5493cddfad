"""What the gateway would send is what the engine itself makes of the same request: ids, spans, every byte of tensor."""

from __future__ import annotations

import base64

import msgspec
import numpy as np
import pytest
from chats import CHATS, DIFFERENT, WITH_MASKS, named
from questions import greedy
from test_answers import every

from pixelgate.engines import vllm_item

# what a vLLM writes although nobody said it; other fields with its own defaults it leaves out
NEUTRAL = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "bad_words": [],
    "output_kind": 2,
    "skip_clone": True,
    "skip_reading_prefix_cache": False,
}


@every()
@pytest.mark.parametrize("title", CHATS)
def test_render(served, title):
    model = served.model
    response = served.gateway.client.post("/v1/chat/completions/render?tensors=1", json=greedy(model, title))
    if served.kind.name == "vllm-grpc" and model in WITH_MASKS and title == DIFFERENT:
        assert (response.status_code, response.json()["error"]["code"]) == (422, "not_carried")
        return
    assert response.status_code == 200, response.text
    ours, theirs = response.json(), served.rendered[title]
    assert ours["token_ids"] == theirs["token_ids"]
    sampling = {**NEUTRAL, **ours["sampling_params"]}
    assert {name: sampling[name] for name in theirs["sampling_params"]} == theirs["sampling_params"]
    if not named(CHATS[title]):
        assert ours["features"] is None
        assert not theirs["features"]
        return
    ours, theirs = ours["features"], theirs["features"]
    spans = [[(span["offset"], span["length"]) for span in f["mm_placeholders"]["image"]] for f in (ours, theirs)]
    assert spans[0] == spans[1]
    items = [f["kwargs_data"]["image"] for f in (ours, theirs)]
    assert len(items[0]) == len(items[1]) == len(named(CHATS[title]))
    for mine, other in zip(*(map(base64.b64decode, each) for each in items), strict=True):
        same_item(mine, other)


def same_item(mine, other):
    layouts = [{n: e["field"] for n, e in msgspec.msgpack.decode(item).items()} for item in (mine, other)]
    assert layouts[0] == layouts[1]
    arrays, expected = vllm_item.unpack(mine), vllm_item.unpack(other)
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        own = arrays[name]
        assert own.dtype == array.dtype
        if own.ndim == 4:  # tiles: beside a picture with more of them, one is filled up with empty ones
            least = min(len(own), len(array))
            assert not np.any(own[least:])
            assert not np.any(array[least:])
            own, array = own[:least], array[:least]
        assert own.shape == array.shape
        assert own.tobytes() == array.tobytes()
