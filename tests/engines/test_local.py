"""The reader engine: the real recogniser where text is read, a stand-in where only order matters."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from contextlib import aclosing

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from goldens.tokenizers_of import CHECKPOINTS
from pixelgate.demo import PICTURE
from pixelgate.engines import local
from pixelgate.engines.engine import EngineRequest, Images, Sampling, Span
from pixelgate.engines.local import NO_PICTURE, NO_TEXT, ReaderEngine
from pixelgate.errors import ConfigError, EngineError, EngineUnavailableError
from pixelgate.pixels.affine import Affine
from pixelgate.pixels.plan import ImagePlan, Patches, View, execute
from pixelgate.pixels.resample import Resample
from pixelgate.pixels.tensor import Tensor
from pixelgate.pixels.unpack import unpack
from pixelgate.processor import load

EOS = 7777
PATCHES = Patches(14, 2, 2)
AFFINE = Affine("torchvision", (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
RECEIPT = """Paper Boat Bakery
12 Harbour Street
2 Croissants 5.60
1 Rye bread 4.20
3 Oat cookies 4.50
1 Flat white 3.40
Total EUR 17.70
Thank you, come again!"""


def written(*lines, height=224, width=560):
    picture = Image.new("RGB", (width, height), "white")
    for number, line in enumerate(lines):
        ImageDraw.Draw(picture).text((28, 28 + 84 * number), line, "black", ImageFont.load_default(44))
    return np.asarray(picture)


def plan_of(picture):
    height, width, _ = picture.shape
    rows, columns = height // 14, width // 14
    view = View((height, width), Resample())
    return ImagePlan(height, width, (view,), PATCHES, AFFINE, rows * columns // 4, (1, rows, columns))


def pack(picture):
    """The processor's arithmetic for a picture that needs no resize: float32 [patches, 1176]."""
    values = np.empty(picture.shape, np.float32)
    for channel in range(3):
        mean, std = (
            np.float32(AFFINE.mean[channel]) * np.float32(255),
            np.float32(AFFINE.std[channel]) * np.float32(255),
        )
        values[..., channel] = (picture[..., channel].astype(np.float32) - mean) / std
    height, width, _ = picture.shape
    blocks = values.reshape(height // 28, 2, 14, width // 28, 2, 14, 3)
    patches = np.einsum("aypbxqc->abyxcpq", blocks).reshape(-1, 3, 1, 196)
    return np.repeat(patches, 2, axis=2).reshape(-1, 1176)


def request(*pictures, parts=None, max_tokens=None):
    plans = tuple(plan_of(picture) for picture in pictures)
    parts = tuple(pack(picture) for picture in pictures) if parts is None else parts
    images = Images(
        tensors=(Tensor("pixel_values", "float32", parts, "flat", "image_grid_thw"),),
        spans=tuple(Span(number, 1) for number in range(len(plans))),
        hashes=("0" * 64,) * len(plans),
        placeholder_id=5,
        plans=plans,
    )
    return EngineRequest("r", (1, 2, 3), Sampling(max_tokens=max_tokens), images if pictures else None)


async def deltas_of(engine, request):
    return [delta async for delta in engine.generate(request)]


def text_of(deltas):
    return bytes(token for delta in deltas for token in delta.token_ids if token != EOS).decode()


async def read(engine, *pictures, **kwargs):
    return text_of(await deltas_of(engine, request(*pictures, **kwargs)))


def new_engine():
    return ReaderEngine(model_type="qwen2_5_vl", encode=lambda text: list(text.encode()), eos_token_id=EOS)


@pytest.fixture(scope="module")
def engine():
    return new_engine()


@pytest.fixture
def recognized(monkeypatch):
    """Stands in for the recogniser: notes each picture's first byte, and waits while ``gate`` is closed."""

    class Recognized(list):
        def __init__(self):
            self.gate, self.begun = threading.Event(), threading.Event()

        def __call__(self, picture):
            self.append(int(picture[0, 0, 0]))
            self.begun.set()
            assert self.gate.wait(10)
            return [f"number {self[-1]}"]

    stand_in = Recognized()
    stand_in.gate.set()
    monkeypatch.setattr(local, "_load_recognizer", lambda: stand_in)
    return stand_in


def flat(value):
    return np.full((28, 28, 3), value, np.uint8)


async def test_the_text_in_the_tensor_is_the_answer(engine):
    deltas = await deltas_of(engine, request(written("Order 4711-B", "ready at noon")))
    assert text_of(deltas) == "I read in the picture:\n\nOrder 4711-B\nready at noon"
    assert [delta.completion_tokens for delta in deltas] == list(range(1, len(deltas) + 1))
    assert {delta.prompt_tokens for delta in deltas} == {3}
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert deltas[-1].token_ids == (EOS,)


async def test_the_demo_picture_is_read_line_by_line(engine):
    with PICTURE.open("rb") as file:
        picture = np.asarray(Image.open(file).resize((1400, 1064), Image.Resampling.BICUBIC))
    assert await read(engine, picture) == f"I read in the picture:\n\n{RECEIPT}"


async def test_patches_in_the_wrong_order_are_not_read(engine):
    picture = written("Order 4711-B")
    rows, columns = 16, 40
    blocks = pack(picture).reshape(rows // 2, columns // 2, 2, 2, 1176)
    row_by_row = np.ascontiguousarray(blocks.transpose(0, 2, 1, 3, 4)).reshape(-1, 1176)
    assert "4711" in await read(engine, picture)
    assert "4711" not in await read(engine, picture, parts=(row_by_row,))


async def test_patches_on_their_side_are_not_read(engine):
    picture = written("Order 4711-B")
    turned = np.swapaxes(pack(picture).reshape(-1, 6, 14, 14), 2, 3).reshape(-1, 1176)
    assert "4711" not in await read(engine, picture, parts=(turned,))


async def test_several_pictures_have_a_paragraph_each(engine):
    answer = await read(engine, written("first"), np.full((56, 84, 3), 255, np.uint8), written("third"))
    assert answer == f"Picture 1:\nfirst\n\nPicture 2:\n{NO_TEXT}\n\nPicture 3:\nthird"


@pytest.mark.parametrize("size", [(28, 28), (28, 2800), (2800, 28)])
async def test_any_size_is_survived(engine, size):
    assert await read(engine, np.zeros((*size, 3), np.uint8)) == NO_TEXT


async def test_without_a_picture_it_says_what_it_is(engine):
    assert await read(engine) == NO_PICTURE


@pytest.mark.parametrize("degrees", [-12, -3, 0, 5, 15])
def test_a_tilted_receipt_keeps_its_lines_together(degrees):
    angle = math.radians(degrees)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    cells = {
        "2 rolls": (0, 0, 150, 30),
        "3.10": (500, 4, 60, 24),
        "tea": (0, 50, 80, 30),
        "2.00": (500, 48, 60, 30),
        "5.10": (480, 110, 80, 44),
        "Total": (0, 118, 120, 30),
    }
    corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in cells.values()]
    boxes = np.array(corners, np.float32) @ turn.astype(np.float32)
    order = np.random.default_rng(1).permutation(len(cells))
    lines = local._lines(boxes[order], [list(cells)[index] for index in order])
    assert lines == ["2 rolls 3.10", "tea 2.00", "Total 5.10"]


async def test_max_tokens_cuts_the_answer(recognized):
    engine = new_engine()
    whole = "I read in the picture:\n\nnumber 9"
    for limit in (1, 5, len(whole)):
        deltas = await deltas_of(engine, request(flat(9), max_tokens=limit))
        assert text_of(deltas) == whole[:limit]
        assert [delta.finish_reason for delta in deltas] == [None] * (limit - 1) + ["length"]
    deltas = await deltas_of(engine, request(flat(9), max_tokens=len(whole) + 1))
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].completion_tokens == len(whole) + 1


