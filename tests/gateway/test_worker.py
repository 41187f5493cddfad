"""A worker in this process, with the test as its supervisor in another thread."""

from __future__ import annotations

import asyncio
import base64
import gc
import json
import os
import pickle
import signal
import socket
import sys
import threading
from contextlib import suppress

import httpx
import pytest
from running import PATH, strict_engine, until

from pixelgate.demo import CHECKPOINT
from pixelgate.gateway import logs, worker
from pixelgate.gateway.listening import Listeners
from pixelgate.gateway.metrics import Metrics
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

BODY = {"model": "demo", "messages": [{"role": "user", "content": "x"}]}


@pytest.fixture(autouse=True)
def handlers(monkeypatch):
    """The signals' handlers afterwards are those of before; and without a supervisor this process is not ended."""
    gc.collect()  # a signal must not meet the end of something old, which would swallow its exception
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(logs, "configure", lambda settings: None)
    monkeypatch.setattr(worker, "_end", lambda patience, told: told or os.kill(os.getpid(), signal.SIGTERM))
    yield
    for thread in threading.enumerate():
        if thread.name == "pixelgate-line":
            thread.join(20)
    for number, handler in before.items():
        signal.signal(number, handler)


class Supervisor:
    """The other end of the line."""

    def __init__(self, end):
        self._end = end
        self.listeners = Listeners("127.0.0.1", 0, what="it")
        self.admin = Listeners("127.0.0.1", 0, what="it")

    async def __aenter__(self):
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._end)
        return self

    async def __aexit__(self, *_):
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        self.listeners.close()
        self.admin.close()

    def start(self, url, **settings):
        model = ModelSettings(str(CHECKPOINT), (url,), "demo")
        settings = GatewaySettings((model,), **{"keep_alive_timeout": 0.3, "admin_host": "9", **settings})
        own = {
            name: [os.dup(each.fileno()) for each in listeners.of(0, 1)]
            for name, listeners in (("sockets", self.listeners), ("admin", self.admin))
        }
        self.tell("start", settings=base64.b64encode(pickle.dumps(settings)).decode(), **own)

    def tell(self, kind, **fields):
        self._writer.write(json.dumps({"kind": kind, **fields}).encode() + b"\n")

    async def hear(self, kind):
        message = json.loads(await asyncio.wait_for(self._reader.readline(), 20))
        assert message["kind"] == kind
        return message

    async def serving(self, url, **settings):
        self.start(url, **settings)
        await self.hear("ready")
        self.tell("serve")
        await self.hear("serving")
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.listeners.port}", timeout=20)


def live(conversation):
    """A worker's life as ``conversation`` has it: a coroutine function that is given its supervisor."""
    ours, theirs = socket.socketpair()
    failures = []

    async def talk():
        async with Supervisor(ours) as supervisor:
            await conversation(supervisor)

    def run():
        try:
            asyncio.run(talk())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        return worker.main(theirs.detach())
    finally:
        thread.join(20)
        if failures:
            raise failures[0]


def test_from_start_to_end():
    async def conversation(supervisor):
        async with strict_engine() as engine, await supervisor.serving(engine.url) as client:
            assert (await client.post(PATH, json=BODY)).status_code == 200
            admin = f"http://127.0.0.1:{supervisor.admin.port}/metrics"
            async with httpx.AsyncClient() as other:
                asked = [asyncio.create_task(other.get(admin)) for _ in range(2)]
                for _ in asked:
                    await supervisor.hear("ask")
                supervisor.tell("report")
                report = (await supervisor.hear("report"))["families"]
                supervisor.tell("show", families=report)
                supervisor.tell("show", families=report)
                for response in await asyncio.gather(*asked):
                    assert f'pixelgate_requests_total{{model="demo",path="{PATH}",status="200"}} 1.0' in response.text
                    assert "_created" not in response.text

            supervisor.tell("alive")
            await supervisor.hear("alive")
            supervisor.tell("drain")
            supervisor.tell("drain")  # once is enough
            supervisor.tell("report")
            await supervisor.hear("report")
            response = await client.post(PATH, json=BODY)  # over the connection that there was
            assert (response.status_code, response.headers["connection"]) == (200, "close")
            families = {family["name"]: family for family in (await supervisor.hear("report"))["families"]}
            assert families["pixelgate_requests"]["samples"][0][2] == 2.0

    assert live(conversation) == 0


