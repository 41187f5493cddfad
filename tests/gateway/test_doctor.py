"""`pixelgate doctor`, run outside of the loop that runs the engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket

import pytest
from running import EOS, strict_engine

from goldens.tokenizers_of import complete
from pixelgate import cli
from pixelgate.demo import CHECKPOINT
from pixelgate.engines import local
from pixelgate.testing import strict_engine as engines
from pixelgate.testing.sglang_server import SglangServer
from pixelgate.testing.strict_http import StrictHttpEngine
from pixelgate.testing.strict_sglang import StrictSglangEngine


async def examined(*arguments):
    return await asyncio.to_thread(cli.main, ["doctor", *map(str, arguments)])


def findings(printed):
    return {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in printed.splitlines()}


@pytest.mark.parametrize("checkpoint", [(), (CHECKPOINT,)])
async def test_an_engine_that_is_as_it_should_be(checkpoint, capsys):
    async with strict_engine(max_images=7) as engine:
        assert await examined("--engine", engine.url, *checkpoint) == 0
    found = findings(capsys.readouterr().out)
    assert found["engine"] == engine.url
    assert found["model"] == "checkpoint, qwen2_5_vl"
    assert found["pixels"] == "uint8, the engine normalises them"
    assert "7 pictures" in found["limits"]
    assert found["memory"] == "shared with this host"
    assert found["checkpoint"] == (str(CHECKPOINT) if checkpoint else "the engine's own files")
    assert found["probe"].startswith("a picture of 224x224, 64 tokens of ")
    (request,) = engine.requests
    count = len(request.tokenized.input_ids)
    assert found["tokens"] == f"{count} here, {count} at the engine: equal"
    assert request.sampling_params.max_tokens == 1
    assert len(engine.shared) == 1


async def test_an_engine_behind_http(capsys):
    async with StrictHttpEngine(CHECKPOINT, device_normalize=True, eos_token_ids=(EOS,), api_key="k") as engine:
        asked = ("--engine", engine.url, "--engine-api-key", "k", "--engine-model", "checkpoint", CHECKPOINT)
        assert await examined(*asked) == 0
        assert await examined("--engine", engine.url, CHECKPOINT) == 1
    printed = capsys.readouterr()
    found = findings(printed.out)
    assert found["model"] == "checkpoint, of a type that it does not say"
    assert found["weights"] == str(CHECKPOINT)
    assert found["pixels"] == "uint8, the engine normalises them"
    (request,) = engine.requests
    count = len(request.tokenized.input_ids)
    assert found["tokens"] == f"{count} here, {count} at the engine: equal"
    assert "not ready" in printed.err  # without the key


async def test_an_engine_without_files_of_its_own_needs_a_checkpoint(capsys):
    async with StrictHttpEngine(CHECKPOINT, device_normalize=True) as engine:
        assert await examined("--engine", engine.url) == 1
    assert (
        "has no files of its own, as vllm+grpc:// and sglang+grpc:// engines have: give CHECKPOINT"
        in capsys.readouterr().err
    )


async def test_an_engine_that_says_little(capsys):
    async with strict_engine(device_normalize=False, encoder_dtype="float32", max_context=4096) as engine:
        engine.shm_namespace = ""
        assert await examined("--engine", engine.url) == 0
    found = findings(capsys.readouterr().out)
    assert (found["pixels"], found["memory"]) == ("float32, normalised here", "its own")


async def test_an_engine_that_is_down(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert await examined("--engine", f"vllm+grpc://127.0.0.1:{port}", CHECKPOINT) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "pixelgate: The engine cannot be reached."


async def test_a_checkpoint_that_does_not_fit(tmp_path, capsys):
    other = shutil.copytree(CHECKPOINT, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 151_936}))
    async with strict_engine() as engine:
        assert await examined("--engine", engine.url, other) == 1
        assert not engine.requests
    printed = capsys.readouterr()
    assert "checkpoint" in findings(printed.out)
    assert "serve vocab_size 152064, but the checkpoint" in printed.err


async def test_an_engine_that_counts_otherwise(monkeypatch, capsys):
    real = engines.pb.GenerateComplete
    monkeypatch.setattr(engines.pb, "GenerateComplete", lambda **fields: real(**{**fields, "prompt_tokens": 5}))
    async with strict_engine() as engine:
        assert await examined("--engine", engine.url) == 1
    assert "tokens here, and 5 at the engine" in capsys.readouterr().err


async def test_an_engine_that_refuses_the_picture(capsys):
    async with strict_engine() as engine:
        object.__setattr__(engine.facts, "image_token_id", 5)
        assert await examined("--engine", engine.url) == 1
    assert "The engine refused the request" in capsys.readouterr().err


async def test_several_engines_are_examined_one_by_one(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        down = f"vllm+grpc://127.0.0.1:{listener.getsockname()[1]}"
    async with strict_engine() as first, StrictHttpEngine(CHECKPOINT, device_normalize=True, api_key="k") as second:
        urls = [word for url in (first.url, down, second.url) for word in ("--engine", url)]
        assert await examined(*urls, "--engine-api-key", "k", CHECKPOINT) == 1
        printed = capsys.readouterr()
        assert await examined(*urls[:2], *urls[4:], "--engine-api-key", "k", CHECKPOINT) == 0
    found = [findings(block) for block in printed.out.split("\n\n")]
    assert [each["engine"] for each in found] == [first.url, down, second.url]
    assert ["tokens" in each for each in found] == [True, False, True]
    assert printed.err.splitlines()[-1] == "pixelgate: The engine cannot be reached."


async def test_an_engine_in_this_process(monkeypatch, capsys):
    monkeypatch.setattr(local, "_load_recognizer", lambda: lambda picture: ["a word"])
    assert await examined("--engine", "local:reader", CHECKPOINT) == 0
    found = findings(capsys.readouterr().out)
    assert (found["model"], found["pixels"]) == ("reader, qwen2_5_vl", "float32, normalised here")
    assert found["tokens"].endswith("at the engine: equal")


def test_an_engine_is_needed(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", str(CHECKPOINT)])
    assert cli.main(["doctor", "--engine", "http://a:1"]) == 1
    assert "is not an engine address" in capsys.readouterr().err


async def test_an_engine_that_prepares_pictures_itself(capsys):
    async with SglangServer(["m"], model_type="qwen2_5_vl", model_path="/m", max_model_len=500) as server:
        assert await examined("--engine", server.url) == 0
        found = findings(capsys.readouterr().out)
        assert await examined("--engine", server.url, CHECKPOINT) == 0
        with_checkpoint = findings(capsys.readouterr().out)
        assert await examined("--engine", server.url.replace("sglang", "openai") + "/v1") == 0
        assert "memory" not in found
        server.model_type = "llava"
        assert await examined("--engine", server.url, CHECKPOINT) == 1
        assert "serve model_type 'llava', but the checkpoint" in capsys.readouterr().err
    assert found["model"] == "m, qwen2_5_vl"
    assert found["weights"] == "/m"
    assert found["pixels"] == "the engine prepares pictures itself; they are fetched, checked and bounded here"
    assert found["limits"] == "500 tokens of a prompt"
    assert found["checkpoint"] == "none: pictures are not planned"
    assert with_checkpoint["checkpoint"] == str(CHECKPOINT)
    assert found["probe"].startswith("a picture of 224x224, answered in")
    assert found["tokens"] == "7 at the engine, by its own count"
    assert len(server.pictures) == 1


async def test_an_engine_over_sglangs_grpc(tmp_path, capsys):
    folder = complete("llava_next", tmp_path / "llava_next")
    vocab_size = json.loads((folder / "config.json").read_text()).get("vocab_size", 210_000)
    async with StrictSglangEngine(folder, vocab_size=vocab_size, reply_ids=(5,)) as engine:
        assert await examined("--engine", engine.url, folder) == 0
    found = findings(capsys.readouterr().out)
    assert found["pixels"] == "float32, normalised here"
    assert "264241152 bytes of pixels" in found["limits"]
    assert found["tokens"].endswith("equal")
    async with StrictSglangEngine(CHECKPOINT) as engine:
        assert await examined("--engine", engine.url) == 1
    assert "M-RoPE" in capsys.readouterr().err
