"""Whose turn it is: clients alternate, and so do the requests of each."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pixelgate.budget import Budget
from pixelgate.errors import BusyError
from pixelgate.fairness import FairQueue, Owner
from pixelgate.gateway.threads import Threads


def drained(queue):
    order = []
    while queue:
        assert queue.peek() == queue.peek()
        first = queue.peek()
        order.append(queue.pop())
        assert order[-1] == first
    return order


def test_clients_and_their_requests_take_turns():
    queue = FairQueue()
    for item in ("a1-1", "a1-2", "a1-3", "a2-1", "b1-1", "b1-2", "c1-1"):
        queue.push(Owner(item[0], item[:2]), item)
    assert drained(queue) == ["a1-1", "b1-1", "c1-1", "a2-1", "b1-2", "a1-2", "a1-3"]
    queue.push(Owner("b", "b1"), "again")
    assert drained(queue) == ["again"]


def test_a_client_waits_with_no_more_than_its_share_of_requests():
    queue = FairQueue()
    for number in range(4):
        assert not queue.is_full_for(Owner("a", str(number)), 4)
        queue.push(Owner("a", str(number)), number)
    assert queue.is_full_for(Owner("a", "another"), 4)
    assert not queue.is_full_for(Owner("a", "3"), 4)  # it waits already, for another picture
    assert not queue.is_full_for(Owner("b", "1"), 4)
    queue.push(Owner("b", "1"), 1)
    queue.push(Owner("b", "2"), 2)
    assert queue.is_full_for(Owner("b", "3"), 4)
    for client in "cdefg":
        assert not queue.is_full_for(Owner(client, "1"), 4)  # everybody may have one
        queue.push(Owner(client, "1"), 1)
        assert queue.is_full_for(Owner(client, "2"), 4)


async def test_who_gives_up_takes_nobodys_turn():
    budget, served = Budget("bytes", 10, wait=30, most_waiting=4), []
    await budget.take(10)

    async def ask(client, number):
        await budget.take(10, Owner(client, str(number)))
        served.append((client, number))
        budget.give_back(10)

    gone = [asyncio.create_task(ask("a", number)) for number in range(3)]
    await asyncio.sleep(0)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    waiting = [asyncio.create_task(ask(client, number)) for number in (7, 8) for client in "ab"]
    await asyncio.sleep(0)
    budget.give_back(10)
    await asyncio.gather(*waiting)
    assert served == [("a", 7), ("b", 7), ("a", 8), ("b", 8)]
    assert budget.used == 0
    assert not budget._queue


async def test_a_full_queue_is_told_at_once():
    budget = Budget("bytes", 10, wait=30, most_waiting=2)
    await budget.take(10)
    waiting = [asyncio.create_task(budget.take(1, Owner("a", str(i)))) for i in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(BusyError):
        await budget.take(1, Owner("a", "2"))
    other = asyncio.create_task(budget.take(1, Owner("b", "1")))
    await asyncio.sleep(0)
    budget.give_back(10)
    await asyncio.gather(*waiting, other)
    assert budget.used == 3


async def test_one_picture_does_not_wait_for_two_hundred():
    threads, order, go = Threads(1), [], threading.Event()

    def work(name):
        go.wait(5)
        order.append(name)

    try:
        many = [asyncio.create_task(threads.run(Owner("a", "many"), work, f"a{i}")) for i in range(200)]
        await asyncio.sleep(0)
        same_client = asyncio.create_task(threads.run(Owner("a", "one"), work, "a-one"))
        other_client = asyncio.create_task(threads.run(Owner("b", "one"), work, "b-one"))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*many, same_client, other_client)
    finally:
        threads.shutdown()
    assert max(order.index("b-one"), order.index("a-one")) < 8
    assert [name for name in order if "-" not in name] == [f"a{i}" for i in range(200)]


async def test_work_that_is_given_up_is_not_begun_and_its_turn_goes_on():
    threads, begun, go = Threads(1), [], threading.Event()

    def work(name):
        begun.append(name)
        go.wait(5)
        return name

    def fails():
        raise ValueError("no")

    try:
        tasks = [asyncio.create_task(threads.run(Owner("a", str(i)), work, i)) for i in range(5)]
        await asyncio.sleep(0.05)
        for task in tasks[:1] + tasks[2:4]:  # the running one, and two that wait
            task.cancel()
        failing = asyncio.create_task(threads.run(Owner("b", "1"), fails))
        await asyncio.sleep(0)
        go.set()
        assert await tasks[1] == 1
        assert await tasks[4] == 4
        with pytest.raises(ValueError, match="no"):
            await failing
        assert begun == [0, 1, 4]
        assert await threads.run(Owner(), work, "last") == "last"
        await asyncio.sleep(0.05)
        assert threads._turns.used == 0
    finally:
        threads.shutdown()
    with pytest.raises(RuntimeError):
        await threads.run(Owner(), work, "late")
    assert threads._turns.used == 0
