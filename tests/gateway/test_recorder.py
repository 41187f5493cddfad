"""A recorder between a gateway and an engine changes nothing, and what it has kept can be replayed."""

from __future__ import annotations

import pytest
from running import CHECKPOINT, REPLY, gateway, image, picture, strict_engine, text

from pixelgate.testing.recorder import recorder
from pixelgate.testing.recording import Recording
from pixelgate.testing.replay import replay
from pixelgate.testing.strict_http import StrictHttpEngine


def http_engine():
    return StrictHttpEngine(CHECKPOINT, reply=REPLY, eos_token_ids=(151645,), device_normalize=True)


@pytest.mark.parametrize(("protocol", "start"), [("grpc", strict_engine), ("http", http_engine)])
async def test_recorded_and_replayed(protocol, start, tmp_path):
    pictures = [image(picture(60, 60)), image(picture(90, 60, 2))]
    chats = [
        {"content": "Hello"},
        {"content": [pictures[0], text("?")], "logprobs": True},
        {"content": [*pictures, pictures[0]], "stream": True},
    ]

    async def ask_all(url):
        async with gateway(url, shm="off") as running:
            answers = [await running.ask(**chat) for chat in chats]
        assert [answer.status_code for answer in answers] == [200] * 3
        return [answer.text.replace(answer.headers["x-request-id"], "") for answer in answers]

    async with start() as engine, recorder(engine.url) as between:
        first = await ask_all(between.url)
        assert [len(request.mm_inputs.mm_hashes) for request in engine.requests] == [0, 1, 3]
    Recording(f"vllm+{protocol}", "demo", tuple(between.exchanges), ()).save(tmp_path / "a.gz")
    recording = Recording.load(tmp_path / "a.gz")
    recording.save(tmp_path / "b.gz")
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    async with replay(recording) as played:
        assert played.left == 3
        again = await ask_all(played.url)
        assert (played.differences, played.left) == ([], 0)
    assert [len(text) for text in again] == [len(text) for text in first]


@pytest.mark.parametrize(("protocol", "start"), [("grpc", strict_engine), ("http", http_engine)])
async def test_a_refusal_is_passed_on_and_kept(protocol, start):
    """A picture whose pixels changed under its name is refused by the strict engine."""
    async with start() as engine, recorder(engine.url) as between:
        async with gateway(between.url, shm="off") as running:
            engine.facts = type(engine.facts)(**{**vars(engine.facts), "max_context": 10})
            assert (await running.ask("Hello, how are you today?")).status_code == 400
        kept = between.exchanges[-1]
    recording = Recording(f"vllm+{protocol}", "demo", tuple(between.exchanges), ())
    assert kept.status == (3 if protocol == "grpc" else 400)
    async with replay(recording) as played, gateway(played.url, shm="off") as running:
        assert (await running.ask("Hello, how are you today?")).status_code == 400
        assert (played.differences, played.left) == ([], 0)
