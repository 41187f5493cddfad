"""The budgets over all requests: bounded waiting, then 429, and nothing kept on any ending."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
from aiohttp import web
from running import error_of, gateway, image, picture, strict_engine, tasks, until

from pixelgate.budget import Budget
from pixelgate.gateway import pictures, services
from pixelgate.media.policy import MediaPolicy


@pytest.fixture
def budgets(monkeypatch):
    """The budgets of the gateways that are made meanwhile, by unit."""
    made = {}

    def make(unit, *limits):
        made[unit] = Budget(unit, *limits)
        return made[unit]

    monkeypatch.setattr(services, "Budget", make)
    return made


@contextlib.asynccontextmanager
async def hosting(handler):
    application = web.Application()
    application.router.add_get("/{path:.*}", handler)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def nothing_is_held(budgets):
    await until(lambda: all(budget.used == 0 for budget in budgets.values()))


def small(engine, **settings):
    media = MediaPolicy(isolate=(), allow_private=("127.0.0.1",), fetch_timeout=5.0)
    return gateway(engine.url, media=media, **{"budget_wait": 0.2, **settings})


async def test_bytes_are_held_until_the_engine_has_the_request(budgets):
    async with strict_engine(delay=0.05) as engine, small(engine) as running:
        asked = asyncio.create_task(running.ask([image(picture(56, 56))], stream=True))
        await until(lambda: engine.running)
        assert budgets["bytes"].used == 0
        assert not asked.done()
        assert (await asked).status_code == 200
        await nothing_is_held(budgets)


async def test_a_request_that_finds_no_room_is_told_when_to_come_again(budgets):
    async with strict_engine() as engine, small(engine, max_bytes_in_flight=20_000) as running:
        await budgets["bytes"].take(15_000)
        start = time.monotonic()
        response = await running.ask("a" * 6000)
        assert 0.15 < time.monotonic() - start < 2
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        error = error_of(response)
        assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "gateway_busy", None)
        assert budgets["bytes"].used == 15_000
        assert (await running.ask("a" * 2000)).status_code == 200
        waiting = asyncio.create_task(running.ask("a" * 6000))
        await asyncio.sleep(0.05)
        budgets["bytes"].give_back(15_000)
        assert (await waiting).status_code == 200
        await nothing_is_held(budgets)


async def test_fetched_bytes_count_as_they_arrive(budgets):
    async def answer(request):
        if request.path == "/ok":
            return web.Response(body=picture(56, 56))
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(40):
            await response.write(b"a" * 1000)
            await asyncio.sleep(0.005)
        return response

    async with (
        hosting(answer) as url,
        strict_engine() as engine,
        small(engine, max_bytes_in_flight=30_000) as running,
    ):
        assert (await running.ask([image(f"{url}/ok")] * 2)).status_code == 200
        response = await running.ask([image(f"{url}/large")])
        assert response.status_code == 413
        assert "more than the 30000 bytes that all requests together may hold" in error_of(response)["message"]
        await nothing_is_held(budgets)
        await budgets["bytes"].take(20_000)
        response = await running.ask([image(f"{url}/ok"), image(f"{url}/large")])
        assert response.status_code == 429
        assert budgets["bytes"].used == 20_000


async def test_pixels_are_taken_picture_by_picture_and_tensors_for_a_whole_request(budgets):
    limits = {"max_pixels_in_flight": 100 * 100, "max_tensor_bytes_in_flight": 160_000}
    async with strict_engine() as engine, small(engine, **limits) as running:
        assert (await running.ask([image(picture(100, 100, n)) for n in (1, 2)])).status_code == 200
        response = await running.ask([image(picture(100, 101))])
        assert response.status_code == 413
        assert "10000 pixels that all requests" in error_of(response)["message"]
        response = await running.ask([image(picture(56, 56, n)) for n in range(5)] * 3)
        assert response.status_code == 413
        assert error_of(response)["param"] == "messages"
        assert "160000 bytes of tensors that all" in error_of(response)["message"]
        await budgets["pixels"].take(1)
        assert (await running.ask([image(picture(100, 100, 3))])).status_code == 429
        assert (await running.ask([image(picture(100, 99, 3))])).status_code == 200
        assert budgets["pixels"].used == 1
        assert budgets["bytes"].used == budgets["bytes of tensors"].used == 0


@pytest.mark.parametrize(
    "content",
    [
        [image(b"no picture")],
        [image(picture(56, 56)), image(picture(56, 56)[:-700])],
        [image(picture(402, 2))],
        [image("http://10.0.0.1/")],
        [image(picture(56, 56))] * 40,
    ],
)
async def test_errors_give_everything_back(budgets, content):
    async with strict_engine() as engine, small(engine) as running:
        assert (await running.ask(content)).status_code in (400, 422)
        await nothing_is_held(budgets)
        assert (await running.client.post("/v1/chat/completions", content=b"{" * 1000)).status_code == 400
        await nothing_is_held(budgets)


async def test_clients_that_hang_up_give_everything_back(budgets, monkeypatch):
    async def never(request):
        await asyncio.sleep(30)

    async with hosting(never) as url, strict_engine() as engine, small(engine) as running:
        before = tasks()
        asked = asyncio.create_task(running.ask([image(picture(56, 56)), image(f"{url}/never")]))
        await until(lambda: budgets["bytes"].used > 0)
        asked.cancel()
        await nothing_is_held(budgets)

        slow, leave = threading.Event(), threading.Event()

        def stay(*arguments, **options):
            slow.set()
            leave.wait(30)

        monkeypatch.setattr(pictures, "execute", stay)
        asked = asyncio.create_task(running.ask([image(picture(56, 56))]))
        await asyncio.to_thread(slow.wait)
        assert budgets["pixels"].used == 56 * 56
        assert budgets["bytes of tensors"].used > 0
        asyncio.get_running_loop().call_later(0.1, leave.set)
        asked.cancel()
        await nothing_is_held(budgets)
        await until(lambda: tasks() <= before)


async def test_a_prompt_does_not_wait_for_the_pictures_of_others(monkeypatch):
    begun, leave, execute = threading.Event(), threading.Event(), pictures.execute

    def held(*arguments, **options):
        begun.set()
        leave.wait(30)
        return execute(*arguments, **options)

    monkeypatch.setattr(pictures, "execute", held)
    async with strict_engine() as engine, small(engine, threads=1) as running:
        asked = [asyncio.create_task(running.ask([image(picture(56, 56, n))])) for n in range(4)]
        await asyncio.to_thread(begun.wait)
        assert (await running.ask("Hello")).status_code == 200
        assert not any(task.done() for task in asked)
        leave.set()
        assert {(await task).status_code for task in asked} == {200}
