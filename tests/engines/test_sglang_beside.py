"""Our server beside SGLang's engine, with one that stands in for it: what it is called with, and what becomes of it."""

from __future__ import annotations

import asyncio
import runpy
import sys
from contextlib import aclosing, asynccontextmanager
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from engine_requests import answer, until
from sglang_requests import FACTS, images, prompt, request
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from pixelgate.beside import sglang_engine
from pixelgate.engines import connect
from pixelgate.engines.engine import Constraint, Delta, TokenLogprob
from pixelgate.engines.sglang_grpc import SglangBesideEngine
from pixelgate.errors import (
    ConfigError,
    EngineDeclinedError,
    EngineError,
    RequestError,
    TooLargeError,
)
from pixelgate.testing.strict_sglang import StrictSglangEngine
from sglang_stand_in import REPLY, StandIn, array

PICTURES = ((2, 3), (1, 2))


@asynccontextmanager
async def beside(engine, **timeouts):
    async with sglang_engine.serving(engine, array, "127.0.0.1:0") as (_, port):
        client = SglangBesideEngine(f"sglang+engine://127.0.0.1:{port}", **timeouts)
        try:
            yield client
        finally:
            await client.close()


async def test_the_engine_gets_the_tensors_as_a_processors_output():
    stand_in, pictures = StandIn(), images(PICTURES)
    async with beside(stand_in) as engine:
        deltas = await answer(engine, request(PICTURES))
    count = len(prompt(pictures))
    assert deltas == [
        *(Delta((id_,), prompt_tokens=count, completion_tokens=i) for i, id_ in enumerate(REPLY, 1)),
        Delta((), "stop", prompt_tokens=count, completion_tokens=3, matched_stop=999),
    ]
    (call,) = stand_in.calls
    assert call["input_ids"] == list(prompt(pictures))
    assert (call["rid"], call["stream"]) == ("r-1-0", True)
    (item,) = call["image_data"]
    assert (item["format"], item["modality"]) == ("processor_output", "IMAGE")
    assert np.array_equal(item["pixel_values"][0], pictures.tensors[0].parts[0][0])
    assert item["image_sizes"].tolist() == [[8, 12], [4, 8]]


@pytest.mark.parametrize("stream", [True, False])
async def test_several_answers_and_their_log_probabilities(stream):
    stand_in = StandIn(ending={"type": "length"})
    async with beside(stand_in) as engine:
        deltas = await answer(engine, request(n=2, temperature=1.0, logprobs=1, stream=stream))
    for index in (0, 1):
        own = [delta for delta in deltas if delta.index == index]
        assert [id_ for delta in own for id_ in delta.token_ids] == list(REPLY)
        logprobs = [entry for delta in own for entry in delta.logprobs]
        assert logprobs == [TokenLogprob(id_, -0.5, ((id_, -0.5),)) for id_ in REPLY]
        assert own[-1].finish_reason == "length"
    assert [call["rid"] for call in stand_in.calls] == ["r-1-0", "r-1-1"]
    assert "n" not in stand_in.calls[0]["sampling_params"]


async def test_an_answer_that_is_not_streamed_comes_whole():
    async with beside(StandIn(ending={"type": "stop", "matched": "end"})) as engine:
        (delta,) = await answer(engine, request(stream=False, logprobs=0))
    assert (delta.token_ids, delta.finish_reason, delta.matched_stop) == (REPLY, "stop", "end")
    assert delta.logprobs == tuple(TokenLogprob(id_, -0.5) for id_ in REPLY)


async def test_all_that_chooses_tokens_arrives():
    stand_in = StandIn()
    chosen = {"top_p": 0.5, "top_k": 5, "min_p": 0.25, "frequency_penalty": 0.5, "presence_penalty": -0.5}
    async with beside(stand_in) as engine:
        await answer(engine, request(**chosen, repetition_penalty=1.5, min_tokens=1, stop=("a",), stop_token_ids=(7,)))
        await answer(engine, request(max_tokens=None, logit_bias=((7, 2.0),), ignore_eos=True))
        for kind in ("regex", "json_schema", "grammar", "structural_tag"):
            await answer(engine, request(constraint=Constraint(kind, "x")))
    first, second, *constrained = [call["sampling_params"] for call in stand_in.calls]
    assert first == {
        **{"temperature": 0.0, **chosen, "repetition_penalty": 1.5, "min_new_tokens": 1, "max_new_tokens": 64},
        **{"stop": ["a"], "stop_token_ids": [7], "ignore_eos": False},
        **{"skip_special_tokens": True, "no_stop_trim": False},
    }
    assert (second["top_p"], second["top_k"], second["repetition_penalty"]) == (1.0, -1, 1.0)
    assert (second["max_new_tokens"], second["logit_bias"], second["ignore_eos"]) == (None, {"7": 2.0}, True)
    names = ("regex", "json_schema", "ebnf", "structural_tag")
    assert [chosen[name] for chosen, name in zip(constrained, names, strict=True)] == ["x"] * 4


