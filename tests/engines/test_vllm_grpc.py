"""The vLLM client against a strict engine in the same process: answers, facts, aborts, addresses."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace

import grpc
import numpy as np
import pytest
from engine_requests import BFLOAT16, FACTS, answer, request, until
from scripted_vllm import chunk, client, complete, scripted
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from pixelgate.engines.connect import engine as connect
from pixelgate.engines.engine import Delta, EngineFacts
from pixelgate.engines.grpc_call import Call
from pixelgate.engines.shm import namespace
from pixelgate.engines.vllm_wire import MAX_TENSOR_BYTES
from pixelgate.errors import (
    ConfigError,
    EngineError,
    EngineTimeoutError,
)
from pixelgate.fairness import Owner
from pixelgate.testing.strict_engine import StrictEngine

REPLY = (10, 11, 12, 999)


@pytest.mark.parametrize(
    ("facts", "dtype"),
    [(FACTS, "uint8"), (BFLOAT16, "bfloat16"), (replace(BFLOAT16, encoder_dtype="float32"), "float32")],
)
async def test_pictures_arrive_as_they_were_sent(facts, dtype):
    sent = request(dtype)
    async with StrictEngine(facts, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, sent)
    assert deltas == [
        Delta((10,), prompt_tokens=14, completion_tokens=1),
        Delta((11,), prompt_tokens=14, completion_tokens=2),
        Delta((12,), prompt_tokens=14, completion_tokens=3),
        Delta((999,), prompt_tokens=14, completion_tokens=4),
        Delta((), "stop", prompt_tokens=14, completion_tokens=4),
    ]
    (got,) = server.requests
    pixels = np.concatenate(sent.images.tensors[0].parts)
    assert got.mm_inputs.pixel_values.inline == pixels.tobytes()
    assert tuple(got.tokenized.input_ids) == sent.token_ids
    assert not server.cancelled
    assert not server.aborted


async def test_pictures_large_enough_for_a_thread_arrive_too():
    sent = request("uint8", grids=((160, 300),))  # 48 000 rows of 24 bytes: above 1 MiB
    facts = replace(FACTS, max_context=1 << 16, max_embeddings_per_image=0)
    async with StrictEngine(facts, reply_ids=REPLY) as server, client(server.url) as engine:
        assert (await answer(engine, sent))[-1].finish_reason == "stop"
    assert server.requests[0].mm_inputs.pixel_values.inline == sent.images.tensors[0].parts[0].tobytes()


async def test_clients_take_turns_in_being_sent(monkeypatch):
    order, gate, send = [], asyncio.Event(), Call.send

    async def late(call):
        order.append(call._message)
        await gate.wait()
        await send(call)

    monkeypatch.setattr(Call, "send", late)
    owners = [Owner(client, number) for client in "ab" for number in "0123"]
    sent = [replace(request("uint8"), request_id="".join(owner), owner=owner) for owner in owners]
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        await engine.describe()  # so that all come to their turn one after another
        asking = [asyncio.create_task(answer(engine, each)) for each in sent]
        await until(lambda: len(order) == 2)
        gate.set()
        await asyncio.gather(*asking)
    clients = [pb.GenerateRequest.FromString(message).request_id[0] for message in order]
    assert "".join(clients) == "aaababbb"  # two of the first client before anybody else was there, then in turn


async def test_without_stream_there_is_one_delta():
    async with StrictEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, request("uint8", stream=False))
    assert deltas == [Delta(REPLY, "stop", prompt_tokens=14, completion_tokens=4)]


@pytest.mark.parametrize("stream", [True, False])
async def test_max_tokens_ends_an_answer_by_length(stream):
    async with StrictEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, request(max_tokens=2, stream=stream))
    assert [token for delta in deltas for token in delta.token_ids] == [10, 11]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert deltas[-1].completion_tokens == 2


async def test_the_stop_token_is_named():
    async with StrictEngine(FACTS, reply_ids=REPLY) as server, client(server.url) as engine:
        deltas = await answer(engine, request(stop_token_ids=(11,)))
    assert deltas[-1] == Delta((), "stop", prompt_tokens=3, completion_tokens=2, matched_stop=11)


async def test_complete_may_repeat_all_ids_or_bring_new_ones_and_names_the_stop_string():
    last = complete(output_ids=[1, 2, 3, 4], finish_reason="stop", matched_stop_str="end", prompt_tokens=3)
    async with scripted([chunk(1, 2), chunk(), chunk(3), last]) as (engine, _):
        deltas = await answer(engine, request())
    assert [delta.token_ids for delta in deltas] == [(1, 2), (3,), (4,)]
    assert deltas[-1] == Delta((4,), "stop", prompt_tokens=3, completion_tokens=4, matched_stop="end")


async def test_the_facts_of_an_engine():
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        assert await engine.describe() == EngineFacts(
            model_name="qwen2_5_vl",
            model_type="qwen2_5_vl",
            pixel_dtype="uint8",
            max_context=512,
            max_images=3,
            max_embeddings_per_image=30,
            max_pixel_bytes=MAX_TENSOR_BYTES,
            takes_mixed_shapes=False,
            eos_token_ids=(999,),
            checkpoint="qwen2_5_vl",
            vocab_size=1000,
            shared_memory=namespace(),
        )
        assert await engine.healthy()
        assert engine.url == server.url


@pytest.mark.parametrize(
    ("server_info", "expected"),
    [
        ({"model_dtype": "torch.bfloat16"}, {"pixel_dtype": "bfloat16"}),
        ({"model_dtype": "float16"}, {"pixel_dtype": "float16"}),
        ({"multimodal_encoder_dtype": "float32", "mm_encoder_budget": 0}, {"pixel_dtype": "float32"}),
        ({"mm_device_do_normalize": True}, {"pixel_dtype": "uint8", "max_context": None}),
        ({"mm_item_limits": "image=8,video=2"}, {"max_images": 8}),
        ({"mm_item_limits": "video=2"}, {"max_images": 0}),
        ({"mm_item_limits": ""}, {"max_images": None, "max_embeddings_per_image": None}),
    ],
)
async def test_facts_are_read_from_the_server_info(server_info, expected):
    async with scripted(**server_info) as (engine, _):
        facts = await engine.describe()
    assert {name: getattr(facts, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("server_info", "complaint"),
    [
        ({"model_dtype": "torch.int4"}, "wants pictures as int4"),
        ({"model_dtype": ""}, "wants pictures as nothing"),
        ({"mm_item_limits": "eight"}, "cannot be read: 'eight'"),
    ],
)
async def test_facts_that_cannot_be_understood_are_named(server_info, complaint):
    async with scripted(**server_info) as (engine, _):
        with pytest.raises(EngineError, match=complaint):
            await engine.describe()


async def test_closing_the_iterator_ends_the_request_on_the_engine():
    async with StrictEngine(FACTS, reply_ids=range(100), delay=0.01) as server, client(server.url) as engine:
        async with aclosing(engine.generate(request("uint8"))) as deltas:
            assert (await anext(deltas)).token_ids == (0,)
        await until(lambda: server.cancelled == ["r-1"])
        assert server.aborted == ["r-1"]
        assert not server.running
        assert (await answer(engine, request(max_tokens=1)))[-1].finish_reason == "length"


async def test_cancelling_the_task_ends_the_request_on_the_engine():
    async with StrictEngine(FACTS, delay=5) as server, client(server.url) as engine:
        task = asyncio.create_task(answer(engine, request("uint8")))
        await until(lambda: server.running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: server.cancelled == ["r-1"])
        assert server.aborted == ["r-1"]


async def test_an_abort_from_elsewhere_is_a_finish_reason():
    async with StrictEngine(FACTS, delay=5) as server, client(server.url) as engine:
        task = asyncio.create_task(answer(engine, request()))
        await until(lambda: server.running)
        async with grpc.aio.insecure_channel(server.url.removeprefix("vllm+grpc://")) as channel:
            await vllm_engine_pb2_grpc.VllmEngineStub(channel).Abort(pb.AbortRequest(request_ids=["r-1", "none"]))
        assert await task == [Delta((), "abort", prompt_tokens=3)]
        assert server.cancelled == []


async def test_no_task_is_left_when_an_answer_has_ended():
    async with StrictEngine(FACTS) as server, client(server.url) as engine:
        await engine.describe()
        before = asyncio.all_tasks()
        await answer(engine, request())
        deltas = engine.generate(request())
        await anext(deltas)
        await deltas.aclose()
        gc.collect()
        await until(lambda: not server.running)
        await until(lambda: len(asyncio.all_tasks()) <= len(before))


@pytest.mark.parametrize(
    "url",
    [
        "vllm+grpc://",
        "vllm+grpc://host",
        "vllm+grpc://:50051",
        "vllm+grpc://host:0",
        "vllm+grpc://host:99999",
        "vllm+grpc://host:port",
        "vllm+grpc://user@host:1",
        "vllm+grpc://host:1/path",
        "vllm+grpc://host:1?x=1",
        "vllm+grpc:host:1",
        "vllm+grpc://[::1:50051",
    ],
)
def test_a_malformed_address_is_a_configuration_error(url):
    with pytest.raises(ConfigError, match=r"must look like vllm\+grpc://host:port"):
        connect(url)


@pytest.mark.parametrize("url", ["http://host:1", "host:1", "vllm+grpc", ""])
def test_an_unknown_scheme_is_a_configuration_error_that_lists_the_known(url):
    with pytest.raises(ConfigError, match=r"vllm\+grpc:"):
        connect(url)


def test_an_embedded_engine_that_is_none_is_a_configuration_error():
    with pytest.raises(
        ConfigError, match="'local:oracle' is not an embedded engine; there are local:reader and local:transf"
    ):
        connect("local:oracle")


async def test_connect_hands_over_what_the_engine_is_built_with():
    async with StrictEngine(FACTS, delay=5) as server:
        engine = connect(server.url, generate_timeout=0.1, something_for_others=1)
        with pytest.raises(EngineTimeoutError):
            await answer(engine, request())
        await engine.close()


def test_an_ipv6_address_is_taken():
    assert connect("vllm+grpc://[::1]:50051").url == "vllm+grpc://[::1]:50051"
