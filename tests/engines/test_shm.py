"""Tensors in shared memory: what is written arrives, and nothing is left, however a request ends."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest
from engine_requests import BFLOAT16, FACTS, answer, request, until
from scripted_vllm import client, complete, scripted
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines import shm
from pixelgate.engines.connect import engine as connect
from pixelgate.engines.shm import Segments, namespace, sweep
from pixelgate.engines.vllm_wire import encode
from pixelgate.errors import EngineDeclinedError, EngineError, EngineTimeoutError, RequestError
from pixelgate.testing.strict_engine import StrictEngine
from pixelgate.testing.strict_layouts import Refused
from pixelgate.testing.strict_shm import take_in

LARGE = {"grids": ((40, 60), (48, 40))}  # 2400 and 1920 rows of 24 bytes: 101 KiB of uint8
ROOMY = replace(FACTS, max_context=4096, max_embeddings_per_image=0)


def ours():
    return [path.name for path in shm.DIRECTORY.glob(f"pixelgate-*-{os.getpid()}-*")]


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    assert ours() == []


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shm, "DIRECTORY", tmp_path)
    return tmp_path


def test_a_segment_has_the_bytes_of_all_parts_for_this_user_alone(folder):
    parts = (np.arange(6, dtype=np.int64).reshape(2, 3), np.arange(3, dtype=ml_dtypes.bfloat16))
    segments = Segments()
    before = os.umask(0)
    try:
        name = segments.write(parts)
    finally:
        os.umask(before)
    assert (folder / name).read_bytes() == parts[0].tobytes() + parts[1].tobytes()
    assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert name.split("-")[2] == str(os.getpid())


def test_segments_are_unread_until_one_is_gone_and_removing_takes_the_rest(folder):
    segments = Segments()
    assert not segments.unread()
    names = [segments.write((np.zeros(4, np.uint8),)) for _ in range(2)]
    assert segments.unread()
    (folder / names[0]).unlink()
    assert not segments.unread()
    segments.remove()
    assert not list(folder.iterdir())
    segments.remove()


def test_what_a_thread_writes_after_the_end_is_removed_too(folder):
    segments = Segments()
    segments.remove()
    segments.write((np.zeros(4, np.uint8),))
    assert not list(folder.iterdir())


def test_the_sweep_takes_what_dead_processes_have_left(folder):
    mine = Segments().write((np.zeros(4, np.uint8),))
    _, ids, process, start, random = mine.split("-")
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    kept = {
        mine,
        f"pixelgate-{int(ids) + 1}-{process}-{start}-{random}",  # of another container
        f"pixelgate-{ids}-{process}-{start}-short",
        "another-file",
    }
    gone = {
        f"pixelgate-{ids}-{dead.pid}-{start}-{random}",
        f"pixelgate-{ids}-{process}-{int(start) + 1}-{random}",  # the id was used again
        f"pixelgate-{int(ids) + 2}-{process}-{start}-{random}",  # of another container, and old
    }
    for name in kept | gone:
        (folder / name).touch()
    old = time.time() - 4000
    os.utime(folder / f"pixelgate-{int(ids) + 2}-{process}-{start}-{random}", (old, old))
    assert sweep() == 3
    assert {path.name for path in folder.iterdir()} == kept
    assert sweep() == 0


def test_where_there_is_no_shared_memory_it_has_no_name(tmp_path, monkeypatch):
    assert namespace()
    monkeypatch.setattr(shm, "DIRECTORY", tmp_path / "missing")
    assert namespace() == ""


@pytest.mark.parametrize("grids", [LARGE["grids"], ((160, 300),)])  # written on the loop, and on a thread
@pytest.mark.parametrize("stream", [True, False])
async def test_pictures_arrive_as_they_do_in_a_message(grids, stream):
    facts = replace(ROOMY, max_context=1 << 16)
    sent = request("uint8", grids=grids, stream=stream)
    async with StrictEngine(facts) as server, client(server.url) as engine:
        assert (await answer(engine, sent))[-1].finish_reason == "stop"
    (got,) = server.requests
    assert len(server.shared) == 1
    assert got.SerializeToString(deterministic=True) == pb.GenerateRequest.FromString(encode(sent)).SerializeToString(
        deterministic=True
    )


async def test_small_tensors_stay_in_the_message():
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        await answer(engine, request("uint8"))
        assert server.requests
        assert not server.shared


def test_every_large_tensor_has_its_own_segment():
    sent = request("uint8", **LARGE)
    pixels, grid, sizes = sent.images.tensors
    mask = replace(grid, name="mask", parts=(np.ones((1, 1 << 13), np.int64),) * 2)
    sent = replace(sent, images=replace(sent.images, tensors=(pixels, grid, sizes, mask)))
    segments = Segments()
    message = pb.GenerateRequest.FromString(encode(sent, segments))
    shared = {message.mm_inputs.pixel_values.shm.name, message.mm_inputs.model_specific_tensors["mask"].shm.name}
    assert shared == set(ours())
    assert len(shared) == 2
    assert message.mm_inputs.model_specific_tensors["image_grid_thw"].inline
    assert set(take_in(message.mm_inputs)) == shared
    assert message == pb.GenerateRequest.FromString(encode(sent))


@pytest.mark.parametrize(("offers", "wants"), [(False, True), (True, False)])
async def test_without_the_engine_or_the_operator_nothing_is_shared(offers, wants):
    async with StrictEngine(ROOMY, shm=offers) as server:
        engine = connect(server.url, shm=wants)
        assert (await answer(engine, request("uint8", **LARGE)))[-1].finish_reason == "stop"
        assert not server.shared
        await engine.close()


async def test_an_engine_on_another_host_gets_messages():
    async with StrictEngine(ROOMY) as server, client(server.url) as engine:
        server.shm_namespace = "another-boot:27"
        assert (await answer(engine, request("uint8", **LARGE)))[-1].finish_reason == "stop"
        assert not server.shared


async def test_without_room_the_message_has_the_tensor(monkeypatch, caplog):
    def full(file, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with StrictEngine(ROOMY) as server, client(server.url) as engine:
        await engine.describe()
        monkeypatch.setattr(shm.os, "write", full)
        assert (await answer(engine, request("uint8", **LARGE)))[-1].finish_reason == "stop"
        assert not server.shared
    assert "cannot be written to shared memory and go in the message: No space left on device" in caplog.text


async def test_an_engine_that_cannot_read_the_files_gets_messages_from_then_on(caplog):
    asked = {"shm_namespace_id": namespace(), "mm_device_do_normalize": True}
    async with scripted([], grpc.StatusCode.INTERNAL, **asked) as (engine, servicer):
        with pytest.raises(EngineDeclinedError):
            await answer(engine, request("uint8", grids=((44, 64),)))
        assert "let both run as one user" in caplog.text
        servicer.status, servicer.messages = None, [complete(finish_reason="stop")]
        assert (await answer(engine, request()))[-1].finish_reason == "stop"
        assert engine._memory == ""


@pytest.mark.parametrize("how", ["refused", "cancelled", "closed", "late", "client closed"])
async def test_nothing_is_left_however_a_request_ends(how):
    sent = request("uint8", **LARGE)
    async with StrictEngine(ROOMY, delay=0.0 if how.startswith("refused") else 5) as server:
        timeout = 0.1 if how == "late" else 60
        async with client(server.url, generate_timeout=timeout) as engine:
            match how:
                case "refused":
                    with pytest.raises(RequestError):
                        await answer(engine, replace(sent, images=replace(sent.images, hashes=("x", "y"))))
                case "cancelled":
                    task = asyncio.create_task(answer(engine, sent))
                    await until(lambda: server.running)
                    task.cancel()
                    await asyncio.wait([task])
                case "closed":
                    server.delay = 0.01
                    async with aclosing(engine.generate(sent)) as deltas:
                        await anext(deltas)
                case "late":
                    with pytest.raises(EngineTimeoutError):
                        await answer(engine, sent)
                case "client closed":
                    task = asyncio.create_task(answer(engine, sent))
                    await until(lambda: server.running)
                    await engine.close()
                    with pytest.raises(EngineError):
                        await task
    assert ours() == []


async def test_a_request_that_is_given_up_while_it_is_written_leaves_nothing(monkeypatch):
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = os.write

    def slow(file, data):
        loop.call_soon_threadsafe(began.set)
        time.sleep(0.1)
        return real(file, data)

    facts = replace(ROOMY, max_context=1 << 16)
    async with StrictEngine(facts) as server, client(server.url) as engine:
        await engine.describe()
        monkeypatch.setattr(shm.os, "write", slow)
        task = asyncio.create_task(answer(engine, request("uint8", grids=((160, 300),))))
        await began.wait()
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not ours())
        assert not server.requests


async def test_an_engine_that_dies_before_it_reads_leaves_nothing():
    sent = request("uint8", grids=((44, 64),))
    asked = {"shm_namespace_id": namespace(), "mm_device_do_normalize": True}
    async with scripted([], grpc.StatusCode.UNAVAILABLE, **asked) as (engine, _):
        with pytest.raises(EngineError):
            await answer(engine, sent)
    assert ours() == []


@pytest.mark.parametrize(
    ("name", "fields", "mode", "why"),
    [
        ("", {}, 0o600, "no name"),
        ("../etc/passwd", {}, 0o600, "no name"),
        ("pixelgate-test", {}, 0o644, "mode 0600"),
        ("pixelgate-test", {"nbytes": 1 << 15}, 0o600, "its handle 32768"),
        ("pixelgate-test", {"offset": 1}, 0o600, "from 1"),
    ],
)
def test_the_strict_engine_takes_only_files_as_they_must_be(name, fields, mode, why):
    path = Path("/dev/shm/pixelgate-test")
    path.write_bytes(bytes(1 << 17))
    path.chmod(mode)
    handle = common_pb2.ShmHandle(**{"name": name, "nbytes": 1 << 17, **fields})
    try:
        with pytest.raises(Refused, match=why):
            list(take_in(pb.MultimodalInputs(pixel_values=pb.TensorData(shm=handle))))
    finally:
        path.unlink()


async def test_a_file_that_is_missing_is_the_engines_failure():
    async with StrictEngine(replace(BFLOAT16, max_context=4096)) as server, client(server.url) as engine:
        await engine.describe()
        handle = common_pb2.ShmHandle(name="pixelgate-missing", nbytes=1 << 17)
        mm = pb.MultimodalInputs(pixel_values=pb.TensorData(shm=handle))
        box = [pb.GenerateRequest(request_id="r", mm_inputs=mm).SerializeToString()]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine._connection.generate(box).read()
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert not server.requests
