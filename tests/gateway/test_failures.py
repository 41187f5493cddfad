"""What goes wrong behind the gateway, and what a client is told of it."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil

import pytest
from running import ENDLESS, PATH, error_of, events, gateway, image, picture, strict_engine, tasks, text, until

from pixelgate.demo import CHECKPOINT
from pixelgate.engines.engine import Span
from pixelgate.errors import CheckpointError, ConfigError
from pixelgate.gateway import chat, waiting
from pixelgate.gateway.app import create_app
from pixelgate.gateway.served import open_model
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.prompt.tokens import Detokenizer

HIDDEN = "the gateway failed on this request; its log has the reason"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_down(stream):
    async with strict_engine() as engine, gateway(engine.url) as running:
        assert (await running.ask()).status_code == 200
        await engine.stop()
        response = await running.ask(stream=stream)
        assert response.status_code == 503
        error = error_of(response)
        assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
        assert "127.0.0.1" not in response.text
        health = await running.client.get("/health")
        assert health.status_code == 503
        assert health.json() == {
            "status": "unavailable",
            "models": {"demo": False},
            "troubles": {"demo": ["The engine cannot be reached."]},
        }
        assert (await running.client.get("/v1/models")).status_code == 200
        assert await running.metric("pixelgate_requests_total", path=PATH, status="503") == 1
        assert await running.metric("pixelgate_requests_in_flight") == 0


async def test_an_engine_that_takes_no_requests_now():
    async with strict_engine() as engine, gateway(engine.url) as running:
        await engine.set_serving(False)
        assert (await running.client.get("/health")).status_code == 503
        assert (await running.ask()).status_code == 503
        await engine.set_serving(True)

        async def healthy():
            return (await running.client.get("/health")).status_code == 200

        await until(healthy)
        assert (await running.ask()).status_code == 200


async def test_an_engine_that_dies_in_mid_stream():
    async with strict_engine(delay=0.05, reply=ENDLESS) as engine, gateway(engine.url) as running:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        async with running.client.stream("POST", PATH, json=body) as response:
            assert response.status_code == 200
            received = ""
            async for piece in response.aiter_text():
                if not received:
                    await engine.stop()
                received += piece
        *_, error = events(received)
        assert "[DONE]" not in received
        assert received.count("event: error\n") == 1
        assert error["error"]["code"] == "engine_unavailable"
        assert "127.0.0.1" not in received
        assert await running.metric("pixelgate_requests_total", path=PATH, status="503") == 1
        assert await running.metric("pixelgate_requests_total", path=PATH, status="200") == 0
        assert await running.metric("pixelgate_requests_in_flight") == 0


async def test_an_engine_that_dies_before_the_answer_is_complete():
    async with strict_engine(delay=0.05, reply=ENDLESS) as engine, gateway(engine.url) as running:
        asked = asyncio.create_task(running.ask())
        await until(lambda: engine.running)
        await engine.stop()
        response = await asked
        assert response.status_code == 503
        assert error_of(response)["code"] == "engine_unavailable"


async def test_a_private_address_is_not_fetched_from_unless_allowed():
    connected = asyncio.Event()
    server = await asyncio.start_server(lambda reader, writer: connected.set(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, strict_engine() as engine, gateway(engine.url) as running:
        for host in ("127.0.0.1", "localhost", "[::1]"):
            response = await running.ask([text("a"), image(f"http://{host}:{port}/a.png")])
            assert response.status_code == 400
            assert error_of(response) == {
                "message": "the picture's host is not allowed",
                "type": "invalid_request_error",
                "param": "messages[0].content[1].image_url",
                "code": "image_fetch_failed",
            }
        assert not connected.is_set()
        assert not engine.requests


def fails(*args, **kwargs):
    raise ValueError("secret: /etc/gateway")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_mistake_of_the_gateway_stays_in_its_log(monkeypatch, caplog, stream):
    async with strict_engine() as engine, gateway(engine.url) as running:
        monkeypatch.setattr(chat, "render", fails)
        response = await running.ask([image(picture(56, 56))], stream=stream, headers={"x-request-id": "r-7"})
        assert response.status_code == 500
        assert error_of(response) == {
            "message": HIDDEN,
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert response.headers["x-request-id"] == "r-7"
        [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert record.getMessage() == "an unforeseen failure"
        assert "secret: /etc/gateway" in caplog.text
        assert await running.metric("pixelgate_requests_total", path=PATH, status="500") == 1
        assert await running.metric("pixelgate_requests_in_flight") == 0
        assert not engine.requests


async def test_a_mistake_in_mid_stream(monkeypatch, caplog):
    async with strict_engine(delay=0.01, reply=ENDLESS) as engine, gateway(engine.url) as running:
        push, calls = Detokenizer.push, []

        def fails_later(self, ids):
            calls.append(ids)
            return push(self, ids) if len(calls) < 4 else fails()

        monkeypatch.setattr(Detokenizer, "push", fails_later)
        response = await running.ask(stream=True)
        assert response.status_code == 200
        *_, error = events(response.text)
        assert error["error"]["message"] == HIDDEN
        assert "[DONE]" not in response.text
        assert "secret" not in response.text
        assert "secret" in caplog.text
        await until(lambda: engine.cancelled)
        assert await running.metric("pixelgate_requests_total", path=PATH, status="500") == 1
        assert await running.metric("pixelgate_requests_in_flight") == 0


async def test_a_request_that_would_break_an_engine_is_never_sent(monkeypatch, caplog):
    def shifted(offset, length):
        return Span(offset + 1, length)

    async with strict_engine() as engine, gateway(engine.url) as running:
        monkeypatch.setattr(chat, "Span", shifted)
        response = await running.ask([image(picture(56, 56))])
        assert response.status_code == 500
        assert error_of(response)["message"] == HIDDEN
        assert "a span embeds 3 tokens where its plan says 4" in caplog.text
        assert not engine.requests


async def test_one_bad_picture_ends_the_work_on_the_others(monkeypatch):
    async with strict_engine() as engine, gateway(engine.url) as running:
        started = tasks()
        contents = [image(picture(56, 56, seed)) for seed in range(6)]
        contents[3] = image(picture(56, 56)[:-700])
        response = await running.ask(contents)
        assert response.status_code == 400
        assert error_of(response)["param"] == "messages[0].content[3].image_url"
        await until(lambda: tasks() <= started)
        assert not engine.requests


def opened(checkpoint, *urls, wait=0.0):
    settings = GatewaySettings(models=(ModelSettings(str(checkpoint), urls, "demo"),), engine_wait=wait)
    return create_app(settings, [open_model(model, settings) for model in settings.models])


async def refused_at_start(app):
    with pytest.raises(ConfigError) as caught:
        async with app.router.lifespan_context(app):
            pass
    return caught.value.message


async def test_no_engine_answers(caplog):
    before = tasks()
    app = opened(CHECKPOINT, "vllm+grpc://127.0.0.1:1", wait=0.1)
    assert await refused_at_start(app) == "no engine of model 'demo' answered within 0.1 seconds"
    assert "vllm+grpc://127.0.0.1:1 cannot be used" in caplog.text
    await until(lambda: tasks() <= before)


async def test_an_engine_that_comes_late_is_waited_for(monkeypatch):
    monkeypatch.setattr(waiting, "_RETRY_SECONDS", 0.05)
    async with strict_engine() as engine:
        await engine.set_serving(False)
        app = opened(CHECKPOINT, engine.url, wait=10)
        asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(engine.set_serving(True)))
        async with app.router.lifespan_context(app):
            pass


async def test_an_engine_of_another_model():
    async with strict_engine(model_type="qwen2_vl") as engine:
        message = await refused_at_start(opened(CHECKPOINT, engine.url))
    assert message == (
        f"the engines of model 'demo' serve model_type 'qwen2_vl', but the checkpoint {CHECKPOINT} is 'qwen2_5_vl'"
    )


async def test_an_engine_of_another_vocabulary():
    async with strict_engine(vocab_size=200_000) as engine:
        message = await refused_at_start(opened(CHECKPOINT, engine.url))
    assert "serve vocab_size 200000, but the checkpoint" in message


async def test_engines_that_want_different_pixels():
    async with strict_engine() as one, strict_engine(device_normalize=False) as other:
        message = await refused_at_start(opened(CHECKPOINT, one.url, other.url))
    assert message == "The engines of one model differ: one wants bfloat16 pixels, another uint8."


async def test_an_engine_that_comes_back_with_other_pixels_is_served_on():
    content = [image(picture(56, 56))]
    async with strict_engine() as engine, gateway(engine.url) as running:
        assert (await running.ask(content)).status_code == 200
        await engine.stop()
        assert (await running.client.get("/health")).status_code == 503
        port = int(engine.url.rpartition(":")[2])
        async with strict_engine(device_normalize=False, port=port) as other:

            async def served():
                return (await running.ask(content)).status_code == 200

            await until(served)
            assert other.requests[-1].mm_inputs.pixel_values.dtype == "bfloat16"
            assert {message.mm_inputs.pixel_values.dtype for message in other.requests} == {"bfloat16"}


async def test_an_engine_that_comes_back_with_another_model_is_left_alone(caplog):
    async with strict_engine() as engine, gateway(engine.url) as running:
        assert (await running.ask()).status_code == 200
        await engine.stop()
        port = int(engine.url.rpartition(":")[2])
        async with strict_engine(model_type="qwen2_vl", port=port) as other:

            async def noticed():
                assert (await running.ask()).status_code == 503
                return "came back with another model: model_type is qwen2_vl, not qwen2_5_vl" in caplog.text

            await until(noticed)
            assert not other.requests


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the demo checkpoint to spoil."""
    return shutil.copytree(CHECKPOINT, tmp_path / "checkpoint")


