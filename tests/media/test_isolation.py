"""Pictures over which a decoder dies, hangs or takes any amount of memory; and that nobody else notices."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pixelgate.errors import ConfigError, DecodeError, InternalError, TooLargeError
from pixelgate.media import decode as decoder
from pixelgate.media import decoder_process, isolation
from pixelgate.media.isolation import Isolation
from pixelgate.media.policy import MediaPolicy

BAD = (sys.executable, str(Path(__file__).with_name("bad_decoder.py")))
POLICY = MediaPolicy(decode_timeout=5)
NOISE = np.random.default_rng(0).integers(0, 256, (40, 30, 3), np.uint8)


def encoded(kind, array=NOISE, **options):
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind, **options)
    return file.getvalue()


def run(work, policy=POLICY, processes=1, command=BAD):
    """``await work(isolation)``; afterwards none of its processes is left."""

    async def inside():
        async with Isolation(policy, processes, command=command) as isolated:
            result = await work(isolated)
            left = [process._process for process in isolated._all]
        assert all(process.returncode is not None for process in left)
        return result

    return asyncio.run(inside())


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "BMP", "TIFF", "AVIF", "PNG", "JPEG"])
def test_headers_and_pixels_are_those_of_this_process(kind):
    data = encoded(kind)

    async def work(isolated):
        return await isolated.header(data), await isolated.rows(data), await isolated.rows(data, "pil")

    header, rows, by_pil = run(work, command=isolation._COMMAND)
    assert header == decoder.header(data, POLICY)
    for found, backend in ((rows, "torchvision"), (by_pil, "pil")):
        assert np.array_equal(found[:, :, :3], decoder.decode(data, POLICY, backend))


def test_refusals_have_the_words_of_this_process_and_leave_it_alive():
    async def work(isolated):
        await isolated.rows(encoded("GIF"))
        (process,) = isolated._all
        for data in (encoded("GIF")[:100], encoded("GIF", np.zeros((9, 999), np.uint8))):
            with pytest.raises((DecodeError, TooLargeError)) as here:
                decoder.decode(data, isolated.policy)
            with pytest.raises((DecodeError, TooLargeError)) as there:
                await isolated.rows(data)
            assert (type(there.value), there.value.message) == (type(here.value), here.value.message)
        assert isolated._all == {process}

    run(work, MediaPolicy(decode_timeout=5, max_pixels=2000))


@pytest.mark.parametrize("how", [b"abort", b"segfault", b"leave", b"half", b"five channels", b"too many"])
def test_a_decoder_that_breaks_down_costs_one_picture(how, caplog):
    async def work(isolated):
        with pytest.raises(DecodeError, match="the GIF picture cannot be decoded: its decoder broke down over it"):
            await isolated.rows(b"GIF89a!" + how)
        assert np.array_equal((await isolated.rows(encoded("PNG")))[:, :, :3], NOISE)
        assert len(isolated._all) == 1

    caplog.set_level(logging.WARNING)
    run(work, MediaPolicy(decode_timeout=5, max_pixels=10_000))
    assert "over a GIF picture of" in caplog.text


def test_a_decoder_that_hangs_is_killed_and_the_next_picture_works(caplog):
    async def work(isolated):
        start = time.monotonic()
        with pytest.raises(DecodeError, match=r"decoding the GIF picture takes longer than the limit of 0\.5 seconds"):
            await isolated.rows(b"GIF89a!hang")
        assert 0.4 < time.monotonic() - start < 3
        assert np.array_equal((await isolated.rows(encoded("PNG")))[:, :, :3], NOISE)

    caplog.set_level(logging.WARNING)
    run(work, MediaPolicy(decode_timeout=0.5))
    assert "a decoder process took too long over a GIF picture of 11 bytes" in caplog.text


def test_other_pictures_in_flight_are_not_lost():
    async def work(isolated):
        slow = [asyncio.create_task(isolated.rows(b"GIF89a!slow")) for _ in range(2)]
        await asyncio.sleep(0.1)
        bad = [isolated.rows(b"GIF89a!abort"), isolated.rows(b"GIF89a!hang")]
        outcomes = await asyncio.gather(*bad, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DecodeError] * 2
        for rows in await asyncio.gather(*slow):
            assert np.array_equal(rows, np.full((2, 3, 3), 7, np.uint8))

    run(work, MediaPolicy(decode_timeout=1), processes=3)


def test_a_process_killed_from_outside_costs_its_picture_and_an_idle_one_nothing():
    async def work(isolated):
        await isolated.rows(encoded("PNG"))
        task = asyncio.create_task(isolated.rows(b"GIF89a!slow"))
        await asyncio.sleep(0.2)
        (process,) = isolated._all
        process._process.send_signal(signal.SIGKILL)
        with pytest.raises(DecodeError, match="broke down"):
            await task
        await isolated.rows(encoded("PNG"))
        (process,) = isolated._all
        process._process.send_signal(signal.SIGKILL)
        process._process.wait()
        assert np.array_equal((await isolated.rows(encoded("PNG")))[:, :, :3], NOISE)

    run(work)


def test_memory_is_limited_by_the_kernel():
    data = encoded("GIF", np.zeros((4000, 4000), np.uint8))

    async def refused(isolated):
        with pytest.raises(TooLargeError, match="more memory than is allowed"):
            await isolated.rows(data)
        return await isolated.rows(encoded("PNG"))

    async def taken(isolated):
        return await isolated.rows(data)

    assert run(refused, MediaPolicy(decode_memory=32 << 20)).shape[:2] == (40, 30)
    assert run(taken).shape[:2] == (4000, 4000)


def test_there_are_no_more_processes_than_allowed_and_than_needed():
    async def work(isolated):
        assert not isolated._all
        for _ in range(3):
            await isolated.rows(encoded("GIF"))
        assert len(isolated._all) == 1
        await asyncio.gather(*(isolated.rows(b"GIF89a!slow") for _ in range(4)))
        assert len(isolated._all) == 2
        busy = asyncio.create_task(isolated.rows(b"GIF89a!slow"))
        await asyncio.sleep(0.1)
        isolated.rest()
        assert len(isolated._all) == 1
        assert (await busy).shape == (2, 3, 3)
        assert len(isolated._all) == 1

    run(work, processes=2)


def test_a_process_is_told_no_secrets(monkeypatch):
    monkeypatch.setenv("PIXELGATE_API_KEY", "sesame")

    async def work(isolated):
        with pytest.raises(DecodeError) as caught:
            await isolated.rows(b"GIF89a!tell")
        return caught.value.message

    told = run(work, MediaPolicy(local_root="/srv/secret", allow_private=("vault.internal",), max_pixels=77))
    assert "PATH" in told
    assert "max_pixels=77" in told
    for secret in ("PIXELGATE", "sesame", "secret", "vault"):
        assert secret not in told


def test_what_is_decoded_in_processes():
    isolated = Isolation(POLICY, 1)
    for kind in ("WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        assert isolated.takes(encoded(kind))
    progressive = encoded("JPEG", progressive=True)
    last = progressive.rindex(b"\xff\xda")
    many = progressive[:-2] + progressive[last:-2] * 20 + progressive[-2:]
    assert isolated.takes(many)
    for data in (encoded("PNG"), encoded("JPEG"), progressive, b"", b"\xff\xd8\xff"):
        assert not isolated.takes(data)
    none = Isolation(MediaPolicy(isolate=()), 1)
    assert not none.takes(encoded("GIF"))
    assert not none.takes(many)


def test_nothing_is_started_where_nothing_is_isolated():
    async def work(isolated):
        return len(isolated._all)

    assert run(work, MediaPolicy(isolate=())) == 0


@pytest.mark.parametrize("command", [("false",), (sys.executable, "-c", "print('hello')"), ("cat",)])
def test_a_decoder_that_cannot_start_ends_the_start(command, monkeypatch):
    monkeypatch.setattr(isolation, "_START_SECONDS", 0.5)

    async def work(isolated):
        raise AssertionError("it started")

    with pytest.raises(ConfigError, match="a decoder process did not start"):
        run(work, command=command)


def test_after_the_end_nothing_starts():
    async def work(isolated):
        return isolated

    with pytest.raises(InternalError):
        run(work)._start()


def test_pictures_in_flight_at_the_end_are_refused():
    async def inside():
        async with Isolation(POLICY, 1, command=BAD) as isolated:
            await isolated.rows(encoded("GIF"))
            task = asyncio.create_task(isolated.rows(b"GIF89a!hang"))
            await asyncio.sleep(0.2)
        with pytest.raises(DecodeError):
            await task

    start = time.monotonic()
    asyncio.run(inside())
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("doing", [b"hang", b""])
def test_processes_end_with_the_gateway_however_it_ends(doing):
    script = f"""
