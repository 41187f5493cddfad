"""The engine that runs a model in this process, with stand-ins for torch and transformers."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import fake_transformers
import numpy as np
import pytest
from engine_requests import DTYPES, PAD, answer, images, prompt, request

from pixelgate.engines import connect
from pixelgate.engines.engine import Constraint, EngineRequest, Sampling
from pixelgate.engines.local_transformers import TransformersEngine
from pixelgate.errors import ConfigError, EngineError, EngineUnavailableError, RequestError
from pixelgate.pixels.affine import Affine
from pixelgate.pixels.plan import ImagePlan, Tiles, View
from pixelgate.pixels.resample import Resample
from pixelgate.pixels.tensor import Tensor

URL = "local:transformers"
FOLDER = Path("/models/small")
EOS = 9


@pytest.fixture
def installed(monkeypatch):
    return fake_transformers.install(monkeypatch)


def new_engine(url=URL):
    return connect.engine(url, checkpoint=FOLDER, eos_token_ids=(EOS,), encode=len, model_type="", eos_token_id=1)


def planned(pictures, **aux):
    """``pictures`` with a plan for each, which has its share of the arrays ``aux``."""
    plans = tuple(
        ImagePlan(4, 4, (View((4, 4), Resample()),), Tiles(), Affine("torchvision", (0,) * 3, (1,) * 3), 4,
                  aux={name: array[i : i + 1] for name, array in aux.items()})
        for i in range(len(pictures.spans))
    )  # fmt: skip
    return replace(pictures, plans=plans)


def asking(dtype="float32", **sampling):
    """A request with two pictures of 4 and 3 tokens."""
    asked = request(dtype, **{"max_tokens": 5, **sampling})
    return replace(asked, images=planned(asked.images, image_grid_thw=np.array([[1, 4, 4], [1, 2, 6]])))


def texts(deltas):
    return [token for delta in deltas for token in delta.token_ids]


async def test_an_answer_is_told_token_by_token(installed):
    engine = new_engine()
    facts = await engine.describe()
    deltas = await answer(engine, asking(max_tokens=2))
    assert texts(deltas) == [7, 8]
    assert [delta.finish_reason for delta in deltas] == [None, "length"]
    assert [delta.completion_tokens for delta in deltas] == [1, 2]
    assert {delta.prompt_tokens for delta in deltas} == {len(asking().token_ids)}
    assert (facts.model_name, facts.model_type, facts.checkpoint) == ("small", "qwen2_5_vl", str(FOLDER))
    assert (facts.max_context, facts.vocab_size, facts.eos_token_ids) == (32, 64, (EOS,))
    await engine.close()


async def test_it_is_loaded_once_from_a_directory_and_no_code_of_it_is_run(installed):
    engine = new_engine()
    assert installed.loaded == []
    await engine.describe()
    await engine.describe()
    ((path, options),) = installed.loaded
    assert path == str(FOLDER)
    assert (options["local_files_only"], options["trust_remote_code"], options["use_safetensors"]) == (
        True,
        False,
        True,
    )
    assert installed.network.generation_config.options == {}  # what a checkpoint recommends is the gateway's to follow


@pytest.mark.parametrize(
    ("query", "gpu", "device", "dtype"),
    [
        ("", False, "cpu", "float32"),
        ("", True, "cuda", "bfloat16"),
        ("?device=cpu", True, "cpu", "float32"),
        ("?device=cuda:1&dtype=float16", False, "cuda:1", "float16"),
        ("?dtype=bfloat16", False, "cpu", "bfloat16"),
    ],
)
async def test_device_and_dtype(installed, query, gpu, device, dtype):
    installed.gpu = gpu
    engine = new_engine(URL + query)
    assert engine.url == URL + query
    assert (await engine.describe()).pixel_dtype == dtype
    assert installed.network.device == device
    assert installed.loaded[0][1]["dtype"] == dtype
    await answer(engine, asking(dtype))
    inputs = installed.network.asked[0].inputs
    assert {tensor.device for tensor in inputs.values()} == {device}
    assert inputs["pixel_values"].array.dtype == DTYPES[dtype]


@pytest.mark.parametrize("url", [f"{URL}?device", f"{URL}?cores=3", f"{URL}/x?device=cpu", f"{URL}#a"])
def test_options_that_are_none(installed, url):
    with pytest.raises(ConfigError, match=r"must look like|is not an embedded engine"):
        new_engine(url)


def test_a_dtype_that_is_none(installed):
    with pytest.raises(ConfigError, match="dtype of local:transformers must be one of float32, bfloat16, float16"):
        new_engine(f"{URL}?dtype=int8")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_says_what_to_install(installed, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'pixelgate\[gateway,transformers\]'"):
        new_engine()


async def test_a_model_that_cannot_be_loaded(installed):
    installed.refusal = OSError("no file named model.safetensors\nSee ...")
    with pytest.raises(ConfigError, match=r"cannot run the model of /models/small on cpu: no file named .*tensors$"):
        await new_engine().describe()
    installed.refusal, installed.missing_keys = None, ("lm_head.weight", "a.weight")
    with pytest.raises(ConfigError, match=r"lacks 2 of the model's weights, such as a\.weight"):
        await new_engine().describe()


async def test_the_network_gets_what_it_knows_of_our_tensors(installed):
    sent = asking()
    await answer(new_engine(), sent)
    inputs = {name: tensor.array for name, tensor in installed.network.asked[0].inputs.items()}
    assert set(inputs) == {"input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"}
    assert inputs["input_ids"].tolist() == [list(sent.token_ids)]
    assert inputs["attention_mask"].tolist() == [[1] * len(sent.token_ids)]
    assert inputs["mm_token_type_ids"].tolist() == [[int(id_ == PAD) for id_ in sent.token_ids]]
    assert np.array_equal(inputs["pixel_values"], sent.images.tensors[0].joined())
    assert inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 6]]


async def test_without_pictures_there_are_ids_alone(installed):
    deltas = await answer(new_engine(), request(max_tokens=3))
    assert texts(deltas) == [1, 2, 3]
    assert set(installed.network.asked[0].inputs) == {"input_ids", "attention_mask"}


async def test_pictures_of_several_sizes_are_filled_up_and_their_sizes_told(installed):
    installed.network = fake_transformers.Network(("input_ids", "pixel_values", "image_sizes"))
    parts = np.ones((1, 3, 4, 2), np.float32), np.full((1, 3, 2, 6), 2, np.float32)
    pictures = replace(images(), tensors=(Tensor("pixel_values", "float32", parts, "batched"),))
    pictures = planned(pictures, image_sizes=np.array([[4, 2], [2, 6]]))
    await answer(new_engine(), EngineRequest("r", prompt(pictures), Sampling(max_tokens=1), pictures))
    inputs = installed.network.asked[0].inputs
    pixels = inputs["pixel_values"].array
    assert pixels.shape == (2, 3, 4, 6)
    assert np.array_equal(pixels[:1, :, :4, :2], parts[0])
    assert np.array_equal(pixels[1:, :, :2, :6], parts[1])
    assert pixels.sum() == parts[0].sum() + parts[1].sum()
    assert inputs["image_sizes"].array.tolist() == [[4, 2], [2, 6]]


async def test_the_tensors_are_copied_before_the_first_delta(installed):
    sent = asking()
    async with aclosing(new_engine().generate(sent)) as deltas:
        await anext(deltas)
        sent.images.tensors[0].parts[0][...] = 99
        assert not (installed.network.asked[0].inputs["pixel_values"].array == 99).any()


async def chosen(installed, **sampling):
    await answer(new_engine(), asking(**sampling))
    asked = installed.network.asked[-1]
    return asked.config.options, {type(step).__name__: step.arguments for step in asked.processors[1:]}


async def test_greedy_is_greedy(installed):
    options, steps = await chosen(installed, temperature=0.0, top_p=0.5, top_k=3, min_p=0.1)
    assert options == {"do_sample": False, "max_new_tokens": 5, "eos_token_id": [EOS], "pad_token_id": EOS}
    assert steps == {}


async def test_what_decides_between_tokens(installed):
    options, steps = await chosen(
        installed, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, repetition_penalty=1.2, min_tokens=2
    )
    assert (options["do_sample"], options["temperature"], options["top_k"], options["top_p"]) == (True, 1.0, 0, 1.0)
    assert list(steps) == ["MinNewTokensLength", "RepetitionPenalty", "Temperature", "MinP", "TopK", "TopP"]
    assert steps["MinNewTokensLength"] == (len(asking().token_ids), 2, [EOS])
    assert [steps[name] for name in list(steps)[1:]] == [(1.2,), (0.5,), (0.1,), (7,), (0.9,)]


async def test_what_is_neutral_is_left_out(installed):
    options, steps = await chosen(
        installed, temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, min_tokens=0
    )
    assert options["do_sample"]
    assert steps == {}


async def test_a_seed_is_set_and_without_one_answers_differ(installed):
    await chosen(installed, seed=4711)
    await chosen(installed)
    assert installed.seeds == [4711, None]


async def test_what_ends_an_answer(installed):
    ended = (await answer(new_engine(), asking()))[-1]
    assert (ended.token_ids, ended.finish_reason, ended.matched_stop) == ((EOS,), "stop", None)
    ended = (await answer(new_engine(), asking(stop_token_ids=(8,))))[-1]
    assert (ended.token_ids, ended.finish_reason, ended.matched_stop) == ((8,), "stop", 8)
    options, _ = await chosen(installed, ignore_eos=True)
    assert (options["eos_token_id"], options["pad_token_id"]) == (None, None)
    room = fake_transformers.CONTEXT - len(asking().token_ids)
    for limit in (None, 1000):
        deltas = await answer(new_engine(), asking(max_tokens=limit, ignore_eos=True))
        assert (len(deltas), deltas[-1].finish_reason) == (room, "length")


async def test_log_probabilities(installed):
    deltas = await answer(new_engine(), asking(max_tokens=2, logprobs=2, temperature=0.5))
    total = np.log(np.exp(4) + np.exp(2) + fake_transformers.VOCABULARY - 2)
    for delta, token in zip(deltas, (7, 8), strict=True):
        (told,) = delta.logprobs
        assert told.token_id == token
        assert told.logprob == pytest.approx(4 - total)
        assert [id_ for id_, _ in told.top] == [token, 3]
        assert [logprob for _, logprob in told.top] == pytest.approx([4 - total, 2 - total])
    (delta,) = await answer(new_engine(), asking(max_tokens=1, logprobs=0))
    assert delta.logprobs[0].top == ()
    assert (await answer(new_engine(), asking(max_tokens=1)))[0].logprobs == ()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 2),
        ("frequency_penalty", 0.1),
        ("presence_penalty", -0.1),
        ("logit_bias", ((3, 1.0),)),
        ("min_tokens", 6),
        ("repetition_penalty", 0.0),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(installed, param, value):
    with pytest.raises(RequestError, match=param) as caught:
        await answer(new_engine(), asking(**{param: value}))
    assert caught.value.param == param
    assert caught.value.status == 400
    assert installed.loaded == []


async def test_a_constraint_is_refused(installed):
    with pytest.raises(RequestError, match="response_format"):
        await answer(new_engine(), asking(constraint=Constraint("json_object")))


async def test_penalties_of_nothing_are_taken(installed):
    assert texts(await answer(new_engine(), asking(frequency_penalty=0.0, presence_penalty=0.0, max_tokens=1))) == [7]


@pytest.fixture
def paused(installed):
    """Makes the network wait before its third token; has what to set for it to go on, and what it sets."""

    class Paused:
        reached, go_on = threading.Event(), threading.Event()

    def before_token(number):
        if number == 2:
            Paused.reached.set()
            assert Paused.go_on.wait(10)

    installed.network.before_token = before_token
    return Paused


async def test_requests_are_answered_one_by_one_while_the_loop_runs(installed, paused):
    engine = new_engine()
    first, second = (asyncio.create_task(answer(engine, asking(max_tokens=4, ignore_eos=True))) for _ in range(2))
    assert await asyncio.to_thread(paused.reached.wait, 10)
    assert len(installed.network.asked) == 1
    assert not first.done()
    assert (await engine.describe()).model_name == "small"
    paused.go_on.set()
    assert texts(await first) == texts(await second) == [7, 8, 9, 10]


async def test_closing_the_iterator_ends_the_answer_and_a_waiting_one_is_never_begun(installed, paused):
    engine = new_engine()
    async with aclosing(engine.generate(asking(max_tokens=9, ignore_eos=True))) as deltas:
        await anext(deltas)
        assert await asyncio.to_thread(paused.reached.wait, 10)
        waiting = asyncio.create_task(answer(engine, asking()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    paused.go_on.set()
    assert texts(await answer(engine, asking(max_tokens=1))) == [7]
    assert installed.network.steps == 3 + 1
    assert len(installed.network.asked) == 2


async def test_closing_the_engine_ends_everything(installed, paused):
    engine = new_engine()
    first, second = (asyncio.create_task(answer(engine, asking(ignore_eos=True))) for _ in range(2))
    assert await asyncio.to_thread(paused.reached.wait, 10)
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    assert not await engine.healthy()
    paused.go_on.set()
    await closing
    for task in (first, second):
        with pytest.raises(EngineUnavailableError, match="has been closed"):
            await task
    for late in (answer(engine, asking()), engine.describe()):
        with pytest.raises(EngineUnavailableError, match="has been closed"):
            await late
    assert installed.network.steps == 3


async def test_a_failure_is_an_engine_error_and_its_reason_in_the_log(installed, caplog):
    engine = new_engine()
    installed.network.failure = RuntimeError("out of memory at 0x7f")
    with pytest.raises(EngineError, match=r"^The model failed on the request\.$"):
        await answer(engine, asking())
    assert "out of memory" in caplog.text
    installed.network.failure = None
    assert texts(await answer(engine, asking(max_tokens=1))) == [7]
    assert await engine.healthy()


async def test_an_answer_without_an_end_is_an_error(installed, monkeypatch):
    monkeypatch.setattr(installed.network, "generate", lambda streamer, **inputs: streamer.end(), raising=False)
    with pytest.raises(EngineError, match="before it was complete"):
        await answer(new_engine(), asking())


def test_it_is_an_engine_whose_prompts_begin_as_transformers(installed):
    assert isinstance(new_engine(), TransformersEngine)
    assert [connect.begins_as_transformers(url) for url in (URL, f"{URL}?device=cpu", "local:reader")] == [
        True,
        True,
        False,
    ]
