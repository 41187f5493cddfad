"""Every family over SGLang's gRPC protocol: what it answers right arrives, and all else is refused at the start."""

from __future__ import annotations

import json

import numpy as np
import pytest
from running import gateway, image, picture, text
from test_every_family import FAMILIES

from goldens.tokenizers_of import complete
from pixelgate.errors import ConfigError
from pixelgate.gateway.served import open_model
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.processor import load
from pixelgate.testing.strict_sglang import StrictSglangEngine

SERVED = {"llava_next", "mistral3", "pixtral"}
QWEN = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl"}


def engine_for(folder):
    vocab_size = json.loads((folder / "config.json").read_text()).get("vocab_size", 210_000)
    return StrictSglangEngine(folder, vocab_size=vocab_size, reply_ids=(5, 6))


@pytest.mark.parametrize("family", sorted(SERVED))
async def test_a_family_is_served_with_the_tensors_of_transformers(family, tmp_path):
    folder = complete(family, tmp_path / family)
    large, small = picture(120, 200, 1), picture(40, 64, 2)
    async with engine_for(folder) as engine, gateway(engine.url, folder) as running:
        for pictures in ([large], [small, large], [large, small, small]):
            answer = await running.ask([*map(image, pictures), text("Well?")])
            assert answer.status_code == 200, answer.text
            sent = engine.requests[-1].mm_inputs
            expected = load(folder)(pictures)
            pixels = np.frombuffer(sent.pixel_values.data, np.float32).reshape(sent.pixel_values.shape)
            assert np.array_equal(pixels, expected["pixel_values"])
            sizes = sent.model_specific_tensors["image_sizes"]
            assert np.array_equal(np.frombuffer(sizes.data, np.int64).reshape(sizes.shape), expected["image_sizes"])
            assert answer.json()["usage"]["prompt_tokens"] == len(engine.requests[-1].tokenized.input_ids)
        answer = await running.ask(
            [text("First: "), image(large), text("second: "), image(small), text("?")], stream=True
        )
        assert answer.text.endswith("data: [DONE]\n\n")
        assert (await running.ask("No picture.")).status_code == 200
        assert not engine.requests[-1].HasField("mm_inputs")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - SERVED))
def test_a_family_that_would_be_answered_wrong_is_refused_when_it_is_configured(family, tmp_path):
    folder = complete(family, tmp_path / family)
    for url in ("sglang+grpc://127.0.0.1:1", "dns+sglang+grpc://localhost:1"):
        settings = GatewaySettings(models=(ModelSettings(str(folder), (url,)),))
        with pytest.raises(ConfigError, match="sglang\\+http://") as caught:
            open_model(settings.models[0], settings)
        assert ("M-RoPE" in caught.value.message) == (family in QWEN)


@pytest.mark.parametrize(("bos", "first"), [("engine", 1), ("transformers", 1)])
async def test_prompts_begin_as_sglangs_own(bos, first, tmp_path):
    folder = complete("llava_next", tmp_path / "llava_next")
    async with engine_for(folder) as engine, gateway(engine.url, folder, bos=bos) as running:
        for content in ([image(picture(56, 56)), text("Well?")], "Well?"):
            assert (await running.ask(content)).status_code == 200
            assert engine.requests[-1].tokenized.input_ids[0] == first


def test_engines_that_begin_prompts_differently_are_no_one_model(tmp_path):
    folder = str(complete("llava_next", tmp_path / "llava_next"))
    engines = ("vllm+grpc://127.0.0.1:1", "sglang+grpc://127.0.0.1:2")
    for urls in (engines, tuple(reversed(engines))):
        settings = GatewaySettings(models=(ModelSettings(folder, urls),))
        with pytest.raises(ConfigError, match="begins prompts otherwise"):
            open_model(settings.models[0], settings)
        settings = GatewaySettings(models=(ModelSettings(folder, urls, bos="transformers"),))
        open_model(settings.models[0], settings)