async def test_the_event_loop_runs_while_a_picture_is_read(recognized):
    recognized.gate.clear()
    reading = asyncio.create_task(read(new_engine(), flat(1)))
    assert await asyncio.to_thread(recognized.begun.wait, 10)
    assert not reading.done()
    recognized.gate.set()
    assert await reading == "I read in the picture:\n\nnumber 1"


async def test_answers_are_streamed_in_turns(recognized):
    engine, order = new_engine(), []

    async def follow(name):
        async for _ in engine.generate(request()):
            order.append(name)

    await asyncio.gather(follow("a"), follow("b"))
    assert order[:6] == ["a", "b"] * 3


async def test_the_first_picture_is_told_before_the_second_is_read(recognized):
    async with aclosing(new_engine().generate(request(flat(1), flat(2)))) as deltas:
        await anext(deltas)
        assert recognized == [1]


async def test_tensors_are_not_read_after_the_first_delta(recognized):
    sent = request(flat(1), flat(2))
    async with aclosing(new_engine().generate(sent)) as deltas:
        answer = [await anext(deltas)]
        for part in sent.images.tensors[0].parts:
            part[...] = pack(flat(99))
        answer += [delta async for delta in deltas]
    assert text_of(answer) == "Picture 1:\nnumber 1\n\nPicture 2:\nnumber 2"


