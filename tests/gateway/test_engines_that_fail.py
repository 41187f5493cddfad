"""Engines killed, restarted, slow, refusing, answering garbage: each ends as documented, over the real protocol."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest
from running import ENDLESS, PATH, REPLY, error_of, events, gateway, image, picture, strict_engine, until
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from pixelgate.engines.vllm_grpc import VllmGrpcEngine
from pixelgate.testing import strict_engine as engines

# 200 KiB of uint8 patches: goes through shared memory
CONTENT = [image(picture(448, 448))]


@pytest.fixture
def answers(monkeypatch):
    """Let every strict engine answer with these messages, and then end with the status, if there is one."""

    def script(*messages, status=None):
        async def answer(self, request, context, abort):
            for message in messages:
                await context.write(message)
            if status is not None:
                await context.abort(status, "secret words of the engine")

        monkeypatch.setattr(engines._Servicer, "_answer", answer)

    return script


def chunk(*ids, index=0):
    return pb.GenerateResponse(chunk=pb.GenerateStreamChunk(token_ids=ids, index=index))


def complete(*ids, **fields):
    return pb.GenerateResponse(complete=pb.GenerateComplete(output_ids=ids, **fields))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_killed_an_engine_is_not_sent_to_the_next(stream):
    slow = {"delay": 0.05, "reply": ENDLESS}
    async with strict_engine(**slow) as one, strict_engine(**slow) as other, gateway((one.url, other.url)) as running:
        asked = asyncio.create_task(running.ask(CONTENT, stream=stream))
        await until(lambda: one.running or other.running)
        dead, alive = (one, other) if one.running else (other, one)
        if stream:
            await asyncio.sleep(0.2)  # so that its first text is out
        await dead.stop()
        response = await asked
        if stream:
            assert events(response.text)[-1]["error"]["code"] == "engine_unavailable"
        else:
            assert response.status_code == 503
            assert error_of(response)["code"] == "engine_unavailable"
        assert not alive.requests
        assert (await running.ask(CONTENT, max_tokens=3)).status_code == 200
        assert len(alive.requests) == 1


async def test_an_engine_that_is_restarted_is_used_again():
    async with strict_engine() as engine, gateway(engine.url) as running:
        assert (await running.ask(CONTENT)).status_code == 200
        await engine.stop()
        assert (await running.ask(CONTENT)).status_code == 503
        async with strict_engine(port=int(engine.url.rpartition(":")[2])) as restarted:

            async def healthy():
                return (await running.client.get("/health")).status_code == 200

            await until(healthy)
            response = await running.ask(CONTENT)
            assert response.json()["choices"][0]["message"]["content"] == REPLY
            assert len(restarted.requests) == 1
            assert "troubles" not in (await running.client.get("/health")).json()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_is_too_slow(monkeypatch, stream):
    monkeypatch.setitem(VllmGrpcEngine.__init__.__kwdefaults__, "generate_timeout", 0.2)
    async with strict_engine(delay=5) as engine, gateway(engine.url) as running:
        response = await running.ask(CONTENT, stream=stream)
        assert response.status_code == 504
        assert error_of(response)["code"] == "engine_timeout"
        await until(lambda: engine.cancelled)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        [pb.GenerateResponse()],
        [chunk(5, index=7)],
        [complete(5, finish_reason="error")],
        [complete(5, finish_reason="stop", index=3)],
        [],
    ],
)
async def test_an_engine_that_answers_garbage(answers, messages, stream):
    answers(*messages)
    async with strict_engine() as engine, gateway(engine.url) as running:
        response = await running.ask(CONTENT, stream=stream)
        assert response.status_code == 502
        assert error_of(response)["code"] == "engine_error"


async def test_an_engine_that_goes_on_with_garbage(answers):
    answers(chunk(40), chunk(41, index=7))
    async with strict_engine() as engine, gateway(engine.url) as running:
        response = await running.ask(CONTENT, stream=True)
        assert response.status_code == 200
        first, error = events(response.text)
        assert first["choices"][0]["delta"]["content"]
        assert error["error"]["code"] == "engine_error"


async def test_tokens_that_the_vocabulary_does_not_have_are_no_text(answers):
    answers(chunk(40), chunk(4_000_000_000), complete(finish_reason="stop"))
    async with strict_engine() as engine, gateway(engine.url) as running:
        response = await running.ask(CONTENT)
        assert response.status_code == 200
        assert len(response.json()["choices"][0]["message"]["content"]) == 1


@pytest.mark.parametrize("status", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
async def test_an_engine_that_turns_a_request_away_and_is_well(answers, monkeypatch, status):
    async with strict_engine() as one, strict_engine() as other, gateway((one.url, other.url)) as running:
        real = engines._Servicer._answer
        answers(status=status)
        turning_away = engines._Servicer._answer

        async def answer(self, request, context, abort):
            await (turning_away if self._engine is one else real)(self, request, context, abort)

        monkeypatch.setattr(engines._Servicer, "_answer", answer)
        for _ in range(4):
            assert (await running.ask(CONTENT)).status_code == 200
        assert len(one.requests) == 2  # which the other has answered, besides its own
        assert len(other.requests) == 4
        await other.stop()
        response = await running.ask(CONTENT)
        assert response.status_code == 503
        assert "secret" not in response.text


async def test_an_engine_that_fails_inside_is_not_asked_twice(answers):
    answers(status=grpc.StatusCode.INTERNAL)
    async with strict_engine() as one, strict_engine() as other, gateway((one.url, other.url)) as running:
        response = await running.ask(CONTENT)
        assert response.status_code == 502
        assert "secret" not in response.text
        assert len(one.requests) + len(other.requests) == 1


async def test_an_engine_that_nothing_listens_for():
    async with strict_engine() as one, strict_engine() as other, gateway((one.url, other.url)) as running:
        await one.stop()
        for _ in range(4):
            assert (await running.ask(CONTENT)).status_code == 200
        assert len(other.requests) == 4
        health = await running.client.get("/health")
        assert (health.status_code, health.json()["troubles"]) == (200, {"demo": ["The engine cannot be reached."]})


async def test_what_is_under_way_is_finished_when_the_gateway_stops():
    async with strict_engine(delay=0.02) as engine, httpx.AsyncClient(timeout=20) as client:
        async with gateway(engine.url) as running:
            body = {"model": "demo", "messages": [{"role": "user", "content": CONTENT}], "stream": True}
            asked = asyncio.create_task(client.post(f"http://127.0.0.1:{running.port}{PATH}", json=body))
            await until(lambda: engine.running)
        response = await asked
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == REPLY


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, None])
async def test_a_request_that_failed_leaves_no_tensor_in_memory(answers, tensors_made, stream, status):
    answers(*[] if status else [complete(1, finish_reason="error")], status=status)
    async with strict_engine() as engine, gateway(engine.url, tensor_cache_bytes=0, shm="off") as running:
        assert (await running.ask(CONTENT, stream=stream)).status_code in (502, 503)
        assert len(tensors_made) == 1
        await until(lambda: tensors_made[0]() is None)
