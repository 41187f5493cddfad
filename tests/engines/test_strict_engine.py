"""The strict engine itself: what only its own protocol shows."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import socket
import sys
import zipfile

import grpc
import pytest
from engine_requests import FACTS, answer, request, until
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from pixelgate.engines.vllm_grpc import VllmGrpcEngine
from pixelgate.errors import RequestError
from pixelgate.testing import strict_engine
from pixelgate.testing.strict_engine import StrictEngine


@pytest.fixture
def checkpoint(tmp_path):
    config = {"model_type": "qwen3_vl", "vocab_size": 1000, "image_token_id": 900, "eos_token_id": [998, 999]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    processor = {"patch_size": 2, "merge_size": 2, "temporal_patch_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "weights.bin").write_bytes(b"heavy")
    return tmp_path


def stub(channel):
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


def channel(engine):
    return grpc.aio.insecure_channel(engine.url.removeprefix("vllm+grpc://"))


async def test_it_says_what_its_checkpoint_says(checkpoint):
    async with StrictEngine(checkpoint, encoder_dtype="float16") as engine, channel(engine) as wire:
        model = await stub(wire).GetModelInfo(pb.GetModelInfoRequest())
        server = await stub(wire).GetServerInfo(pb.GetServerInfoRequest())
        health = await stub(wire).HealthCheck(pb.HealthCheckRequest())
    assert (model.model_type, model.vocab_size, list(model.eos_token_ids)) == ("qwen3_vl", 1000, [998, 999])
    assert (model.served_model_name, model.model_path) == (checkpoint.name, str(checkpoint))
    assert (server.model_dtype, server.multimodal_encoder_dtype) == ("torch.float16", "float16")
    assert (server.mm_device_do_normalize, server.mm_item_limits) == (False, "image=999,video=999")
    assert health.healthy


async def test_the_reply_is_written_in_the_checkpoints_tokenizer(checkpoint):
    tokenizer = Tokenizer(WordLevel({"two": 2, "words": 3, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    assert StrictEngine(checkpoint, reply="words two").reply_ids == (3, 2, 998)
    assert StrictEngine(str(checkpoint), reply_ids=[8]).reply_ids == (8,)


def test_without_a_tokenizer_the_reply_is_its_bytes():
    assert StrictEngine(FACTS, reply="hé").reply_ids == (*"hé".encode(), 999)


async def test_the_tokenizer_comes_in_chunks_with_a_digest_in_the_last(checkpoint):
    noise = "".join(hashlib.sha256(bytes([n, k])).hexdigest() for n in range(64) for k in range(64))
    (checkpoint / "vocab.json").write_text(json.dumps(noise))  # 256 KiB of hex digits: 128 KiB compressed
    async with StrictEngine(checkpoint) as engine, channel(engine) as wire:
        chunks = [chunk async for chunk in stub(wire).GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert len(chunks) == 3
    assert [chunk.sha256 for chunk in chunks] == ["", "", hashlib.sha256(data).hexdigest()]
    names = ["chat_template.jinja", "config.json", "preprocessor_config.json", "vocab.json"]
    with zipfile.ZipFile(io.BytesIO(data)) as bundle:
        assert bundle.namelist() == names
        assert bundle.read("chat_template.jinja") == b"{{ messages }}"


async def test_without_a_checkpoint_there_is_no_tokenizer():
    async with StrictEngine(FACTS) as engine, channel(engine) as wire:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(wire).GetTokenizer(common_pb2.GetTokenizerRequest()).read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_its_load_is_what_runs():
    async with StrictEngine(FACTS, delay=5) as engine, channel(engine) as wire:
        client = VllmGrpcEngine(engine.url)
        task = asyncio.create_task(answer(client, request()))
        await until(lambda: engine.running)
        loads = await stub(wire).GetLoads(pb.GetLoadsRequest())
        assert [load.num_running_reqs for load in loads.loads] == [1]
        with pytest.raises(RequestError):
            await answer(client, request())  # the same id again
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not engine.running)
        loads = await stub(wire).GetLoads(pb.GetLoadsRequest())
        assert [load.num_running_reqs for load in loads.loads] == [0]
        await client.close()


async def test_a_picture_under_another_ones_hash_is_refused_for_life():
    async with StrictEngine(FACTS) as engine:
        client = VllmGrpcEngine(engine.url)
        first, other = request("uint8"), request("uint8", grids=((4, 4), (6, 2)))
        await answer(client, first)
        await answer(client, first)
        object.__setattr__(other.images, "hashes", first.images.hashes)
        with pytest.raises(RequestError):
            await answer(client, other)
        await client.close()


async def test_it_keeps_the_last_messages_only():
    async with StrictEngine(FACTS, keep=2) as engine:
        client = VllmGrpcEngine(engine.url)
        for number in range(3):
            await answer(client, request(request_id=str(number)))
        await client.close()
    assert [message.request_id for message in engine.requests] == ["1", "2"]


async def test_the_command_serves_as_it_was_told(checkpoint, capsys):
    options = ["--device-normalize", "--reply", "ab", "--vocab-size", "950", "--port", "0"]
    arguments = strict_engine._parser().parse_args(["--checkpoint", str(checkpoint), *options])
    server = asyncio.create_task(strict_engine.serve(arguments))
    printed = []
    await until(lambda: printed.append(capsys.readouterr().out) or "\n" in "".join(printed))
    client = VllmGrpcEngine("".join(printed).strip())
    assert (await client.describe()).pixel_dtype == "uint8"
    deltas = await answer(client, request("uint8", stream=False))
    assert deltas[0].token_ids == (97, 98, 998)
    await client.close()
    server.cancel()
    await asyncio.wait([server])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere"], "strict_engine: nowhere"),
        (["--checkpoint", "{checkpoint}", "--port", "{taken}"], "strict_engine: cannot listen on 127.0.0.1:{taken}"),
    ],
)
def test_the_command_refuses_in_one_line(arguments, message, monkeypatch, capsys, checkpoint):
    arguments = [a.replace("{checkpoint}", str(checkpoint)) for a in arguments]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["strict_engine", *(a.replace("{taken}", port) for a in arguments)])
        assert strict_engine.main() == 1
        assert capsys.readouterr().err.splitlines()[-1].startswith(message.replace("{taken}", port))