async def test_closing_the_iterator_leaves_the_rest_unread(recognized):
    engine = new_engine()
    async with aclosing(engine.generate(request(flat(1), flat(2)))) as deltas:
        await anext(deltas)
    assert await read(engine, flat(3)) == "I read in the picture:\n\nnumber 3"
    assert recognized == [1, 3]


async def test_a_cancelled_request_is_not_read_when_its_turn_comes(recognized):
    engine = new_engine()
    recognized.gate.clear()
    first, second, third = (asyncio.create_task(read(engine, flat(value))) for value in (1, 2, 3))
    assert await asyncio.to_thread(recognized.begun.wait, 10)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    recognized.gate.set()
    assert "number 1" in await first
    assert "number 3" in await third
    assert recognized == [1, 3]


async def test_closing_the_engine_finishes_one_picture_and_refuses_the_others(recognized):
    engine = new_engine()
    recognized.gate.clear()
    first, second = (asyncio.create_task(read(engine, flat(value))) for value in (1, 2))
    assert await asyncio.to_thread(recognized.begun.wait, 10)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    recognized.gate.set()
    await closing
    assert "number 1" in await first
    with pytest.raises(EngineUnavailableError, match="closed"):
        await second
    with pytest.raises(EngineUnavailableError, match="closed"):
        await read(engine, flat(3))
    assert recognized == [1]
    assert not await engine.healthy()


async def test_a_tensor_that_does_not_fit_its_plan_is_an_engine_error(recognized):
    with pytest.raises(EngineError, match="The reader failed on a picture") as caught:
        await read(new_engine(), flat(1), parts=(np.zeros((3, 1176), np.float32),))
    assert type(caught.value) is EngineError
    assert recognized == []


async def test_facts_and_warming_up(recognized):
    engine = new_engine()
    assert engine.url == "local:reader"
    assert await engine.healthy()
    facts = await engine.describe()
    await engine.describe()
    assert len(recognized) == 1
    assert (facts.model_name, facts.model_type) == ("reader", "qwen2_5_vl")
    assert (facts.pixel_dtype, facts.eos_token_ids) == ("float32", (EOS,))


@pytest.mark.parametrize("package", ["rapidocr", "onnxruntime"])
def test_a_missing_package_says_what_to_install(monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=r"pip install 'pixelgate\[gateway,reader\]'"):
        new_engine()


def test_missing_models_say_what_to_install(monkeypatch, tmp_path):
    import rapidocr

    monkeypatch.setattr(rapidocr, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(ConfigError, match=r"lacks the models .* pip install"):
        new_engine()


def test_nothing_is_fetched_and_nothing_printed():
    program = """
import asyncio, socket
def refuse(*args, **kwargs):
    print("a connection was tried")
    raise OSError
socket.getaddrinfo = socket.create_connection = refuse
from pixelgate.engines.local import ReaderEngine, _sample
engine = ReaderEngine(model_type="t", encode=str.encode, eos_token_id=0)
asyncio.run(engine.warm())
print(engine._recognize(_sample()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("['ready']\n", "")


@pytest.mark.parametrize(
    ("family", "view", "size"),
    [
        ("llava_next", 1, (300, 900)),
        ("llama4", 0, (300, 900)),
        ("phi3_5_vision", 1, (200, 200)),
        ("pixtral", 0, (64, 96)),
    ],
)
def test_the_view_that_shows_most_is_read(family, view, size):
    processor = load(CHECKPOINTS / family)
    plan = processor.plan(height=size[0], width=size[1])
    picture = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    tensor = execute(plan, picture)
    read = local._picture(plan, tensor)
    assert np.array_equal(read, unpack(plan, tensor, view))
    assert read.size == max(unpack(plan, tensor, i).size for i in range(len(plan.views)))


def test_tiles_of_another_picture_are_left_out():
    processor = load(CHECKPOINTS / "llava_next")
    plan = processor.plan(height=300, width=300)
    tensor = execute(plan, np.full((300, 300, 3), 200, np.uint8))
    filled = np.concatenate([tensor, np.zeros((3, *tensor.shape[1:]), tensor.dtype)])[None]
    assert np.array_equal(local._picture(plan, filled), local._picture(plan, tensor))