import asyncio, os, signal
from pixelgate.media.isolation import Isolation
from pixelgate.media.policy import MediaPolicy
async def main():
    async with Isolation(MediaPolicy(decode_timeout=0.5), 1, command={BAD!r}) as isolated:
        isolated._idle.append(isolated._start())
        (process,) = isolated._all
        if {doing!r}:
            asyncio.create_task(isolated.rows(b"GIF89a!" + {doing!r}))
            await asyncio.sleep(0.2)
        print(process._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    process = Path(f"/proc/{int(done.stdout)}/stat")
    for _ in range(500):
        if not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z":  # Z: nobody reaps it here
            return
        time.sleep(0.01)
    raise AssertionError("the decoder process outlived its gateway")


# The other side, in this process


def test_a_decoder_process_from_start_to_end(monkeypatch):
    limits = {}
    monkeypatch.setattr(resource, "setrlimit", lambda limit, values: limits.update({limit: values}))
    monkeypatch.setattr(os, "dup2", lambda _, descriptor: limits.update({f"descriptor {descriptor}": True}))
    monkeypatch.setattr(Path, "write_text", lambda path, text: limits.update({str(path): text}))
    monkeypatch.setattr(decoder_process, "keep_memory", lambda: None)
    monkeypatch.setattr(decoder_process.AvifImagePlugin, "DEFAULT_MAX_THREADS", 0)
    ours, theirs = socket.socketpair()
    told = isolation.pickle.dumps(POLICY)
    good, bad = encoded("GIF"), b"GIF89a"
    ours.sendall(decoder_process.LENGTH.pack(len(told)) + told)
    for work, data in ((0, good), (1, good), (1, bad)):
        ours.sendall(decoder_process.JOB.pack(work, 0, len(data)) + data)
    ours.shutdown(socket.SHUT_WR)
    monkeypatch.setattr(sys, "argv", ["", str(theirs.detach())])
    decoder_process.main()
    with ours:
        answers = ours.recv(1 << 20)
    pixels = decoder.decode(good, POLICY)
    message = b"the GIF picture is damaged, cut short, or of a kind that is not supported"
    assert answers[:1] == decoder_process.READY
    assert answers[1:11] == decoder_process.ANSWER.pack(0, 0, 40, 30)
    rows = np.frombuffer(answers[21 : -len(message) - 10], np.uint8).reshape(40, 30, -1)
    assert answers[11:21] == decoder_process.ANSWER.pack(0, rows.shape[2], 40, 30)
    assert np.array_equal(rows[:, :, :3], pixels)
    assert answers[-len(message) - 10 :] == decoder_process.ANSWER.pack(1, 0, 0, len(message)) + message
    assert limits.pop(resource.RLIMIT_AS)[0] > POLICY.decode_memory
    assert limits == {
        resource.RLIMIT_NOFILE: (32, 32),
        resource.RLIMIT_FSIZE: (0, 0),
        resource.RLIMIT_CORE: (0, 0),
        "/proc/self/oom_score_adj": "1000",
        "descriptor 1": True,
        "descriptor 2": True,
    }
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
