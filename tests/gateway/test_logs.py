"""What the log says, and what it never says."""

from __future__ import annotations

import hashlib
import json
import logging
import os

import pytest
from running import PATH, gateway, image, picture, strict_engine, text

from pixelgate.gateway import chat, logs
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

MODELS = (ModelSettings("x", ("local:reader",)),)


def record(message="words %d", *arguments, level=logging.WARNING, **extra):
    made = logging.LogRecord("pixelgate.test", level, __file__, 1, message, arguments or (1,), None)
    vars(made).update(extra)
    return made


@pytest.fixture
def within():
    token = logs.REQUEST_ID.set("abc-1")
    yield
    logs.REQUEST_ID.reset(token)


def test_a_line_of_text():
    line = logs.TextFormatter().format(record())
    assert line.endswith(f" WARNING {os.getpid()} pixelgate.test: words 1")


def test_a_line_of_text_has_request_and_fields(within):
    line = logs.TextFormatter().format(record(fields={"status": 200, "model": "m"}))
    assert line.endswith(f" WARNING {os.getpid()} pixelgate.test: abc-1: words 1 status=200 model=m")


def test_a_line_of_json(within):
    found = json.loads(logs.JsonFormatter().format(record(fields={"status": 200})))
    assert found.pop("time").endswith("+00:00")
    assert found == {
        "level": "WARNING",
        "process": os.getpid(),
        "logger": "pixelgate.test",
        "message": "words 1",
        "request_id": "abc-1",
        "status": 200,
    }


def test_an_exception_stays_on_one_line_of_json():
    try:
        raise KeyError("two\nlines")
    except KeyError as failure:
        line = logs.JsonFormatter().format(record(exc_info=(type(failure), failure, failure.__traceback__)))
    assert "\n" not in line
    assert "KeyError" in json.loads(line)["exception"]
    assert "request_id" not in json.loads(line)


@pytest.mark.parametrize(("form", "kind"), [("text", logs.TextFormatter), ("json", logs.JsonFormatter)])
def test_the_settings_decide(monkeypatch, form, kind):
    made = {}
    monkeypatch.setattr(logging, "basicConfig", lambda **options: made.update(options))
    logs.configure(GatewaySettings(models=MODELS, log_format=form, log_level="warning"))
    assert made["level"] == "WARNING"
    assert type(made["handlers"][0].formatter) is kind


async def test_an_answered_request_is_a_line_without_what_it_said(caplog):
    caplog.set_level(logging.INFO)
    async with (
        strict_engine() as engine,
        gateway(engine.url, log_requests=True, api_keys=("the-key",)) as running,
    ):
        headers = {"authorization": "Bearer the-key", "x-request-id": "mine-1", "x-other": "secret-header"}
        content = [image(picture(56, 84)), text("secret-words")]
        assert (await running.ask(content, headers=headers)).status_code == 200
        assert (await running.ask("secret-words", headers=headers, stream=True)).status_code == 200
        url = image("http://secret.example.invalid/secret-path?secret-query")
        assert (await running.ask([url], headers=headers)).status_code == 400
        assert (await running.ask("secret-words", headers=headers, model="secret-model")).status_code == 404
    first, second, third, last = [each.fields for each in caplog.records if each.name == "pixelgate.access"]
    assert {name: first[name] for name in ("path", "status", "model", "pictures", "image_tokens", "engine")} == {
        "path": PATH,
        "status": 200,
        "model": "demo",
        "pictures": 1,
        "image_tokens": 6,
        "engine": "vllm+grpc-0",
    }
    assert first["client"] == hashlib.sha256(b"the-key").hexdigest()
    assert first["completion_tokens"] == len(engine.reply_ids)
    assert first["prompt_tokens"] > 6
    for phase in ("parse", "fetch", "preprocess", "decode", "execute", "render", "engine", "first_token", "send"):
        assert 0 <= first[f"{phase}_ms"] <= first["total_ms"], phase
    assert (second["status"], second["pictures"]) == (200, 0)
    assert (third["status"], third["error"], third["model"]) == (400, "image_fetch_failed", "demo")
    assert (last["status"], last["error"]) == (404, "model_not_found")
    assert "model" not in last
    lines = [logs.JsonFormatter().format(each) for each in caplog.records if not each.name.startswith("httpx")]
    assert "secret" not in "".join(lines)
    assert "the-key" not in caplog.text


async def test_no_line_unless_it_is_asked_for(caplog):
    caplog.set_level(logging.INFO)
    async with strict_engine() as engine, gateway(engine.url) as running:
        assert (await running.ask()).status_code == 200
    assert not [each for each in caplog.records if each.name == "pixelgate.access"]


async def test_lines_of_a_request_have_its_id(monkeypatch):
    seen = {}

    class Noting(logging.Handler):
        def emit(self, made):
            seen[made.getMessage()] = logs.REQUEST_ID.get()

    handler = Noting()
    logging.getLogger("pixelgate").addHandler(handler)
    try:
        async with strict_engine() as engine, gateway(engine.url) as running:
            render = chat.render

            def noted(*arguments):
                logging.getLogger("pixelgate.test").error("on a worker")
                return render(*arguments)

            monkeypatch.setattr(chat, "render", noted)
            assert (await running.ask(headers={"x-request-id": "mine-2"})).status_code == 200
            assert seen["on a worker"] == "mine-2"
            await engine.stop()
            response = await running.ask(headers={"x-request-id": "mine-3"})
            assert response.status_code == 503
            assert "mine-3" in {name for words, name in seen.items() if words.startswith("No engine")}
    finally:
        logging.getLogger("pixelgate").removeHandler(handler)
