"""A model without a checkpoint: the files come from the engine, over its own protocol."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from running import PATH, image, picture, strict_engine
from test_serve import process

from pixelgate.demo import CHECKPOINT
from pixelgate.engines.vllm_grpc import VllmGrpcEngine
from pixelgate.errors import CheckpointError, ConfigError, PixelgateError
from pixelgate.gateway import received, serve, waiting
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.processor import load
from pixelgate.testing.openai_server import OpenAIServer
from pixelgate.testing.strict_engine import StrictEngine


def free_url():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"vllm+grpc://127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def altered_engine(tmp_path, *absent, name="checkpoint", **texts):
    """An engine that gives other files than it began with."""
    folder = tmp_path / name
    shutil.copytree(CHECKPOINT, folder)
    async with StrictEngine(folder, device_normalize=True) as engine:
        for file in absent:
            (folder / file).unlink()
        for file, text in texts.items():
            (folder / f"{file}.json").write_text(text)
        yield engine


async def opened(*engines, wait=5.0, **settings):
    """Complete a model's settings as `serve` does, outside of the loop that runs the engines."""

    def enter():
        with received.complete(ModelSettings("", engines, **settings), wait) as model:
            return model, {file.name: file.read_bytes() for file in Path(model.checkpoint).iterdir()}

    return await asyncio.to_thread(enter)


async def refusal(*engines, kind=ConfigError, **settings):
    with pytest.raises(PixelgateError) as caught:
        await opened(*engines, **settings)
    assert type(caught.value) is kind
    return caught.value.message


async def test_a_gateway_with_nothing_but_an_engine(tmp_path):
    async with (
        strict_engine() as engine,
        process(engine.url, checkpoint=(), TMPDIR=str(tmp_path)) as (_, port, log),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        assert list(tmp_path.iterdir()) == [], log  # nothing is left of the files
        assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["checkpoint"]
        content = [image(picture(80, 120)), {"type": "text", "text": "What is it?"}]
        body = {"model": "checkpoint", "messages": [{"role": "user", "content": content}]}
        response = await client.post(PATH, json=body)
        assert response.status_code == 200, response.text
        sent = engine.requests[-1].mm_inputs.pixel_values.inline
    expected = load(CHECKPOINT)(picture(80, 120), dtype="uint8")["pixel_values"]
    assert sent == expected.tobytes()


async def test_the_name_of_the_operator_wins():
    async with strict_engine() as engine:
        model, _ = await opened(engine.url, name="mine")
        assert model.name == "mine"
        model, files = await opened(engine.url)
        assert model.name == "checkpoint"
    assert files["tokenizer.json"] == (CHECKPOINT / "tokenizer.json").read_bytes()


async def test_the_files_are_private_and_go_away():
    async with strict_engine() as engine:
        seen = []

        def enter():
            with received.complete(ModelSettings("", (engine.url,)), 5.0) as model:
                seen.append(Path(model.checkpoint))
                return stat.S_IMODE(seen[0].stat().st_mode)

        assert await asyncio.to_thread(enter) == 0o700
        assert not seen[0].exists()


async def test_a_model_with_a_checkpoint_asks_nobody():
    model = ModelSettings(str(CHECKPOINT), (free_url(),))
    with received.complete(model, 0.0) as same:
        assert same is model


async def test_the_first_engine_that_is_up_is_asked_and_waited_for(monkeypatch):
    monkeypatch.setattr(waiting, "_RETRY_SECONDS", 0.05)
    async with strict_engine() as engine:
        model, _ = await opened(free_url(), engine.url)
        assert model.engines[1] == engine.url
        later = asyncio.create_task(opened(url := free_url()))
        await asyncio.sleep(0.3)
        assert not later.done()
        async with strict_engine(port=int(url.rpartition(":")[2])):
            assert (await later)[0].name == "checkpoint"


async def test_nobody_answers():
    url = free_url()
    assert await refusal(url, wait=0.2) == f"no engine at {url} answered within 0.2 seconds"


async def test_an_archive_without_the_processor(tmp_path):
    async with altered_engine(tmp_path, "preprocessor_config.json") as engine:
        assert await refusal(engine.url, kind=CheckpointError) == (
            f"{engine.url}: its archive lacks preprocessor_config.json; give CHECKPOINT, a directory or hub id"
        )


async def test_an_engine_that_gives_no_files():
    async with strict_engine() as other, StrictEngine(other.facts) as engine:
        message = await refusal(engine.url)
    assert message.startswith(f"{engine.url} does not give the files of its model: The engine failed. An engine can")
    assert message.endswith("give CHECKPOINT, a directory or hub id")


async def test_an_engine_that_goes_away_meanwhile(monkeypatch):
    async with strict_engine() as engine:

        async def gone(self, max_bytes):
            await self.close()
            return await archive(VllmGrpcEngine(free_url()), max_bytes)

        archive = VllmGrpcEngine.archive
        monkeypatch.setattr(VllmGrpcEngine, "archive", gone)
        assert "answered within 0.2 seconds" in await refusal(engine.url, wait=0.2)


async def test_an_engine_without_a_name(monkeypatch):
    describe = VllmGrpcEngine.describe

    async def nameless(self):
        return replace(await describe(self), model_name="")

    monkeypatch.setattr(VllmGrpcEngine, "describe", nameless)
    async with strict_engine() as engine:
        assert await refusal(engine.url) == (
            f"{engine.url} does not say what its model is called: give it a name (--name)"
        )
        assert (await opened(engine.url, name="mine"))[0].name == "mine"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "local:reader",
            "local:reader has no files of its own, as vllm+grpc:// and sglang+grpc:// engines have: give CHECKPOINT",
        ),
        ("http://x", "'http://x' is not an engine address"),
        ("vllm+grpc://x", "'vllm+grpc://x' is not an engine address"),
    ],
)
async def test_what_cannot_be_asked(url, message):
    assert (await refusal(url)).startswith(message)
    assert (await refusal("vllm+grpc://127.0.0.1:1", url)).startswith(message)