async def test_the_facts_of_the_server():
    async with beside(StandIn()) as engine:
        facts = await engine.describe()
        assert (facts.model_name, facts.model_type, facts.checkpoint) == ("m", "qwen2_5_vl", "/m")
        assert (facts.max_context, facts.pixel_dtype, facts.max_pixel_bytes) == (777, "float32", None)
        assert await engine.healthy()
        connection = await engine._connected()
        assert (await connection.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        assert (await connection.stub.Abort(pb.AbortRequest())).success
        with pytest.raises(EngineError):
            await engine.archive(1 << 20)


async def test_a_call_that_is_given_up_aborts_all_of_its_answers():
    stand_in = StandIn(delay=5)
    async with beside(stand_in) as engine:
        async with aclosing(engine.generate(request(n=2, temperature=1.0))) as deltas:
            task = asyncio.create_task(anext(deltas))
            await until(lambda: len(stand_in.calls) == 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: stand_in.aborted == ["r-1-0", "r-1-1"])


@pytest.mark.parametrize(
    ("stand_in", "expected"),
    [
        (StandIn(failure=ValueError("too long")), RequestError),
        (StandIn(failure=RuntimeError("odd")), EngineError),
        (StandIn(ending={"type": "abort", "status_code": 400, "message": "no"}), RequestError),
        (StandIn(ending={"type": "abort", "status_code": "500"}), EngineError),
        (StandIn(failure=sglang_engine._AbortedError({"status_code": 429})), EngineDeclinedError),
    ],
)
async def test_failures_have_their_errors(stand_in, expected):
    async with beside(stand_in) as engine:
        with pytest.raises(expected):
            await answer(engine, request(stream=False))


async def test_sglangs_own_servicer_is_not_taken_for_it():
    async with StrictSglangEngine(FACTS) as server:
        engine = SglangBesideEngine(server.url.replace("sglang+grpc", "sglang+engine"))
        with pytest.raises(EngineError, match="SGLang's own gRPC"):
            await engine.describe()
        await engine.close()


async def test_a_model_that_has_not_been_tried_is_refused():
    async with beside(StandIn(model_type="llama4")) as engine:
        with pytest.raises(EngineError, match="not for llama4"):
            await engine.describe()


def test_addresses():
    for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", ""):
        assert isinstance(connect.engine("sglang+engine://h:1", model_type=kind), SglangBesideEngine)
    with pytest.raises(ConfigError, match="not for mistral3"):
        connect.engine("sglang+engine://h:1", model_type="mistral3")
    with pytest.raises(ConfigError, match="sglang\\+engine://host:port"):
        connect.engine("sglang+engine://h")
    assert connect.begins_as_transformers("dns+sglang+engine://h:1")


async def test_a_message_may_be_larger_than_sglangs_own_servicer_takes(monkeypatch):
    monkeypatch.setattr("pixelgate.engines.sglang_wire.MAX_MESSAGE_BYTES", 10)
    async with beside(StandIn()) as engine:
        assert (await answer(engine, request(PICTURES)))[-1].finish_reason == "stop"
    async with StrictSglangEngine(FACTS) as server:
        own = connect.engine(server.url)
        with pytest.raises(TooLargeError):
            await answer(own, request(PICTURES))
        await own.close()


def test_the_command_starts_the_engine_with_sglangs_own_options(monkeypatch):
    """The file is run as it is, as it would be where pixelgate is not installed."""
    stand_in, options = StandIn(), SimpleNamespace(host="127.0.0.1", port=0)
    made = []
    sglang, arguments, torch = (ModuleType(name) for name in ("sglang", "sglang.srt.server_args", "torch"))
    sglang.Engine = lambda server_args: made.append(server_args) or stand_in
    arguments.prepare_server_args = lambda given: options if given == ["--model-path", "/m"] else None
    torch.frombuffer, torch.float32 = np.frombuffer, np.float32
    for module in (sglang, arguments, torch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "sglang.srt", ModuleType("sglang.srt"))
    monkeypatch.setattr(sys, "argv", ["sglang_engine.py", "--model-path", "/m"])

    monkeypatch.setattr(asyncio, "run", lambda work: ran.append(work))
    ran = []
    runpy.run_path(sglang_engine.__file__, run_name="__main__")
    assert made == [options]
    assert stand_in.closed
    (work,) = ran
    to_tensor = work.cr_frame.f_locals["to_tensor"]
    assert to_tensor(np.ones(2, np.float32).tobytes(), [2, 1], "float32").tolist() == [[1.0], [1.0]]
    work.close()


async def test_the_command_prints_its_address_and_serves(capsys):
    serving = asyncio.create_task(sglang_engine._serve(StandIn(), array, "127.0.0.1:0"))
    printed = ""

    def address():
        nonlocal printed
        printed += capsys.readouterr().out
        return printed

    await until(address)
    engine = SglangBesideEngine(printed.strip())
    assert (await answer(engine, request()))[-1].finish_reason == "stop"
    await engine.close()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