def edit(path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_checkpoint_without_a_template(checkpoint):
    (checkpoint / "chat_template.jinja").unlink()
    with pytest.raises(CheckpointError, match="has no chat template"):
        opened(checkpoint, "vllm+grpc://a:1")


def test_a_checkpoint_without_a_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        opened(checkpoint, "vllm+grpc://a:1")


def test_a_placeholder_with_two_ids(checkpoint):
    edit(checkpoint / "config.json", image_token_id=151656)
    with pytest.raises(CheckpointError, match=r"'<\|image_pad\|>' the id 151655, but config.json says 151656"):
        opened(checkpoint, "vllm+grpc://a:1")


def test_a_placeholder_that_is_no_special_token(checkpoint):
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] and token["content"] != "<|image_pad|>"
    (checkpoint / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match=r"has no special token '<\|image_pad\|>'"):
        opened(checkpoint, "vllm+grpc://a:1")


def test_an_engine_address_that_is_none(checkpoint):
    with pytest.raises(ConfigError, match="is not an engine address"):
        opened(checkpoint, "http//a")


def test_special_tokens_of_the_template_in_either_form(checkpoint):
    edit(checkpoint / "tokenizer_config.json", bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>")
    (checkpoint / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}{{ unk_token is defined }}"
    )
    settings = GatewaySettings(models=(ModelSettings(str(checkpoint), ("vllm+grpc://a:1",)),))
    model = open_model(settings.models[0], settings)
    assert model.template.render([{"role": "user", "content": "x"}]) == "<|im_start|>x<|im_end|>False"
    assert model.name == "checkpoint"
