"""What real engines accepted and answered is asked for, field by field, and makes the same answers to clients."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from running import PATH, gateway

from pixelgate.engines.connect import engine
from pixelgate.errors import EngineError
from pixelgate.models.archive import unpack
from pixelgate.testing.recording import Recording
from pixelgate.testing.replay import replay

RECORDED = Path(__file__).parent / "recorded"
FILES = sorted(file.name for file in RECORDED.glob("*.gz"))


def checkpoint(recording, folder):
    """What the model's engine over gRPC gave of its checkpoint."""
    from smg_grpc_proto.generated import common_pb2

    giving = Recording.load(RECORDED / f"vllm-grpc.{recording.model}.gz")
    chunks = [common_pb2.GetTokenizerChunk.FromString(reply).data for reply in giving.replies("/GetTokenizer")]
    place = folder / recording.model
    place.mkdir()
    unpack(b"".join(chunks), place)
    return place


def told(body):
    """An answer or its events, without what is new each time."""
    text = body.decode()
    if not text.startswith("data: "):
        return {**json.loads(text), "id": "", "created": 0}
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    return [event if event == "[DONE]" else {**json.loads(event), "id": "", "created": 0} for event in events]


def test_there_are_recordings_of_every_model_and_protocol():
    assert {file.split(".")[0] for file in FILES} >= {"vllm-grpc", "vllm-http"}
    assert len([file for file in FILES if file.startswith("vllm-grpc")]) == 7


@pytest.mark.parametrize("file", FILES)
async def test_the_same_is_said_as_to_a_real_engine(file, tmp_path):
    recording = Recording.load(RECORDED / file)
    async with (
        replay(recording) as played,
        gateway({recording.model: played.url}, checkpoint(recording, tmp_path), shm="off") as running,
    ):
        for asked in recording.asked:
            response = await running.client.post(PATH, content=asked.request)
            assert played.differences == [], asked.title
            assert response.status_code == asked.status
            if asked.status == 200:
                assert told(response.content) == told(asked.answer)
            else:
                assert response.json() == json.loads(asked.answer)
        assert played.left == 0


@pytest.mark.parametrize("file", ["vllm-grpc.qwen2_vl.gz", "vllm-http.qwen2_vl.gz"])
async def test_what_differs_is_said_and_refused(file, tmp_path):
    recording = Recording.load(RECORDED / file)
    body = json.loads(recording.asked[1].request)
    async with (
        replay(recording) as played,
        gateway({recording.model: played.url}, checkpoint(recording, tmp_path), shm="off") as running,
    ):
        assert (await running.client.post(PATH, json={**body, "max_tokens": 7})).status_code == 400
        for difference in ("max_tokens is 7 and was 6", "logprobs is 2 and was not there", "_ids is ["):
            assert any(difference in found for found in played.differences), difference
        while played.left:
            await running.client.post(PATH, json=body)
        await running.client.post(PATH, json=body)
        assert played.differences[-1].endswith("is not expected now")


@pytest.mark.parametrize("file", ["vllm-grpc.qwen2_vl.gz", "vllm-http.qwen2_vl.gz"])
async def test_what_was_never_said(file):
    recording = Recording.load(RECORDED / file)
    async with replay(replace_exchanges(recording, ())) as played:
        found = engine(played.url)
        with pytest.raises(EngineError):
            await found.describe()
        await found.close()
    assert "is not in the recording" in played.differences[0]


def replace_exchanges(recording, exchanges):
    return msgspec.structs.replace(recording, exchanges=exchanges)


async def test_a_call_that_failed_fails_again():
    recording = Recording.load(RECORDED / "vllm-grpc.qwen2_vl.gz")
    failed = [
        msgspec.structs.replace(each, status=14, details="gone", replies=()) if "GetServerInfo" in each.name else each
        for each in recording.exchanges
    ]
    async with replay(replace_exchanges(recording, tuple(failed))) as played:
        found = engine(played.url)
        with pytest.raises(EngineError):
            await found.describe()
        await found.close()
    assert played.differences == []
