"""Choice, health and retries of a fleet: scripted engines for the rules, strict engines for the real thing."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from engine_requests import BFLOAT16, FACTS, answer, free_port, request, until

from pixelgate.engines.engine import Delta, EngineFacts
from pixelgate.engines.fleet import EngineState, Fleet
from pixelgate.engines.vllm_grpc import VllmGrpcEngine
from pixelgate.errors import (
    ConfigError,
    EngineDeclinedError,
    EngineError,
    EngineUnavailableError,
    EngineUnreachableError,
    NotCarriedError,
    NotCarriedNowError,
    RequestError,
)
from pixelgate.testing.strict_engine import StrictEngine

UINT8 = EngineFacts("m", "qwen2_vl", "uint8", max_context=100, max_images=4, vocab_size=151936)


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


async def test_a_request_that_an_engine_turned_away_goes_to_another_and_the_engine_stays():
    engines, fleet = three()
    await fleet.connect()
    engines[0].failure = engines[1].failure = EngineDeclinedError("full")
    assert [await ask(fleet) for _ in range(6)] == ["c"] * 6
    assert (engines[0].got, engines[1].got) == (2, 4)  # their turn, and of b those that a had turned away
    engines[2].failure = EngineDeclinedError("full")
    with pytest.raises(EngineUnavailableError, match="No engine"):
        await ask(fleet)
    for engine in engines:
        engine.failure = None
    assert [engine.asked for engine in engines] == [1, 1, 1]
    assert {await ask(fleet) for _ in range(3)} == {"a", "b", "c"}


async def test_an_engine_on_which_requests_fail_in_a_row_is_left_alone_for_a_while(caplog):
    engine = Scripted("a")
    fleet = Fleet([engine], breaker_failures=3, breaker_pause=0.2)
    await fleet.connect()
    engine.failure = EngineError("internal")
    for _ in range(3):
        with pytest.raises(EngineError, match="internal"):
            await ask(fleet)
    for _ in range(3):
        with pytest.raises(EngineUnavailableError):
            await ask(fleet)
    assert engine.got == 3
    assert "test://a failed on 3 requests in a row and is left alone for 0.2 seconds" in caplog.text
    assert fleet.troubles == ["internal"]
    assert not await fleet.healthy()
    await asyncio.sleep(0.2)
    with pytest.raises(EngineError, match="internal"):  # one more is tried, and it fails
        await ask(fleet)
    with pytest.raises(EngineUnavailableError):
        await ask(fleet)
    await asyncio.sleep(0.2)
    engine.failure = None
    assert await ask(fleet) == "a"
    assert fleet.troubles == []
    engine.failure = EngineError("internal")  # a good answer has closed the breaker
    for _ in range(3):
        with pytest.raises(EngineError, match="internal"):
            await ask(fleet)


async def test_an_answer_that_is_read_to_its_end_and_no_further_closes_the_breaker():
    engine = Scripted("a")
    fleet = Fleet([engine], breaker_failures=2, probe_interval=0.0)
    await fleet.connect()
    for _ in range(3):
        engine.failure = EngineError("internal")
        with pytest.raises(EngineError, match="internal"):
            await ask(fleet)
        assert [state.failures for state in fleet.states] == [1]
        engine.failure = None
        async with aclosing(fleet.generate(request())) as deltas:
            async for delta in deltas:
                if delta.finish_reason:
                    break
        assert [state.failures for state in fleet.states] == [0]


async def test_what_came_of_each_engine_is_told():
    engines, fleet = three(balance="round-robin")
    await fleet.connect()
    told = []

    async def once():
        async for _ in fleet.generate(request(), lambda *what: told.append(what)):
            pass

    async def expect(*outcomes):
        told.clear()
        await asyncio.gather(once(), return_exceptions=True)
        assert [outcome for _, outcome, _ in told] == list(outcomes)
        assert all(0 <= seconds < 5 for _, _, seconds in told)

    await expect("answered")
    for engine in engines:
        engine.failure = NotCarriedError("no field")
    await expect("not_carried", "not_carried", "not_carried")
    for engine in engines:
        engine.failure = EngineDeclinedError("full")
    await expect("declined", "declined", "declined")
    for engine in engines:
        engine.failure = RequestError("too long")
    await expect("refused")
    for engine in engines:
        engine.failure = EngineError("internal")
    await expect("failed")
    for engine in engines:
        engine.failure = EngineUnreachableError("down")
    await expect("unreachable", "unreachable", "unreachable")


async def test_a_request_that_is_given_up_is_told_of():
    engine = Scripted("a")
    fleet = Fleet([engine])
    await fleet.connect()
    engine.hold.clear()
    told = []

    async def once():
        async for _ in fleet.generate(request(), lambda *what: told.append(what[:2])):
            pass

    asking = asyncio.create_task(once())
    await until(lambda: engine.got == 1)
    assert fleet.states == [EngineState("test-0", usable=True, in_flight=1, failures=0)]
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert told == [("test-0", "aborted")]
    assert fleet.states == [EngineState("test-0", usable=True, in_flight=0, failures=0)]


async def test_names_have_no_addresses_and_are_used_again(caplog):
    caplog.set_level("INFO")
    engines = {name: Scripted(name) for name in "abcd"}
    found = ["a", "b", "c"]

    async def find():
        return [engines[name] for name in found]

    fleet = Fleet([], find=find, look_interval=0.01)
    await fleet.connect()
    assert [state.name for state in fleet.states] == ["test-0", "test-1", "test-2"]
    found[:] = ["c", "d", "a"]
    await until(lambda: len(fleet.states) == 3 and all(state.usable for state in fleet.states) and engines["b"].closed)
    assert [state.name for state in fleet.states] == ["test-2", "test-3", "test-0"]
    found[:] = ["d", "b"]
    await until(lambda: len(fleet.states) == 2)
    assert [state.name for state in fleet.states] == ["test-3", "test-1"]
    assert "test://a is called test-0" in caplog.text
    await fleet.close()


async def test_requests_that_fail_together_are_one_failure():
    engine = Scripted("a")
    fleet = Fleet([engine], breaker_failures=2)
    await fleet.connect()
    engine.dies_after_a_delta = True
    engine.hold.clear()
    together = [asyncio.create_task(ask(fleet)) for _ in range(5)]
    await until(lambda: engine.got == 5)
    engine.hold.set()
    assert all(isinstance(e, EngineUnavailableError) for e in await asyncio.gather(*together, return_exceptions=True))
    engine.dies_after_a_delta = False
    assert await ask(fleet) == "a"


def with_picture(name):
    sent = request("uint8")
    return replace(sent, images=replace(sent.images, hashes=(name, "0" * 64)))


async def test_round_robin_takes_turns_whatever_is_under_way():
    engines, fleet = three(balance="round-robin")
    await fleet.connect()
    engines[0].hold.clear()
    busy = [asyncio.create_task(ask(fleet)) for _ in range(9)]
    await until(lambda: sum(engine.got for engine in engines) == 9)
    assert [engine.got for engine in engines] == [3, 3, 3]
    engines[0].hold.set()
    assert sorted(await asyncio.gather(*busy)) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


async def test_a_picture_goes_where_it_went_before():
    engines, fleet = three(balance="image-affinity")
    await fleet.connect()

    async def went(name):
        return (await answer(fleet, with_picture(name)))[-1].matched_stop

    names = [f"{number:064x}" for number in range(60)]
    first = [await went(name) for name in names]
    assert [await went(name) for name in names] == first
    assert all(first.count(engine) > 8 for engine in "abc")
    engines[1].up = False
    await fleet.healthy()
    second = [await went(name) for name in names]
    assert all(now == then for now, then in zip(second, first, strict=True) if then != "b")  # the others stay
    assert set(second) == {"a", "c"}
    assert {await ask(fleet) for _ in range(3)} == {"a", "c"}  # a text has no picture


async def test_every_engine_is_looked_at_again_and_again():
    engines, fleet = three(look_interval=0.01, probe_interval=0.0)
    await fleet.connect()
    engines[0].up = False
    await until(lambda: fleet.troubles == ["down"])
    engines[0].up = True
    await until(lambda: fleet.troubles == [])
    await fleet.close()


async def test_a_look_that_fails_is_not_the_last(caplog):
    engines, fleet = three(look_interval=0.01, probe_interval=0.0)
    await fleet.connect()
    real, engines[0].healthy = engines[0].healthy, None  # a mistake of ours
    await until(lambda: "a look at the engines failed" in caplog.text)
    engines[0].healthy = real
    engines[1].up = False
    await until(lambda: fleet.troubles)
    await fleet.close()


async def test_engines_come_and_go(caplog):
    caplog.set_level("INFO")
    engines = [Scripted(name) for name in "abc"]
    found = engines[:2]

    async def find():
        if not found:
            raise ConfigError("what is that?")
        return list(found)

    fleet = Fleet([], find=find, look_interval=0.01, probe_interval=0.0)
    await fleet.connect()
    assert {await ask(fleet) for _ in range(4)} == {"a", "b"}
    engines[0].hold.clear()
    busy = [asyncio.create_task(ask(fleet)) for _ in range(2)]
    await until(lambda: engines[0].got == 3)
    found[:] = engines[1:]
    await until(lambda: engines[2].asked)
    assert {await ask(fleet) for _ in range(4)} == {"b", "c"}
    assert engines[0].closed == 0  # it has not finished
    engines[0].hold.set()
    assert "a" in await asyncio.gather(*busy)
    await until(lambda: engines[0].closed == 1)
    found[:] = engines[2:]
    await until(lambda: engines[1].closed == 1)  # nothing was under way
    assert "test://b is no longer an engine of this model" in caplog.text
    found.clear()
    await until(lambda: "the engines that were found last are kept: what is that?" in caplog.text)
    assert await ask(fleet) == "c"
    await fleet.close()


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


BFLOAT = replace(UINT8, pixel_dtype="bfloat16")


async def came_back(fleet, engine, facts):
    """Let an engine fail, and be another when it is asked again."""
    engine.failure, engine.facts = EngineError("internal"), facts
    await asyncio.gather(*(ask(fleet) for _ in fleet._members), return_exceptions=True)
    engine.failure = None
    return await fleet.healthy()


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (BFLOAT, "one wants bfloat16 pixels, another uint8"),
        (replace(UINT8, model_type="qwen3_vl"), "model_type is qwen3_vl, not qwen2_vl"),
        (replace(UINT8, vocab_size=99), "vocab_size is 99, not 151936"),
    ],
)
async def test_an_engine_that_comes_back_different_is_left_out(caplog, facts, why):
    engines, fleet = three(probe_interval=0.0)
    await fleet.connect()
    assert await came_back(fleet, engines[0], facts)
    assert {await ask(fleet) for _ in range(6)} == {"b", "c"}
    assert f"test://a cannot be used: It does not fit the others: {why}." in caplog.text
    assert await fleet.healthy()
    assert fleet.facts == UINT8
    engines[0].facts = UINT8
    await fleet.healthy()
    assert {await ask(fleet) for _ in range(3)} == {"a", "b", "c"}


async def test_what_one_protocol_cannot_carry_goes_to_an_engine_of_another():
    engines, fleet = three()
    await fleet.connect()
    engines[0].failure = engines[1].failure = NotCarriedError("not by this one")
    assert {await ask(fleet) for _ in range(3)} == {"c"}
    assert not fleet.troubles
    engines[2].failure = NotCarriedError("not by this one either")
    with pytest.raises(NotCarriedError) as caught:
        await ask(fleet)
    assert caught.value.status == 422


@pytest.mark.parametrize("why", ["down", "busy"])
async def test_what_one_protocol_cannot_carry_waits_for_an_engine_of_another(why):
    class Other(Scripted):
        pass

    engines = [Scripted("a"), Scripted("b"), Other("c")]
    fleet = Fleet(engines, probe_interval=0.0)
    await fleet.connect()
    engines[0].failure = engines[1].failure = NotCarriedError("not by this one", param="messages")
    engines[2].failure = EngineUnreachableError("refused") if why == "down" else EngineDeclinedError("full")
    engines[2].up = why == "busy"
    for _ in range(2):
        with pytest.raises(NotCarriedNowError, match="could carry the request cannot take it now") as caught:
            await ask(fleet)
        assert (caught.value.status, caught.value.param) == (503, "messages")
    engines[2].up, engines[2].failure = True, None
    assert await ask(fleet) == "c"
    engines[1].up = engines[2].up = False  # and of those that could not carry it anyway nobody waits
    engines[2].failure = NotCarriedError("nor by this one")
    await fleet.healthy()
    engines[2].up = True
    with pytest.raises(NotCarriedError) as caught:
        await ask(fleet)
    assert caught.value.status == 422


async def test_an_engine_that_does_not_tell_its_model_fits_any():
    silent = replace(UINT8, model_type="", vocab_size=None)
    fleet = Fleet([Scripted("a", silent), Scripted("b", replace(UINT8, vocab_size=9)), Scripted("c", silent)])
    assert await fleet.connect() == replace(UINT8, vocab_size=9)
    fleet = Fleet([Scripted("a", silent), Scripted("b"), Scripted("c", replace(UINT8, model_type="qwen3_vl"))])
    with pytest.raises(ConfigError, match="model_type is qwen3_vl"):
        await fleet.connect()


async def test_engines_that_all_come_back_with_other_pixels_are_believed():
    engines, fleet = three(probe_interval=0.0)
    await fleet.connect()
    for engine in engines:
        engine.up = False
    assert not await fleet.healthy()
    assert fleet.facts == UINT8  # what held last, while nobody says otherwise
    for engine in engines:
        engine.up, engine.facts = True, BFLOAT
    assert await fleet.healthy()
    assert fleet.facts == BFLOAT
    assert {await ask(fleet) for _ in range(3)} == {"a", "b", "c"}


async def test_an_engine_that_comes_back_alone_with_another_model_is_left_out_all_the_same():
    engine = Scripted("a")
    fleet = Fleet([engine], probe_interval=0.0)
    await fleet.connect()
    assert not await came_back(fleet, engine, replace(UINT8, model_type="qwen3_vl"))
    with pytest.raises(EngineUnavailableError):
        await ask(fleet)
    assert fleet.facts == UINT8


async def test_an_engine_that_comes_back_smaller_makes_the_fleet_smaller(caplog):
    engines, fleet = three(probe_interval=0.0)
    await fleet.connect()
    assert await came_back(fleet, engines[1], replace(UINT8, max_context=50))
    assert fleet.facts == replace(UINT8, max_context=50)
    assert "since test://b is there requests are made for other engines: max_context is 50, was 100" in caplog.text
    assert {await ask(fleet) for _ in range(3)} == {"a", "b", "c"}


async def test_mixed_shapes_are_for_fleets_of_engines_that_all_take_them():
    for other in (True, False):
        fleet = Fleet([Scripted("a"), Scripted("b", replace(UINT8, takes_mixed_shapes=other))])
        assert (await fleet.connect()).takes_mixed_shapes is other


async def test_one_model_may_have_several_paths():
    fleet = Fleet([Scripted(name, replace(UINT8, checkpoint=f"/{name}")) for name in "ab"])
    assert (await fleet.connect()).model_type == "qwen2_vl"


async def test_limits_are_those_that_hold_for_every_engine():
    fleet = Fleet(
        [
            Scripted("a", EngineFacts("m", "qwen2_vl", "uint8", max_context=100, max_images=4)),
            Scripted("b", EngineFacts("m", "qwen2_vl", "uint8", max_images=2, max_embeddings_per_image=9)),
        ]
    )
    assert await fleet.connect() == EngineFacts("m", "qwen2_vl", "uint8", 100, 2, 9)


@pytest.mark.parametrize(
    ("facts", "why"),
    [(BFLOAT, "one wants bfloat16"), (replace(UINT8, model_type="qwen3_vl"), "model_type is qwen3_vl")],
)
async def test_engines_that_disagree_are_a_configuration_error(facts, why):
    fleet = Fleet([Scripted("a"), Scripted("b", facts)])
    with pytest.raises(ConfigError, match=f"differ: {why}"):
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
    assert len(asyncio.all_tasks()) == 3  # this one, and the looks at one engine and at all
    await fleet.close()
    assert len(asyncio.all_tasks()) == 1
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
