"""Memory settings of a process."""

import ctypes
import gc
import os
import subprocess
import sys

import numpy as np
import PIL.Image
import pytest

from pixelgate import process
from pixelgate.media.arrow import shared_pixels


@pytest.fixture
def pillow_blocks():
    core = PIL.Image.core
    before = core.get_block_size(), core.get_blocks_max()
    core.set_block_size(16 << 20)
    core.set_blocks_max(0)
    yield core
    core.set_block_size(before[0])
    core.set_blocks_max(before[1])


def test_pictures_of_12_megapixels_are_then_read_where_they_lie(pillow_blocks):
    assert shared_pixels(PIL.Image.new("RGB", (4000, 3000))) is None
    process.keep_memory(2)
    assert pillow_blocks.get_blocks_max() == 2
    image = PIL.Image.effect_noise((4000, 3000), 50).convert("RGB")
    assert shared_pixels(image)[:, :, :3].tobytes() == np.asarray(image).tobytes()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_malloc_keeps_memory_where_it_can(monkeypatch, pillow_blocks, platform):
    calls = []

    class Library:
        def __init__(self, name):
            assert name is None

        def mallopt(self, parameter, value):
            calls.append((parameter, value))

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(process.sys, "platform", platform)
    process.keep_memory()
    assert calls == ([(-4, 0), (-1, 512 << 20)] if platform == "linux" else [])


def test_threads_then_keep_large_blocks():
    """Also in a thread that began before memory was to be kept."""
    script = """
import resource, threading, time
threading.Thread(target=lambda: [bytearray(999), time.sleep(9)], daemon=True).start()
import numpy as np
from pixelgate.process import keep_memory
keep_memory()
faults = []
def work():
    for _ in range(3):
        np.empty(80 << 20, np.uint8).fill(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(faults[2] - faults[1])
"""
    environment = process.with_one_heap(os.environ)
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert int(done.stdout) < 10


def test_what_the_operator_tells_malloc_stays():
    told = process.with_one_heap({"GLIBC_TUNABLES": "glibc.malloc.check=3", "PATH": "/bin"})
    assert told == {
        "GLIBC_TUNABLES": "glibc.malloc.check=3:glibc.malloc.arena_max=1",
        "PATH": "/bin",
    }


def test_a_library_without_mallopt_is_left_alone(monkeypatch, pillow_blocks):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    process.keep_memory()
    process.settle()


def test_what_loading_took_is_given_back(monkeypatch):
    trimmed = []

    class Library:
        def __init__(self, name):
            self.malloc_trim = trimmed.append

    monkeypatch.setattr(ctypes, "CDLL", Library)
    try:
        process.settle()
        assert gc.get_freeze_count() > 1000
    finally:
        gc.unfreeze()
    assert trimmed == ([0] if process.sys.platform == "linux" else [])
