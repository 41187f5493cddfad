"""Record what the gateway and real engines say to each other, for the tests that replay it: ``make recordings``.

One file for each kind of engine and model: a few chats with small pictures of few colours, so that it packs well. It is
not collected unless it is named.
"""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from chats import WITH_MASKS
from kinds import HTTP, KINDS
from PIL import Image
from test_answers import pairs

from pixelgate.engines.connect import remote
from pixelgate.testing.recorder import recorder
from pixelgate.testing.recording import Asked, Recording

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
from running import PATH, gateway

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/gateway/recorded"


def picture(height: int, width: int, *colours: tuple[int, int, int]) -> dict[str, object]:
    """Stripes, as a part of a message."""
    stripes = np.repeat(np.array(colours, np.uint8), -(-width // len(colours)), axis=0)[:width]
    file = io.BytesIO()
    Image.fromarray(np.broadcast_to(stripes, (height, width, 3)).copy()).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


WIDE = picture(64, 96, (250, 20, 20), (20, 20, 250), (240, 240, 240))
TURNED = picture(64, 96, (240, 240, 240), (20, 20, 250), (250, 20, 20))
TALL = picture(120, 40, (0, 160, 80), (250, 220, 0))
GREEDY = {"temperature": 0, "max_tokens": 6}
CHATS: dict[str, tuple[list[object], dict[str, object]]] = {
    "no picture": (["Is there a picture?"], GREEDY),
    "one picture": ([WIDE, "What is it?"], {**GREEDY, "logprobs": True, "top_logprobs": 2}),
    "streamed": (["Look:", TALL], {**GREEDY, "stream": True, "stream_options": {"include_usage": True}}),
    "two of one size": ([WIDE, "or", TURNED], GREEDY),
    "the same twice": ([WIDE, WIDE, "?"], {**GREEDY, "stream": True, "logprobs": True}),
    "two of different size": ([TALL, "or", TURNED], GREEDY),
    "sampled": (
        [TALL, "Well?"],
        {
            "temperature": 1.25,
            "seed": 11,
            "top_p": 0.875,
            "top_k": 40,
            "min_p": 0.0078125,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.25,
            "repetition_penalty": 1.125,
            "max_tokens": 8,
            "min_tokens": 2,
            "n": 2,
            "stop_token_ids": [77],
            "logit_bias": {"5": -3.5},
            "ignore_eos": True,
        },
    ),
    "stopped": (["Say it."], {**GREEDY, "stop": ["a", "e", "i"], "include_stop_str_in_output": True}),
    "constrained": (["Say it."], {**GREEDY, "structured_outputs": {"choice": ["harbour", "ticket"]}}),
}
# where a picture is refused there is nothing to record
RECORDABLE = [(kind, model) for kind, model in pairs(KINDS) if not (kind == HTTP.name and model in WITH_MASKS)]


def body(model: str, content: list[object], fields: dict[str, object]) -> bytes:
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return json.dumps({"model": model, "messages": [{"role": "user", "content": parts}], **fields}).encode()


@pytest.mark.parametrize("served", RECORDABLE, ids=map("-".join, RECORDABLE), indirect=True)
async def test_record(served):
    model, kind, asked = served.model, served.kind, []
    async with recorder(served.engine_url) as between:
        # what the two say through shared memory would not be in their messages
        async with gateway({model: between.url}, served.checkpoints / model, shm="off") as running:
            for title, (content, fields) in CHATS.items():
                request = body(model, content, fields)
                response = await running.client.post(PATH, content=request, timeout=180)
                asked.append(Asked(title, request, response.status_code, response.content))
        if kind.gives_files:  # of which the replaying gateway makes its checkpoint
            engine = remote(between.url)
            await engine.archive(64 << 20)
            await engine.close()
    recording = Recording(kind.scheme, model, tuple(between.exchanges), tuple(asked))
    said = b"".join(b"".join((each.request, *each.replies)) for each in recording.exchanges)
    assert str(ROOT).encode() not in said
    RECORDED.mkdir(exist_ok=True)
    recording.save(RECORDED / f"{kind.name}.{model}.gz")
