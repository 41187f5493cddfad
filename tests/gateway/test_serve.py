"""The process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from huggingface_hub import file_download
from prometheus_client.parser import text_string_to_metric_families
from running import ENDLESS, PATH, error_of, image, picture, strict_engine, until

import hub_mirror
from pixelgate.demo import CHECKPOINT
from pixelgate.errors import ConfigError
from pixelgate.gateway import logs, serve
from pixelgate.gateway.passthrough import PassThrough
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.gateway.worker import Line
from pixelgate.testing.sglang_server import SglangServer

LINE = Line(socket.socketpair()[0])


@asynccontextmanager
async def process(url, port=0, wait_for=None, checkpoint=(str(CHECKPOINT),), **environment):
    """`pixelgate serve` as (process, its port, the log so far), once it listens or has logged ``wait_for``."""
    engine = ("--engine", url, "--port", str(port)) if url else ()
    command = (sys.executable, "-m", "pixelgate.cli", "serve", *checkpoint, *engine)
    # background jobs of a shell ignore SIGINT, and their children inherit that; a handler is not inherited
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        running = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
        )
    finally:
        signal.signal(signal.SIGINT, before)
    log, port = [], 0
    try:
        while not port and (line := await asyncio.wait_for(running.stderr.readline(), 60)):
            log.append(line.decode())
            if wait_for and wait_for in log[-1]:
                break
            if found := re.search(r"running on http://127\.0\.0\.1:(\d+)", log[-1]):
                port = int(found[1])
        yield running, port, log
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def test_a_signal_ends_it_when_the_answers_are_complete():
    async with strict_engine(delay=0.05) as engine, process(engine.url) as (running, port, _):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            body = {"model": "checkpoint", "messages": [{"role": "user", "content": "x"}], "stream": True}
            async with client.stream("POST", PATH, json=body) as response:
                answer = ""
                async for piece in response.aiter_text():
                    if not answer:
                        running.send_signal(signal.SIGINT)
                    answer += piece
            assert answer.endswith("data: [DONE]\n\n")
        log = (await running.stderr.read()).decode()
        assert await running.wait() == 0
        assert "Traceback" not in log
        assert engine.cancelled == []


async def test_what_takes_too_long_is_told_that_the_gateway_ends():
    checkpoint = (str(CHECKPOINT), "--shutdown-timeout", "1")
    async with (
        strict_engine(delay=60) as engine,
        process(engine.url, checkpoint=checkpoint) as (running, port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        body = {"model": "checkpoint", "messages": [{"role": "user", "content": "x"}]}
        asking = [asyncio.create_task(client.post(PATH, json=body | {"stream": stream})) for stream in (False, True)]
        await until(lambda: len(engine.requests) == 2)
        running.send_signal(signal.SIGTERM)
        for response in await asyncio.gather(*asking):
            assert (response.status_code, error_of(response)["code"]) == (503, "gateway_closing")
            assert response.headers["retry-after"] == "1"
        assert await asyncio.wait_for(running.wait(), 10) == 0
        await until(lambda: len(engine.cancelled) == 2)
        assert "Traceback" not in (await running.stderr.read()).decode()


async def test_a_stream_that_takes_too_long_is_broken_off_with_a_line_in_the_log():
    checkpoint = (str(CHECKPOINT), "--shutdown-timeout", "1")
    async with (
        strict_engine(delay=0.1, reply=ENDLESS) as engine,
        process(engine.url, checkpoint=checkpoint) as (running, port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        body = {"model": "checkpoint", "messages": [{"role": "user", "content": "x"}], "stream": True}
        async with client.stream("POST", PATH, json=body) as response:
            pieces = response.aiter_text()
            assert await anext(pieces)
            running.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                [piece async for piece in pieces]
        log = (await asyncio.wait_for(running.stderr.read(), 10)).decode()
    assert "Traceback" not in log
    cancelled, told = [line for line in log.splitlines() if " WARNING " in line or " ERROR " in line]
    assert "Cancel 1 running task(s)" in cancelled
    assert told.endswith(": the gateway is closing and could not finish this request")


async def test_a_second_sigint_cuts_at_once():
    async with (
        strict_engine(delay=60) as engine,
        process(engine.url) as (running, port, _),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        body = {"model": "checkpoint", "messages": [{"role": "user", "content": "x"}]}
        asking = asyncio.create_task(client.post(PATH, json=body))
        await until(lambda: len(engine.requests) == 1)
        for _ in range(2):
            running.send_signal(signal.SIGINT)
            await asyncio.sleep(0.3)
        assert (await asking).status_code == 503
        assert await asyncio.wait_for(running.wait(), 5) == 0
        assert "Traceback" not in (await running.stderr.read()).decode()


async def test_what_an_old_worker_still_does_has_the_same_time_after_a_signal(tmp_path):
    config = tmp_path / "pixelgate.toml"
    async with strict_engine(delay=60) as engine:
        text = "port = 0\nkeep_alive_timeout = 0.3\nshutdown_timeout = 1\ndrain_delay = 1\n[[model]]\n"
        config.write_text(text + f'name = "demo"\ncheckpoint = "{CHECKPOINT}"\nengines = ["{engine.url}"]\n')
        async with (
            process(None, None, checkpoint=("--config", str(config))) as (running, port, log),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
        ):
            body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
            asking = asyncio.create_task(client.post(PATH, json=body))
            await until(lambda: len(engine.requests) == 1)
            running.send_signal(signal.SIGHUP)
            await logged(running, log, "is taken over")
            await asyncio.sleep(1)
            assert not asking.done()
            running.send_signal(signal.SIGTERM)
            assert error_of(await asking)["code"] == "gateway_closing"
            assert await asyncio.wait_for(running.wait(), 10) == 0
            log.append((await running.stderr.read()).decode())
        assert "is killed" not in "".join(log)


async def test_a_hub_id_is_also_the_models_name(tmp_path):
    with hub_mirror.running() as mirror:
        mirror.add("a/b", {file.name: file.read_bytes() for file in CHECKPOINT.iterdir()}, "v1")
        checkpoint = ("a/b", "--revision", "v1")
        hub = {"HF_ENDPOINT": mirror.url, "HF_HOME": str(tmp_path)}
        async with (
            strict_engine() as engine,
            process(engine.url, checkpoint=checkpoint, **hub) as (_, port, log),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
        ):
            assert [model["id"] for model in (await client.get("/v1/models")).json()["data"]] == ["a/b"]
            body = {"model": "a/b", "messages": [{"role": "user", "content": "x"}]}
            assert (await client.post(PATH, json=body)).status_code == 200
            assert mirror.url not in "".join(log)  # addresses of files may be signed


async def test_a_hub_without_the_model_ends_the_start(tmp_path):
    with hub_mirror.running() as mirror:
        hub = {"HF_ENDPOINT": mirror.url, "HF_HOME": str(tmp_path)}
        async with process("local:reader", checkpoint=("a/b",), **hub) as (running, _, log):
            assert await running.wait() == 1
    assert log[-1].startswith("pixelgate: there is no directory a/b here, and no such model on the hub")


async def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        async with process("local:reader", number) as (running, port, log):
            assert await running.wait() == 1
    assert port == 0
    assert log == [f"pixelgate: host 127.0.0.1 and port {number} cannot be listened on: Address already in use\n"]


@pytest.mark.parametrize("kind", ["sglang+http", "sglang+grpc"])
async def test_an_engine_that_does_not_fit_ends_the_start_with_one_line(kind):
    async with (
        SglangServer(model_type="llava") as server,
        process(server.url.replace("sglang+http", kind)) as (running, _, log),
    ):
        assert await running.wait() == 1
    assert log[-1].startswith("pixelgate: ")
    assert ("serve model_type 'llava'" if kind == "sglang+http" else "M-RoPE") in log[-1]
    assert "Unclosed" not in "".join(log)


def test_a_start_that_fails_gives_all_connections_back(monkeypatch):
    closed = []

    class Fleet:
        async def connect(self):
            raise ConfigError("no")

        async def close(self):
            closed.append(self)

    model = PassThrough("m", Fleet(), None, {}, False)
    monkeypatch.setattr(serve, "_open_models", lambda settings: [model])
    settings = GatewaySettings(models=(ModelSettings("", ("sglang+http://127.0.0.1:1",), "m"),))
    with pytest.raises(ConfigError, match="no"):
        serve.run(settings, LINE, (), ())
    assert closed == [model.fleet]


async def test_an_admin_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        checkpoint = (str(CHECKPOINT), "--admin-host", str(port))
        async with process("local:reader", checkpoint=checkpoint) as (running, _, log):
            assert await asyncio.wait_for(running.wait(), 10) == 1
    assert log[-1].startswith(f"pixelgate: admin_host {port} cannot be listened on: Address already in use")


async def test_both_listeners_end_with_a_signal():
    with socket.create_server(("127.0.0.1", 0)) as free:
        admin = free.getsockname()[1]
    async with (
        strict_engine() as engine,
        process(engine.url, checkpoint=(str(CHECKPOINT), "--admin-host", str(admin))) as (running, port, _),
        httpx.AsyncClient() as client,
    ):
        assert (await client.get(f"http://127.0.0.1:{admin}/metrics")).status_code == 200
        assert (await client.get(f"http://127.0.0.1:{port}/metrics")).status_code == 404
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 10) == 0
        log = (await running.stderr.read()).decode()
    assert "Traceback" not in log


async def test_it_is_not_ready_once_it_is_to_end():
    with socket.create_server(("127.0.0.1", 0)) as free:
        admin = free.getsockname()[1]
    delayed = (str(CHECKPOINT), "--admin-host", str(admin), "--drain-delay", "600")
    async with (
        strict_engine() as engine,
        process(engine.url, checkpoint=delayed) as (running, port, _),
        httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client,
    ):

        async def ready(at):
            return (await client.get(f"http://127.0.0.1:{at}/ready")).status_code

        assert [await ready(port), await ready(admin)] == [200, 200]
        running.send_signal(signal.SIGTERM)

        async def told():
            return await ready(admin) == 503

        await until(told)
        assert [await ready(port), await ready(admin)] == [503, 503]
        body = {"model": "checkpoint", "messages": [{"role": "user", "content": "x"}]}
        assert (await client.post(f"http://127.0.0.1:{port}{PATH}", json=body, timeout=20)).status_code == 200
        running.send_signal(signal.SIGINT)  # it waits no longer
        await asyncio.wait_for(running.wait(), 20)


async def test_the_log_is_json_if_told_so():
    said = (str(CHECKPOINT), "--log-format", "json", "--log-requests")
    async with (
        strict_engine() as engine,
        process(engine.url, checkpoint=said, wait_for="running on") as (running, _, log),
    ):
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)", log[-1])[1])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            body = {"model": "checkpoint", "messages": [{"role": "user", "content": "secret"}]}
            response = await client.post(PATH, json=body, headers={"x-request-id": "mine"})
            assert response.status_code == 200
        running.send_signal(signal.SIGTERM)
        log += (await running.stderr.read()).decode().splitlines()
    lines = [json.loads(line) for line in log]
    [access] = [line for line in lines if line["logger"] == "pixelgate.access"]
    assert (access["request_id"], access["status"], access["client"]) == ("mine", 200, "127.0.0.1")
    assert "secret" not in "".join(log)


def test_an_extra_that_is_missing_ends_the_start(monkeypatch):
    monkeypatch.setattr(serve, "_open_models", lambda settings: pytest.fail("not reached"))
    monkeypatch.setitem(sys.modules, "pixelgate.gateway.tracing", None)
    model = ModelSettings(str(CHECKPOINT), ("local:reader",), "demo")
    with pytest.raises(ConfigError, match=r"trace_endpoint needs .*: pip install 'pixelgate\[otel\]'"):
        serve.run(GatewaySettings(models=(model,), trace_endpoint="http://127.0.0.1:4318"), LINE, (), ())


def test_all_files_that_the_system_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        serve.allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_gateway_without_an_engine_says_so(monkeypatch, caplog):
    monkeypatch.setattr(logs, "configure", lambda settings: None)
    model = ModelSettings(str(CHECKPOINT), ("vllm+grpc://127.0.0.1:1",), "demo")
    with pytest.raises(ConfigError, match=r"no engine of model .demo. answered within 1\.5 seconds"):
        serve.run(GatewaySettings(models=(model,), port=0, engine_wait=1.5), LINE, (), ())
    assert [record.message for record in caplog.records if "cannot be used" in record.message] == [
        "vllm+grpc://127.0.0.1:1 cannot be used: The engine cannot be reached."
    ]


async def test_a_signal_ends_the_wait_for_an_engine():
    async with process("vllm+grpc://127.0.0.1:1", wait_for="cannot be used") as (running, _, log):
        running.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(running.wait(), 5) == 0
        log.append((await running.stderr.read()).decode())
    assert "Traceback" not in "".join(log)


def test_the_process_keeps_memory_and_a_quiet_log(monkeypatch):
    monkeypatch.setattr(logs, "configure", lambda settings: None)
    monkeypatch.setattr(serve, "server_config", lambda *_: pytest.fail("not reached"))
    kept = []
    monkeypatch.setattr(serve, "keep_memory", lambda pictures: kept.append(pictures))
    model = ModelSettings(str(CHECKPOINT), ("http://x",), "demo")
    with pytest.raises(ConfigError):
        serve.run(GatewaySettings(models=(model,), threads=3), LINE, (), ())
    assert kept == [3]
    assert not logging.getLogger("PIL.TiffImagePlugin").isEnabledFor(logging.ERROR)
    assert not file_download.logger.isEnabledFor(logging.WARNING)


def children(process):
    """The ids of a process' own processes."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return sorted(int(id_) for task in tasks for id_ in task.read_text().split())