def test_metrics_when_the_supervisor_does_not_answer(monkeypatch):
    monkeypatch.setattr(worker, "_ANSWER_SECONDS", 0.1)

    async def conversation(supervisor):
        async with strict_engine() as engine, await supervisor.serving(engine.url, admin_host="") as client:
            assert (await client.get("/metrics")).status_code == 503
            os.kill(os.getpid(), signal.SIGTERM)
            await supervisor.hear("ask")
            await supervisor.hear("report")

    assert live(conversation) == 0


def test_a_supervisor_that_is_stopped_stops_nobody_who_asks_for_metrics(monkeypatch):
    monkeypatch.setattr(worker, "_ANSWER_SECONDS", 0.01)

    async def conversation(supervisor):
        async with strict_engine() as engine, await supervisor.serving(engine.url) as client:
            supervisor._writer.transport.pause_reading()
            admin = f"http://127.0.0.1:{supervisor.admin.port}/metrics"
            for _ in range(1000):  # more than there is room for
                assert (await client.get(admin)).status_code == 503
            assert (await client.post(PATH, json=BODY)).status_code == 200
            supervisor._writer.transport.resume_reading()
            os.kill(os.getpid(), signal.SIGTERM)
            while json.loads(await asyncio.wait_for(supervisor._reader.readline(), 20))["kind"] != "report":
                pass

    assert live(conversation) == 0


def test_a_worker_that_cannot_report_is_alive_all_the_same(monkeypatch, caplog):
    async def conversation(supervisor):
        async with strict_engine() as engine, await supervisor.serving(engine.url):
            with monkeypatch.context() as broken:
                broken.setattr(Metrics, "report", lambda self: [object()])
                supervisor.tell("report")
                supervisor.tell("alive")
                await supervisor.hear("alive")
            os.kill(os.getpid(), signal.SIGTERM)
            await supervisor.hear("report")

    assert live(conversation) == 0
    assert "the metrics cannot be reported" in caplog.text


def test_without_standard_error_it_serves_as_well(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    before = signal.getsignal(signal.SIGUSR1)

    async def conversation(supervisor):
        async with strict_engine() as engine, await supervisor.serving(engine.url) as client:
            assert (await client.post(PATH, json=BODY)).status_code == 200
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
            await supervisor.hear("report")

    assert live(conversation) == 0
    signal.signal(signal.SIGUSR1, before)


def test_the_answer_under_way_is_finished_when_the_supervisor_dies():
    async def conversation(supervisor):
        async with strict_engine(delay=0.05) as engine, await supervisor.serving(engine.url) as client:
            async with client.stream("POST", PATH, json=BODY | {"stream": True}) as response:
                answer = ""
                async for piece in response.aiter_text():
                    supervisor._writer.close()
                    answer += piece
            assert answer.endswith("data: [DONE]\n\n")

    assert live(conversation) == 0


def test_without_a_supervisor_nothing_is_begun():
    async def conversation(supervisor):
        pass

    assert live(conversation) == 1


def test_the_end_of_the_supervisor_ends_the_wait_for_an_engine(caplog):
    async def conversation(supervisor):
        supervisor.start("vllm+grpc://127.0.0.1:1")
        await until(lambda: any("cannot be used" in line for line in caplog.messages))

    assert live(conversation) == 0


def test_what_prevents_a_start_is_said():
    async def conversation(supervisor):
        supervisor.start("http://127.0.0.1:1")
        assert "is not an engine address" in (await supervisor.hear("failed"))["reason"]

    assert live(conversation) == 1


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in ("serve", "protocol"):
        monkeypatch.delitem(sys.modules, f"pixelgate.gateway.{name}", raising=False)
    monkeypatch.delattr("pixelgate.gateway.serve", raising=False)

    async def conversation(supervisor):
        supervisor.start("local:reader")
        message = await supervisor.hear("failed")
        assert message["reason"] == "this needs uvicorn: pip install 'pixelgate[gateway]'"

    assert live(conversation) == 1


def test_a_process_that_does_not_end_by_itself_is_ended(monkeypatch):
    monkeypatch.undo()
    done = []
    monkeypatch.setattr(worker.os, "kill", lambda process, number: done.append(number))
    monkeypatch.setattr(worker.time, "sleep", done.append)
    monkeypatch.setattr(worker.os, "_exit", done.append)
    worker._end(30.0, told=False)
    worker._end(20.0, told=True)
    assert done == [signal.SIGTERM, 30.0, 1, 20.0, 1]
