"""Workers started, replaced, exchanged and ended. They are real processes, with a server that starts in no time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from running import until

from pixelgate.engines import shm
from pixelgate.errors import ConfigError
from pixelgate.gateway import child, crew, logs, supervisor
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.gateway.supervisor import Supervisor


@pytest.fixture(autouse=True)
def stubs(monkeypatch):
    monkeypatch.setattr(child, "COMMAND", (sys.executable, str(Path(__file__).with_name("stub_worker.py"))))
    monkeypatch.setattr(crew, "_PAUSE", 0.01)
    monkeypatch.setattr(crew, "_STEADY_SECONDS", 60.0)
    monkeypatch.setattr(supervisor, "_REPORT_SECONDS", 0.3)
    monkeypatch.setattr(logs, "configure", lambda settings: None)


def settings(name="first", workers=2, **values):
    model = ModelSettings("/models/qwen", ("vllm+grpc://127.0.0.1:1",), name)
    return GatewaySettings((model,), **{"port": 0, "workers": workers, "threads": 6, "shutdown_timeout": 1.0, **values})


class Running:
    """A supervisor in this process. ``next`` is what it reads when it reads its configuration anew."""

    def __init__(self, first):
        self.next = first
        self.supervisor = Supervisor(self._read)
        self.task = asyncio.create_task(self.supervisor.serve(first))

    def _read(self):
        if isinstance(self.next, Exception):
            raise self.next
        return self.next

    @property
    def crew(self):
        return self.supervisor._crew

    @property
    def children(self):
        return [each for crew in self.supervisor._crews for each in crew.children]

    async def connect(self):
        return Connection(*await asyncio.open_connection("127.0.0.1", self.crew.listeners.port))

    async def answers(self, count=30):
        """Who answers on new connections."""
        found = set()
        for _ in range(count):
            async with await self.connect() as connection:
                found.add(tuple(await connection.ask("w")))
        return found

    async def metrics(self):
        async with await self.connect() as connection:
            return {family["name"]: family["samples"] for family in await connection.ask("m")}


class Connection:
    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self._writer.close()

    async def ask(self, letter):
        self._writer.write(letter.encode())
        line = await asyncio.wait_for(self._reader.readline(), 5)
        return json.loads(line) if line else None


@asynccontextmanager
async def running(first=None):
    it = Running(first or settings())
    try:
        await until(lambda: it.crew is not None or it.task.done())
        if it.task.done():
            await it.task
        yield it
    finally:
        if not it.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(it.task, 20)
        assert all(gone(each.id) for each in it.children)


def gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


async def test_all_workers_answer_and_one_shows_the_metrics_of_all():
    async with running() as it:
        answered = await it.answers()
        assert {name for _, name, _ in answered} == {"first"}
        assert {threads for *_, threads in answered} == {3}  # of six
        assert {process for process, *_ in answered} == {each.id for each in it.children}
        assert await it.metrics() == {"answers": [["answers", {}, 31]], "up": [["up", {"a": "b"}, 2]]}


async def test_one_that_dies_is_replaced_while_the_other_answers(caplog):
    async with running() as it:
        assert len(await it.answers()) == 2
        before = (await it.metrics())["answers"][0][2]
        first, second = it.children
        os.kill(first.id, signal.SIGKILL)
        await first.ended.wait()
        assert {process for process, *_ in await it.answers(10)} == {second.id}
        await until(lambda: it.crew.children[0].serves)
        replaced = it.crew.children[0]
        assert {process for process, *_ in await it.answers()} == {replaced.id, second.id}
        after = await it.metrics()
        assert after["answers"][0][2] == before + 10 + 30 + 1  # what the dead one had counted is not lost
        assert after["up"][0][2] == 2
        assert f"worker {first.id} ended with signal 9 (Killed)" in caplog.messages


def a_tensor_of(process):
    """A file in shared memory that is named as one of that process."""
    start = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    ids = Path("/proc/self/ns/pid").stat().st_ino
    left = shm.DIRECTORY / f"pixelgate-{ids}-{process}-{start}-{'0' * 32}"
    left.write_bytes(b"x")
    return left


async def test_what_one_that_was_killed_has_left_in_shared_memory_is_removed():
    async with running(settings(workers=1)) as it:
        first = it.children[0]
        left = a_tensor_of(first.id)
        os.kill(first.id, signal.SIGKILL)
        await first.ended.wait()
        assert not left.exists()


async def test_a_new_configuration_is_taken_over_without_refusing_anybody():
    async with running() as it:
        before, port = (await it.metrics())["answers"][0][2], it.crew.listeners.port
        old, counted, failed = list(it.children), 0, []

        async def client():
            nonlocal counted
            while True:
                try:
                    async with await it.connect() as connection:
                        answer = await connection.ask("w")
                        counted += 1
                except OSError as failure:
                    failed.append(failure)
                else:
                    if answer is None:
                        failed.append("no answer")
                    elif answer[1] == "second":
                        return

        it.next = settings("second", workers=3)
        clients = [asyncio.create_task(client()) for _ in range(4)]
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(asyncio.gather(*clients), 20)
        await until(lambda: all(each.ended.is_set() for each in old))
        await until(lambda: len(it.children) == 3)
        assert failed == []
        assert it.crew.listeners.port == port
        answered = await it.answers(60)
        assert {(name, threads) for _, name, threads in answered} == {("second", 2)}
        assert (await it.metrics())["answers"][0][2] == before + counted + 60 + 1  # goes on counting

        it.next = settings("third", workers=1)  # has the places of all
        it.supervisor.reload()
        await until(lambda: len(it.children) == 1)
        assert {(name, threads) for _, name, threads in await it.answers()} == {("third", 6)}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (ConfigError("port must be a whole number"), "port must be a whole number"),
        (settings("refuses"), "no such model"),
        (settings("lacks"), "this needs uvicorn: pip install 'pixelgate[gateway]'"),
        (settings("dies"), "the gateway did not start; the log above says why"),
        (settings(host="192.0.2.1", port=9), "host 192.0.2.1 and port 9 cannot be listened on: "),
        (settings(host="nowhere.invalid"), "host nowhere.invalid and port 0 cannot be listened on: there is no such"),
        (settings(host="::1", admin_host="192.0.2.1:9"), "admin_host 192.0.2.1:9 cannot be listened on: "),
    ],
)
async def test_a_configuration_that_does_not_work_is_refused(bad, reason, caplog):
    if not isinstance(bad, Exception):
        with pytest.raises(ConfigError) as caught:
            async with running(bad):
                pass
        assert caught.value.message.startswith(reason)
    async with running(settings(workers=1)) as it:
        only = it.children[0]
        it.next = bad
        it.supervisor.reload()
        await until(lambda: any(f"the configuration is not taken over: {reason}" in line for line in caplog.messages))
        assert it.children == [only]
        assert await it.answers(5) == {(only.id, "first", 6)}


async def test_one_that_dies_while_others_start_is_replaced_at_once():
    async with running() as it:
        first, second = it.children
        it.next = settings("slow", workers=3)
        it.supervisor.reload()
        await until(lambda: len(it.children) == 5)
        os.kill(first.id, signal.SIGKILL)
        await until(lambda: it.crew.children[0] is not first and it.crew.children[0].serves)
        replaced = it.crew.children[0]
        assert {process for process, *_ in await it.answers()} == {replaced.id, second.id}


async def test_one_that_dies_while_a_configuration_is_refused_keeps_no_socket_of_it(caplog):
    async with running(settings(workers=1)) as it:
        first = it.children[0]
        it.next = settings("refuses-late", workers=2)
        it.supervisor.reload()
        await until(lambda: len(it.children) == 3)
        os.kill(first.id, signal.SIGKILL)
        await until(lambda: any("not taken over: it was too late" in line for line in caplog.messages))
        await until(lambda: it.crew.children[0] is not first and it.crew.children[0].serves)
        # no socket of the refused ones is left, at which nobody would answer
        assert {name for _, name, _ in await it.answers(20)} == {"first"}
        assert it.crew.listeners.count == 1


async def test_one_that_is_just_being_replaced_ends_with_the_old_ones():
    async with running() as it:
        first = it.children[0]
        it.crew._share = settings("slow")
        os.kill(first.id, signal.SIGKILL)
        await until(lambda: it.crew.children[0] is not first)
        it.next = settings("second")
        it.supervisor.reload()
        await until(lambda: it.crew.settings.models[0].name == "second")
        await until(lambda: len(it.children) == 2)
        assert {name for _, name, _ in await it.answers(10)} == {"second"}


async def test_addresses_may_change():
    async with running(settings(workers=1, admin_host="0")) as it:
        admin = it.crew.admin.port
        assert await ask_at("127.0.0.1", admin)
        port = it.crew.listeners.port
        it.next = settings("second", workers=1, host="::1", admin_host="0", tls_cert="a", tls_key="b")
        it.supervisor.reload()
        await until(lambda: len(it.children) == 1 and it.crew.listeners.host == "::1")
        assert it.crew.admin.port == admin
        assert (await ask_at("::1", it.crew.listeners.port))[1] == (await ask_at("127.0.0.1", admin))[1] == "second"
        with pytest.raises(ConnectionRefusedError):
            await ask_at("127.0.0.1", port)


async def ask_at(host, port):
    async with Connection(*await asyncio.open_connection(host, port)) as connection:
        return await connection.ask("w")


async def test_a_port_that_is_taken_is_taken_whoever_has_it():
    async with running(settings(workers=1)) as it:
        with pytest.raises(ConfigError, match="it cannot be listened on: Address already in use"):
            supervisor.Listeners("127.0.0.1", it.crew.listeners.port, what="it")


async def test_workers_that_die_again_and_again_end_the_gateway(caplog):
    with pytest.raises(ConfigError, match="no worker serves any more, and new ones end as soon as they start"):
        async with running(settings("serves-and-dies", workers=1)) as it:
            await it.task
    assert any(line.endswith("ended with status 9") for line in caplog.messages)
    assert any(line.endswith("another one is started in 0.08 seconds") for line in caplog.messages)


async def test_one_that_cannot_be_replaced_is_no_reason_to_end_the_others(monkeypatch, caplog):
    monkeypatch.setattr(crew, "_MOST_TRIES", 2)
    async with running() as it:
        first, second = it.children
        it.crew._share = settings("refuses")
        os.kill(first.id, signal.SIGKILL)
        refusals = lambda: sum(line.endswith("did not start: no such model") for line in caplog.messages)  # noqa: E731
        await until(lambda: refusals() >= 3)
        assert {process for process, *_ in await it.answers(5)} == {second.id}
        it.crew._share = settings()
        await until(lambda: it.crew.children[0].serves)


async def test_what_does_not_end_is_killed(monkeypatch, caplog):
    monkeypatch.setattr(crew, "_LAST_SECONDS", 0.0)
    async with running(settings("stubborn", workers=1, shutdown_timeout=0.2)) as it:
        only = it.children[0]
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(it.task, 10)
    assert f"worker {only.id} has not ended in time and is killed" in caplog.messages


async def test_a_signal_ends_a_start(monkeypatch):
    monkeypatch.setattr(child, "COMMAND", (sys.executable, "-c", "import time; time.sleep(60)"))
    it = Running(settings())
    await until(lambda: len(it.children) == 2)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(it.task, 10)
    assert all(gone(each.id) for each in it.children)


async def test_a_worker_that_is_stuck_is_not_waited_for():
    async with running(settings("stuck")) as it:
        assert await it.metrics() == {}
        await asyncio.sleep(1)
        assert "answers" in await it.metrics()  # the reports that came too late for the first


async def test_a_worker_whose_event_loop_stops_is_replaced(monkeypatch, caplog, capfd):
    monkeypatch.setattr(child, "_ASKED_EVERY", 0.4)
    async with running() as it:
        await asyncio.sleep(2)  # those that answer are left alone
        assert not [line for line in caplog.messages if "is gone" in line]
        before = it.children
        connection = await it.connect()
        async with connection:
            held, *_ = await connection.ask("w")
            assert await connection.ask("h") is None  # the connection ends with the worker
        stuck = next(each for each in before if each.id == held)
        await until(lambda: stuck not in it.crew.children and all(each.serves for each in it.crew.children))
        assert len(set(it.crew.children) & set(before)) == 1
    assert f"worker {held} had not answered for 1.2 seconds" in caplog.messages
    assert f"worker {held} has not ended in time and is killed" in caplog.messages
    assert "in hold_the_loop" in capfd.readouterr().err  # where it was stuck


async def test_an_old_worker_whose_event_loop_stops_is_killed(monkeypatch):
    async with running(settings(workers=1)) as it:
        old = it.children[0]
        monkeypatch.setattr(child, "_ASKED_EVERY", 0.4)  # from its next question on, which is after the reload
        async with await it.connect() as connection:
            stuck = asyncio.create_task(connection.ask("h"))
            it.next = settings("second", workers=1)
            it.supervisor.reload()
            assert await stuck is None
        await until(lambda: len(it.children) == 1)
        assert old.ended.is_set()
        assert {name for _, name, _ in await it.answers(5)} == {"second"}


async def test_the_workers_say_what_they_are_doing_and_leave_a_new_configuration_to_the_supervisor(capfd):
    async with running() as it:
        before, said = it.children, ""
        for each in before:
            os.kill(each.id, signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)

        def all_said():
            nonlocal said
            said += capfd.readouterr().err
            return said.count("in run_forever\n") == 2

        await until(all_said)
        assert await it.answers()
        assert it.crew.children == before


async def test_a_worker_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(child, "COMMAND", ("/nowhere/python",))
    with pytest.raises(ConfigError, match="a worker cannot be started: No such file or directory"):
        async with running():
            pass


async def test_what_holds_only_for_all_workers_together_is_said(caplog):
    async with running(settings(workers=2, max_pixels_in_flight=100_000_000, host="")) as it:
        assert it.crew.listeners.port
    assert (
        "max_pixels_in_flight is 50000000 for each of 2 workers, less than the 64000000 of max_pixels of a picture"
        in caplog.messages
    )
    assert "anybody who reaches any address may ask: no API key is set" in caplog.messages


def test_listeners_leave_nothing_open_when_one_cannot_be_bound():
    before = len(list(Path("/proc/self/fd").iterdir()))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError):
        supervisor.Listeners("localhost", taken.getsockname()[1], what="it", count=3)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
