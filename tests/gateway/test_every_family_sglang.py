"""Every family over SGLang's gRPC protocol: what it answers right arrives, and all else is refused at the start."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from running import error_of, gateway, image, picture, text
from test_every_family import FAMILIES

from goldens.tokenizers_of import complete
from pixelgate.beside import sglang_engine
from pixelgate.errors import ConfigError
from pixelgate.gateway import received
from pixelgate.gateway.passthrough import open_both
from pixelgate.gateway.served import open_model
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.processor import load
from pixelgate.testing.sglang_server import SglangServer
from pixelgate.testing.strict_sglang import StrictSglangEngine
from sglang_stand_in import StandIn, array

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


async def test_what_the_protocol_has_no_field_for_goes_to_sglangs_http(tmp_path):
    folder = complete("llava_next", tmp_path / "llava_next")
    content = [image(picture(56, 56)), text("Well?")]
    async with engine_for(folder) as engine, SglangServer(reply="theirs") as server:
        async with gateway({"demo": (engine.url, server.url)}, folder) as running:
            answer = await running.ask(content, seed=7)
            assert answer.json()["choices"][0]["message"]["content"] == "theirs "
            assert answer.headers["x-pixelgate-preprocessing"] == "engine"
            assert server.requests[0]["seed"] == 7
            answer = await running.ask(content)
            assert answer.status_code == 200
            assert "x-pixelgate-preprocessing" not in answer.headers
            assert len(engine.requests) == 1
        async with gateway(engine.url, folder) as running:
            answer = await running.ask(content, seed=7)
            assert answer.status_code == 422
            assert (error_of(answer)["code"], error_of(answer)["param"]) == ("not_carried", "seed")


async def test_more_pixels_than_the_engine_takes_are_refused_before_one_is_decoded(tmp_path, monkeypatch):
    folder = complete("pixtral", tmp_path / "pixtral")
    monkeypatch.setattr("pixelgate.engines.sglang_replies.MAX_PIXEL_BYTES", 100_000)
    async with engine_for(folder) as engine, gateway(engine.url, folder) as running:
        answer = await running.ask([image(picture(120, 200)), text("?")])
        assert answer.status_code == 413
        assert "at most 100000 are allowed" in error_of(answer)["message"]
        assert await running.metric("pixelgate_images_total") == 0
        assert not engine.requests


@pytest.mark.parametrize("family", sorted(QWEN))
async def test_sglangs_http_serves_what_its_grpc_does_not(family, tmp_path):
    folder = complete(family, tmp_path / family)
    async with SglangServer(model_type=family) as server, gateway(server.url, folder) as running:
        answer = await running.ask([image(picture(56, 56)), text("Well?")])
        assert answer.status_code == 200
        assert server.pictures == [picture(56, 56)]


@pytest.mark.parametrize("family", sorted(QWEN))
async def test_a_server_beside_sglangs_engine_gets_the_tensors_of_transformers(family, tmp_path):
    folder, stand_in = complete(family, tmp_path / family), StandIn(model_type=family)
    pictures = [picture(120, 200, 1), picture(56, 84, 2)]
    async with (
        sglang_engine.serving(stand_in, array, "127.0.0.1:0") as (_, port),
        gateway(f"sglang+engine://127.0.0.1:{port}", folder) as running,
    ):
        answer = await running.ask([*map(image, pictures), text("Well?")])
        assert answer.status_code == 200, answer.text
    (item,) = stand_in.calls[0]["image_data"]
    expected = load(folder)(pictures)
    for name in ("pixel_values", "image_grid_thw"):
        assert np.array_equal(item[name], expected[name])


async def test_sglangs_http_with_another_model_than_the_checkpoint(tmp_path):
    folder = complete("qwen2_vl", tmp_path / "qwen2_vl")
    async with SglangServer(model_type="qwen3_vl") as server:
        model = ModelSettings(str(folder), (server.url,), "m")
        (opened,) = open_both(model, GatewaySettings(models=(model,)))
        with pytest.raises(ConfigError, match="serve model_type 'qwen3_vl', but the checkpoint"):
            await opened.connect(1.0)
        await opened.fleet.close()


async def test_an_sglang_gives_its_own_files(tmp_path):
    """Outside of the loop that runs the engine, as the command line asks."""
    folder = complete("llava_next", tmp_path / "llava_next")
    async with engine_for(folder) as engine:
        model = ModelSettings("", (engine.url,))

        def ask():
            with received.complete(model, 5.0) as complete_:
                return complete_.name, open_both(complete_, GatewaySettings(models=(complete_,)))

        name, (opened,) = await asyncio.to_thread(ask)
    assert name == "llava_next"
    assert opened.processor.checkpoint.model_type == "llava_next"


async def test_sglangs_engines_in_a_file_need_to_be_told_how_prompts_begin(tmp_path):
    folder = complete("llava_next", tmp_path / "llava_next")
    async with engine_for(folder) as engine:
        (tmp_path / "engines").write_text(engine.url)
        entry = (f"file:{tmp_path / 'engines'}",)
        model = ModelSettings(str(folder), entry, "m")
        opened = open_model(model, GatewaySettings(models=(model,)))
        with pytest.raises(ConfigError, match="begins prompts otherwise"):
            await opened.connect(1.0)
        async with gateway([ModelSettings(str(folder), entry, "demo", bos="transformers")]) as running:
            assert (await running.ask("Hello")).status_code == 200