async def test_what_cannot_be_opened_is_told_of_the_engine(tmp_path):
    async with altered_engine(tmp_path, "chat_template.jinja") as engine:
        settings = GatewaySettings((ModelSettings("", (engine.url,)),), port=0)
        with pytest.raises(CheckpointError) as caught:
            await asyncio.to_thread(serve._open_models, settings)
    assert caught.value.message.startswith(f"{engine.url}: its archive has no chat template")
    async with altered_engine(tmp_path, name="other", config="{") as engine:
        settings = GatewaySettings((ModelSettings("", (engine.url,)),), port=0)
        with pytest.raises(CheckpointError) as caught:
            await asyncio.to_thread(serve._open_models, settings)
    assert caught.value.message.startswith(f"{engine.url}: its archive/config.json is not valid JSON")


async def test_two_models_of_one_name_are_noticed_when_it_is_known():
    async with strict_engine() as engine:
        models = [ModelSettings("", (engine.url,), name) for name in ("", "a", "")]
        settings = GatewaySettings(tuple(models), port=0)
        with pytest.raises(ConfigError, match="two models have the same name: checkpoint, a, checkpoint"):
            await asyncio.to_thread(serve._open_models, settings)


@pytest.mark.parametrize("name", ["", "ours"])
async def test_a_model_of_engines_that_prepare_pictures_needs_no_files(name):
    def enter(url):
        with received.complete(ModelSettings("", (url,), name), 5.0) as model:
            return model

    async with OpenAIServer(("theirs",)) as server:
        model = await asyncio.to_thread(enter, server.url)
    assert (model.checkpoint, model.name) == ("", name or "theirs")


async def test_of_both_kinds_of_engines_those_with_files_are_asked(tmp_path):
    async with OpenAIServer(("theirs",)) as server, altered_engine(tmp_path) as engine:
        model, files = await opened(server.url, engine.url)
    assert model.name == "checkpoint"
    assert "config.json" in files