def environment(id_):
    return Path(f"/proc/{id_}/environ").read_text()


def alive(processes):
    """Those that are there and no zombies."""
    states = {id_: Path(f"/proc/{id_}/stat") for id_ in processes}
    return [id_ for id_, stat in states.items() if stat.exists() and ") Z" not in stat.read_text()]


async def logged(running, log, words):
    """Read the log until a line has ``words``."""
    while line := (await asyncio.wait_for(running.stderr.readline(), 60)).decode():
        log.append(line)
        if words in line:
            return
    raise AssertionError(f"the log ends without {words!r}")


async def test_two_workers_until_their_supervisor_is_killed(tmp_path):
    config, keys = tmp_path / "pixelgate.toml", tmp_path / "keys"
    keys.write_text("first\n")
    body = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}
    async with strict_engine(delay=0.03) as engine:
        text = f'workers = 2\nthreads = 2\nport = 0\napi_key_file = "{keys}"\nkeep_alive_timeout = 0.5\n[[model]]\n'
        config.write_text(text + f'name = "demo"\ncheckpoint = "{CHECKPOINT}"\nengines = ["{engine.url}"]\n')
        command = ("--config", str(config))
        async with process(None, None, checkpoint=command) as (running, port, log):

            def client(key="first"):
                headers = {"authorization": f"Bearer {key}"}
                return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, headers=headers)

            async def asked(key="first"):
                async with client(key) as one:
                    return (await one.post(PATH, json=body)).status_code

            async def counted(key="first"):
                async with client(key) as one:
                    families = text_string_to_metric_families((await one.get("/metrics")).text)
                samples = [sample for family in families for sample in family.samples]
                answered = [each for each in samples if each.name == "pixelgate_requests_total"]
                return sum(each.value for each in answered if each.labels["status"] == "200")

            assert "running on" in log[-1]
            assert log[-1].endswith(", 2 workers\n")
            first, second = children(running.pid)
            assert [await asked() for _ in range(8)] == [200] * 8
            assert await counted() == 8.0

            os.kill(first, signal.SIGKILL)
            await logged(running, log, "another one is started")
            assert [await asked() for _ in range(3)] == [200] * 3
            await logged(running, log, " serves")
            assert second in children(running.pid)

            good = config.read_text()
            config.write_text("workers = 0\n" + good)
            running.send_signal(signal.SIGHUP)
            await logged(running, log, f"the configuration is not taken over: {config} is not valid TOML")
            assert await asked() == 200

            config.write_text(good)
            keys.write_text("second\n")
            replies = []

            async def keep_asking():
                async with client() as one:
                    while not replies or replies[-1] == 200:
                        replies.append((await one.post(PATH, json=body)).status_code)

            asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
            await until(lambda: len(replies) >= 3)
            async with client() as one, one.stream("POST", PATH, json=body | {"stream": True}) as response:
                running.send_signal(signal.SIGHUP)
                await logged(running, log, "running on")
                assert (await response.aread()).endswith(b"data: [DONE]\n\n")
            await asyncio.wait_for(asyncio.gather(*asking), 20)
            assert set(replies) == {200, 401}  # by the old configuration, and then by the new one
            await until(lambda: second not in children(running.pid))
            assert await asked() == 401
            assert await asked("second") == 200
            # what was shown stays, whoever has counted it, and what is counted by those that end by themselves
            assert await counted("second") >= 8 + 1 + replies.count(200) + 1

            gif = {"role": "user", "content": [image(picture(56, 56, form="GIF"))]}
            async with client("second") as one:
                assert (await one.post(PATH, json=body | {"messages": [gif]})).status_code == 200
            workers = children(running.pid)
            assert all("glibc.malloc.arena_max=1" in environment(id_) for id_ in workers)
            processes = [*workers, *(decoder for worker in workers for decoder in children(worker))]
            assert len(processes) == 3
            async with client("second") as one, one.stream("POST", PATH, json=body | {"stream": True}) as response:
                running.kill()
                assert (await response.aread()).endswith(b"data: [DONE]\n\n")
            await until(lambda: not alive(processes))
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            log.append((await running.stderr.read()).decode())
        assert engine.cancelled == []
        assert "Traceback" not in "".join(log)
