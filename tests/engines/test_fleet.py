"""Choice, health and retries of a fleet: scripted engines for the rules, strict engines for the real thing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from engine_requests import BFLOAT16, FACTS, answer, free_port, request, until

from pixelgate.engines.engine import Delta, EngineFacts
from pixelgate.engines.fleet import Fleet
from pixelgate.engines.vllm_grpc import VllmGrpcEngine
from pixelgate.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    EngineUnreachableError,
    RequestError,
)
from pixelgate.testing.strict_engine import StrictEngine

UINT8 = EngineFacts("m", "qwen2_vl", "uint8", max_context=100, max_images=4)


class Scripted:
    """An engine that answers with its name, or raises what it is told to."""

    def __init__(self, name, facts=UINT8):
        self.url = f"test://{name}"
        self.name, self.facts = name, facts
        self.asked = self.got = 0
        self.failure = None  # raised instead of an answer
        self.dies_after_a_delta = False
        self.up = True
        self.hold = asyncio.Event()
        self.hold.set()
        self.closed = self.finished = 0

    async def describe(self):
        self.asked += 1
        await asyncio.sleep(0)
        if not self.up:
            raise EngineUnreachableError("down")
        return self.facts

    async def healthy(self):
        return self.up

    async def generate(self, sent):
        self.got += 1
        if self.failure is not None:
            raise self.failure
        try:
            yield Delta((1,))
            await self.hold.wait()
            if self.dies_after_a_delta:
                raise EngineUnavailableError("gone")
            yield Delta((), "stop", matched_stop=self.name)
        finally:
            self.finished += 1

    async def close(self):
        self.closed += 1


def three(**kwargs):
    engines = [Scripted(name) for name in "abc"]
    return engines, Fleet(engines, **kwargs)


async def ask(fleet):
    return (await answer(fleet, request()))[-1].matched_stop


async def test_equal_engines_take_turns():
    _, fleet = three()
    assert await fleet.connect() == UINT8
    assert sorted([await ask(fleet) for _ in range(3)]) == ["a", "b", "c"]
    assert sorted([await ask(fleet) for _ in range(6)]) == ["a", "a", "b", "b", "c", "c"]


async def test_the_engine_with_the_fewest_requests_is_chosen():
    engines, fleet = three()
    await fleet.connect()
    for engine in engines[:2]:
        engine.hold.clear()
    busy = [asyncio.create_task(ask(fleet)) for _ in range(3)]
    await until(lambda: sum(engine.got for engine in engines) == 3)
    engines[2].hold.set()
    assert [await ask(fleet) for _ in range(4)] == ["c"] * 4
    for engine in engines[:2]:
        engine.hold.set()
    assert sorted(await asyncio.gather(*busy)) == ["a", "b", "c"]
    assert sorted([await ask(fleet) for _ in range(3)]) == ["a", "b", "c"]


async def test_a_request_that_was_not_sent_goes_to_another_engine():
    engines, fleet = three()
    await fleet.connect()
    engines[0].failure = engines[1].failure = EngineUnreachableError("refused")
    for engine in engines[:2]:
        engine.up = False
    assert [await ask(fleet) for _ in range(4)] == ["c"] * 4
    # each was tried at most once, and is left alone since
    assert engines[0].got <= 1
    assert engines[1].got <= 1


@pytest.mark.parametrize("failure", [EngineUnavailableError("socket closed"), EngineError("internal")])
async def test_a_request_that_may_have_ended_an_engine_is_not_sent_to_the_next(failure):
    engines, fleet = three()
    await fleet.connect()
    for engine in engines:
        engine.failure = failure
    with pytest.raises(type(failure)):
        await ask(fleet)
    assert sum(engine.got for engine in engines) == 1


async def test_an_engine_that_dies_after_a_delta_is_not_replaced():
    engines, fleet = three()
    await fleet.connect()
    for engine in engines:
        engine.dies_after_a_delta = True
    deltas = fleet.generate(request())
    assert (await anext(deltas)).token_ids == (1,)
    with pytest.raises(EngineUnavailableError):
        await anext(deltas)
    assert sum(engine.got for engine in engines) == 1


async def test_a_clients_mistake_says_nothing_about_the_engine():
    engines, fleet = three()
    await fleet.connect()
    for engine in engines:
        engine.failure = RequestError("bad")
    for _ in range(3):
        with pytest.raises(RequestError):
            await ask(fleet)
    assert [engine.got for engine in engines] == [1, 1, 1]
    assert [engine.asked for engine in engines] == [1, 1, 1]


async def test_after_a_failure_an_engine_is_asked_for_its_facts_again():
    engine = Scripted("a")
    fleet = Fleet([engine])
    await fleet.connect()
    await ask(fleet)
    assert engine.asked == 1
    engine.failure = EngineError("internal")
    with pytest.raises(EngineError):
        await ask(fleet)
    engine.failure = None
    assert await ask(fleet) == "a"
    assert engine.asked == 2


async def test_an_engine_that_comes_back_different_is_left_out(caplog):
    engines, fleet = three(probe_interval=0.0)
    await fleet.connect()
    engines[0].failure = EngineError("internal")
    outcomes = await asyncio.gather(*(ask(fleet) for _ in range(3)), return_exceptions=True)
    assert sum(isinstance(outcome, EngineError) for outcome in outcomes) == 1
    engines[0].failure = None
    engines[0].facts = EngineFacts("m", "qwen2_vl", "bfloat16", max_context=50, max_images=4)
    assert await fleet.healthy()
    assert {await ask(fleet) for _ in range(6)} == {"b", "c"}
    assert "test://a is left out" in caplog.text
    assert "pixel_dtype is bfloat16, not uint8; max_context is 50, less than 100" in caplog.text
    assert await fleet.healthy()
    engines[0].facts = UINT8
    await fleet.healthy()
    assert {await ask(fleet) for _ in range(3)} == {"a", "b", "c"}


async def test_limits_are_those_that_hold_for_every_engine():
    fleet = Fleet(
        [
            Scripted("a", EngineFacts("m", "qwen2_vl", "uint8", max_context=100, max_images=4)),
            Scripted("b", EngineFacts("m", "qwen2_vl", "uint8", max_images=2, max_embeddings_per_image=9)),
        ]
    )
    assert await fleet.connect() == EngineFacts("m", "qwen2_vl", "uint8", 100, 2, 9)


@pytest.mark.parametrize(("model_type", "dtype"), [("qwen2_vl", "bfloat16"), ("qwen3_vl", "uint8")])
async def test_engines_that_disagree_are_a_configuration_error(model_type, dtype):
    fleet = Fleet([Scripted("a"), Scripted("b", EngineFacts("m", model_type, dtype))])
    with pytest.raises(ConfigError, match=f"{model_type} with {dtype}"):
        await fleet.connect()


async def test_engines_that_are_down_at_first_join_later():
    engines, fleet = three(probe_interval=0.0)
    engines[0].up = engines[1].up = False
    assert await fleet.connect() == UINT8
    assert await ask(fleet) == "c"
    engines[0].up = engines[1].up = True
    assert await fleet.healthy()
    assert {await ask(fleet) for _ in range(3)} == {"a", "b", "c"}


async def test_without_an_engine_nothing_is_taken():
    engines, fleet = three(probe_interval=60)
    for engine in engines:
        engine.up = False
    with pytest.raises(EngineUnavailableError, match="No engine"):
        await fleet.connect()
    with pytest.raises(EngineUnavailableError, match="No engine"):
        await ask(fleet)
    assert not await fleet.healthy()
    assert [engine.got for engine in engines] == [0, 0, 0]
    assert [engine.asked for engine in engines] == [1, 1, 1]  # within the interval no engine is asked twice


async def test_requests_that_wait_for_the_same_look_share_it():
    engines, fleet = three(probe_interval=0.0)
    for engine in engines:
        engine.up = False
    with pytest.raises(EngineUnavailableError):
        await fleet.connect()
    for engine in engines:
        engine.up = True
    assert len(await asyncio.gather(*(ask(fleet) for _ in range(5)))) == 5
    assert [engine.asked for engine in engines] == [2, 2, 2]


async def test_an_engine_that_says_it_is_not_healthy_gets_nothing():
    engines, fleet = three(probe_interval=60)
    await fleet.connect()
    engines[1].up = False
    assert await fleet.healthy()
    assert {await ask(fleet) for _ in range(6)} == {"a", "c"}


async def test_closing_the_iterator_closes_the_engines_and_frees_its_place():
    engine = Scripted("a")
    fleet = Fleet([engine])
    await fleet.connect()
    async with aclosing(fleet.generate(request())) as deltas:
        await anext(deltas)
    assert engine.finished == 1
    assert await ask(fleet) == "a"


async def test_close_closes_every_engine_and_ends_a_look_under_way():
    engines, fleet = three(probe_interval=0.0)
    await fleet.connect()
    never = asyncio.Event()
    engines[0].describe = never.wait
    engines[0].failure = EngineUnreachableError("refused")
    await asyncio.gather(*(ask(fleet) for _ in range(3)))
    await ask(fleet)  # starts a look at the first engine, which never ends
    before = asyncio.all_tasks()
    await fleet.close()
    assert len(asyncio.all_tasks()) == len(before) - 1
    assert [engine.closed for engine in engines] == [1, 1, 1]


async def test_a_fleet_of_strict_engines_survives_the_loss_of_one():
    port = free_port()
    async with StrictEngine(FACTS) as stays:
        fleet = Fleet([VllmGrpcEngine(f"vllm+grpc://127.0.0.1:{port}"), VllmGrpcEngine(stays.url)], probe_interval=0.0)
        async with StrictEngine(FACTS, port=port) as goes:
            assert (await fleet.connect()).pixel_dtype == "uint8"
            for number in range(4):
                await answer(fleet, request("uint8", request_id=f"first-{number}"))
            assert (len(goes.requests), len(stays.requests)) == (2, 2)
        for number in range(4):
            assert (await answer(fleet, request("uint8", request_id=f"second-{number}")))[-1].finish_reason == "stop"
        assert len(stays.requests) == 6
        async with StrictEngine(BFLOAT16, port=port) as other:
            await until(fleet._members[0].engine.healthy)
            for number in range(4):
                await answer(fleet, request("uint8", request_id=f"third-{number}"))
            assert not other.requests
        assert len(stays.requests) == 8  # the last it keeps
        await fleet.close()
