from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from running import until

from pixelgate.budget import Budget
from pixelgate.errors import BusyError, TooLargeError


def budget(total=10, wait=5.0):
    return Budget("bytes", total, wait)


async def test_a_share_is_given_back_whole_on_every_ending():
    lent = budget()
    with lent.share() as share:
        await share.take(4)
        await share.take(6)
        assert lent.used == 10
        share.release()
        assert (lent.used, share.held) == (0, 0)
        await share.take(3)
    assert lent.used == 0
    with contextlib.suppress(KeyError), lent.share() as share:
        await share.take(7)
        raise KeyError
    assert lent.used == 0


async def test_waits_are_told_where_there_were_any():
    lent, waits = budget(wait=0.05), []
    with lent.share(waited=waits.append) as share:
        await share.take(10)
        assert waits == []
        with lent.share(waited=waits.append) as second:
            asking = asyncio.create_task(second.take(1))
            await asyncio.sleep(0.01)
            share.release()
            await asking
            assert len(waits) == 1
            assert 0.005 < waits[0] < 5
            with pytest.raises(BusyError):
                await share.take(10)  # one is still the other's
    assert len(waits) == 2
    assert 0.04 < waits[1] < 5


async def test_who_waits_gets_it_in_the_order_of_asking():
    lent = budget()
    await lent.take(10)
    got = []

    async def ask(name, amount):
        await lent.take(amount)
        got.append(name)

    asking = []
    for name, amount in (("large", 8), ("small", 1), ("second small", 2)):
        asking.append(asyncio.create_task(ask(name, amount)))
        await asyncio.sleep(0)
    lent.give_back(2)
    await asyncio.sleep(0)
    assert got == []  # the small ones fit, but do not overtake
    lent.give_back(7)
    await until(lambda: got == ["large", "small"])
    assert lent.used == 10
    lent.give_back(2)
    await asyncio.gather(*asking)
    assert got == ["large", "small", "second small"]
    assert lent.used == 10


async def test_who_needs_nothing_waits_for_nobody():
    lent = budget()
    await lent.take(10)
    waiting = asyncio.create_task(lent.take(1))
    await asyncio.sleep(0)
    await asyncio.wait_for(lent.take(0), 1)
    assert not waiting.done()
    lent.give_back(10)
    await waiting


async def test_the_wait_is_bounded():
    lent = budget(wait=0.05)
    await lent.take(6)
    start = time.monotonic()
    with pytest.raises(BusyError) as caught:
        await lent.take(5)
    assert 0.04 < time.monotonic() - start < 1
    assert caught.value.status == 429
    assert lent.used == 6
    lent.give_back(6)
    await asyncio.wait_for(lent.take(10), 1)


async def test_who_gives_up_makes_room_for_who_stood_behind():
    lent = budget()
    await lent.take(6)
    large = asyncio.create_task(lent.take(5))
    await asyncio.sleep(0)
    small = asyncio.create_task(lent.take(4))
    await asyncio.sleep(0)
    assert not small.done()
    large.cancel()
    await asyncio.wait_for(small, 1)
    assert lent.used == 10
    with pytest.raises(asyncio.CancelledError):
        await large


async def test_a_turn_that_comes_as_the_request_ends_is_given_back():
    lent = budget()
    await lent.take(10)
    late = asyncio.create_task(lent.take(5))
    await asyncio.sleep(0)
    lent.give_back(10)
    assert lent.used == 5
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert lent.used == 0


async def test_what_gives_up_first_is_passed_over():
    lent = budget()
    await lent.take(10)
    late = asyncio.create_task(lent.take(5))
    await asyncio.sleep(0)
    late.cancel()
    lent.give_back(10)  # before the cancelled one has run
    await asyncio.gather(late, return_exceptions=True)
    assert lent.used == 0
    await asyncio.wait_for(lent.take(10), 1)


async def test_more_than_there_is_is_refused_at_once():
    lent = budget()
    with lent.share() as share:
        await share.take(6)
        with pytest.raises(TooLargeError, match="more than the 10 bytes") as caught:
            await share.take(5)
    assert caught.value.status == 413
    assert lent.used == 0


async def test_many_at_once_never_hold_more_than_there_is():
    lent = budget(total=20)
    most = 0

    async def hold(number):
        nonlocal most
        with lent.share() as share:
            await share.take(1 + number % 7)
            most = max(most, lent.used)
            await asyncio.sleep(0.0005 * (number % 3))
            if number % 5 == 0:
                raise KeyError

    await asyncio.gather(*(hold(number) for number in range(300)), return_exceptions=True)
    assert 15 < most <= 20
    assert lent.used == 0
