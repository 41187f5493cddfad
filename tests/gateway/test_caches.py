"""What is remembered of pictures, seen from outside: the same bytes, less work, and never another's picture."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
from collections import Counter

import pytest
from aiohttp import web
from PIL import Image
from running import error_of, gateway, image, picture, strict_engine

from pixelgate.gateway import pictures
from pixelgate.media.policy import MediaPolicy


@pytest.fixture
def runs(monkeypatch):
    """The plans that were executed."""
    found, execute = [], pictures.execute

    def noted(plan, *arguments, **options):
        found.append((plan.height, plan.width))
        return execute(plan, *arguments, **options)

    monkeypatch.setattr(pictures, "execute", noted)
    return found


@contextlib.asynccontextmanager
async def hosting(**answers):
    """A host with a body and headers for each path, and how often each was asked for."""
    asked = Counter()

    async def answer(request):
        name = request.path.strip("/")
        asked[name] += 1
        body, headers = answers[name]
        return web.Response(body=body() if callable(body) else body, headers=headers, status=302 if not body else 200)

    application = web.Application()
    application.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


def tensors(engine, last=1):
    return [bytes(request.mm_inputs.pixel_values.inline) for request in list(engine.requests)[-last:]]


def hashes(engine):
    return list(engine.requests[-1].mm_inputs.mm_hashes)


def called(uuid, data=None):
    return {**(image(data) if data else {"type": "image_url", "image_url": None}), "uuid": uuid}


async def test_a_picture_that_comes_again_is_not_made_again(runs, processor):
    data = picture(224, 280)
    async with strict_engine() as engine, gateway(engine.url) as running:
        for _ in range(3):
            assert (await running.ask([image(data)])).status_code == 200
        # a later turn of the same conversation, with one more
        assert (await running.ask([image(data), image(picture(56, 56)), image(data)])).status_code == 200
        assert runs == [(224, 280), (56, 56)]
        first, second, third, last = tensors(engine, 4)
        own = processor(data, dtype="uint8")["pixel_values"].tobytes()
        assert first == second == third == own
        assert last == processor([data, picture(56, 56), data], dtype="uint8")["pixel_values"].tobytes()
        assert len(set(hashes(engine))) == 2
        assert await running.metric("pixelgate_cache_events_total", tier="tensor", outcome="hit") == 4
        assert await running.metric("pixelgate_cache_events_total", tier="tensor", outcome="miss") == 2
        assert await running.metric("pixelgate_cache_bytes", tier="tensor") >= len(own)


async def test_fifty_requests_for_a_new_picture_make_one_run(runs):
    data = picture(300, 300)
    async with strict_engine() as engine, gateway(engine.url) as running:
        answers = await asyncio.gather(*(running.ask([image(data)]) for _ in range(50)))
        assert {answer.status_code for answer in answers} == {200}
        assert runs == [(300, 300)]
        assert len(set(tensors(engine, 50))) == 1


async def test_whoever_asked_first_may_leave(runs):
    data = picture(1500, 1500)
    async with strict_engine() as engine, gateway(engine.url) as running:
        first = asyncio.create_task(running.ask([image(data)]))
        await asyncio.sleep(0.05)
        second = asyncio.create_task(running.ask([image(data)]))
        await asyncio.sleep(0.02)
        first.cancel()
        assert (await second).status_code == 200
        assert len(runs) <= 2


async def test_a_failure_is_told_to_each_where_its_own_picture_stands():
    damaged = picture(300, 300, form="JPEG")[:-2000]
    ok = image(picture(56, 56))
    async with strict_engine() as engine, gateway(engine.url) as running:
        contents = [[image(damaged)], [ok, image(damaged)], [ok, ok, image(damaged)]]
        answers = await asyncio.gather(*map(running.ask, contents))
        assert [error_of(answer)["param"] for answer in answers] == [
            f"messages[0].content[{n}].image_url" for n in range(3)
        ]
        assert {answer.status_code for answer in answers} == {400}


async def test_options_and_models_have_tensors_of_their_own(processor):
    """The same picture with other options is another, in whatever order they come."""
    data = picture(400, 500)
    async with strict_engine() as engine, gateway(engine.url, trust_request_mm_kwargs=True) as running:
        found = {}
        for limit in (90_000, None, 90_000, None):
            options = {} if limit is None else {"mm_processor_kwargs": {"max_pixels": limit}}
            assert (await running.ask([image(data)], **options)).status_code == 200
            own = processor.with_options(**options.get("mm_processor_kwargs", {}))
            assert tensors(engine) == [own(data, dtype="uint8")["pixel_values"].tobytes()]
            found.setdefault(limit, set()).update(hashes(engine))
        assert [len(names) for names in found.values()] == [1, 1]
        assert found[90_000] != found[None]
    async with strict_engine(device_normalize=False) as engine, gateway(engine.url) as running:
        await running.ask([image(data)])
        assert not found[None] & set(hashes(engine))  # normalised here: other numbers


async def test_pictures_that_only_look_alike_are_not_mixed_up():
    """Equal bytes of pixels in another geometry, files that begin alike, pictures that differ in what alpha hides."""
    ramp = bytes(range(250)) * 54  # 13,500 bytes
    pairs = []
    for make in (
        lambda size: Image.frombytes("RGB", size, ramp),
        lambda size: Image.frombytes("RGBA", (size[0] // 2, size[1]), ramp[: size[0] // 2 * size[1] * 4]),
    ):
        for size in ((150, 30), (30, 150)):
            file = io.BytesIO()
            make(size).save(file, "PNG")
            pairs.append(file.getvalue())
    photo = picture(300, 300, form="BMP")
    pairs += [photo, photo[:-3] + bytes(3)]
    async with strict_engine() as engine, gateway(engine.url) as running:
        for data in pairs:
            assert (await running.ask([image(data)])).status_code == 200
        assert len({name for request in engine.requests for name in request.mm_inputs.mm_hashes}) == len(pairs)
        assert all(len(name) == 64 for name in hashes(engine))


async def test_a_name_stands_for_a_picture_of_the_same_client(runs):
    data = picture(224, 280)
    keys = {"api_keys": ("one", "two")}
    async with strict_engine() as engine, gateway(engine.url, **keys) as running:

        async def ask(*content, key="one"):
            return await running.ask([*content], headers={"authorization": f"Bearer {key}"})

        unknown = await ask(called("cat"))
        assert unknown.status_code == 400
        assert error_of(unknown)["param"] == "messages[0].content[0].image_url"
        assert "send it with its image_url" in error_of(unknown)["message"]
        assert (await ask(called("cat", data))).status_code == 200
        assert (await ask(called("cat"))).status_code == 200
        assert len(runs) == 1
        assert len(set(tensors(engine, 2))) == 1
        assert "cat" not in hashes(engine)
        assert (await ask(called("cat"), key="two")).status_code == 400
        # the content counts, not the name that it had before
        other = picture(56, 56)
        assert (await ask(called("cat", other))).status_code == 200
        assert len(runs) == 2
        assert (await ask(called("cat"))).status_code == 200
        assert len(set(tensors(engine, 2))) == 1
        assert len(tensors(engine)[0]) == 16 * 1176
        too_long = await ask(called("c" * 257, data))
        assert error_of(too_long)["param"] == "messages[0].content[0].uuid"


async def test_a_name_given_in_the_same_request_stands_for_what_it_brings():
    old, new = picture(224, 280), picture(56, 56)
    async with strict_engine() as engine, gateway(engine.url, tensor_cache_bytes=0) as running:
        assert (await running.ask([called("x", old)])).status_code == 200
        for content in ([called("x", new), called("x")], [called("x"), called("x", new)]):
            assert (await running.ask(content)).status_code == 200
            assert len(set(hashes(engine))) == 1
            assert len(tensors(engine)[0]) == 2 * 16 * 1176


async def test_a_name_whose_picture_is_no_longer_kept_is_refused():
    async with strict_engine() as engine, gateway(engine.url, tensor_cache_bytes=0) as running:
        assert (await running.ask([called("cat", picture(56, 56))])).status_code == 200
        gone = await running.ask([called("cat")])
        assert gone.status_code == 400
        assert "keeps no picture of this uuid" in error_of(gone)["message"]
        assert error_of(gone)["code"] == "image_not_kept"


async def test_files_are_fetched_anew_unless_the_operator_and_the_host_allow_otherwise():
    kept = {"Cache-Control": "max-age=600"}
    versions = iter(range(1, 100))
    answers = {
        "kept": (picture(56, 56), kept),
        "Kept": (picture(84, 56), kept),
        "changing": (lambda: picture(56, 56, next(versions)), {}),
        "stored-not": (picture(56, 56), {"Cache-Control": "no-store, max-age=600"}),
        "moved": (b"", {"Location": "/kept"}),
        "moved-for-long": (b"", {"Location": "/kept", **kept}),
    }
    media = MediaPolicy(isolate=(), allow_private=("127.0.0.1",))
    keys = {"api_keys": ("one", "two"), "media": media}

    async def ask(running, url, key="one"):
        answer = await running.ask([image(url)], headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200

    async with strict_engine() as engine, hosting(**answers) as (url, asked):
        async with gateway(engine.url, **keys) as running:
            for _ in range(2):
                await ask(running, f"{url}/kept")
            assert asked["kept"] == 2
        asked.clear()
        names = set()
        async with gateway(engine.url, fetch_cache_bytes=1 << 20, **keys) as running:
            for _ in range(3):
                for path in answers:
                    await ask(running, f"{url}/{path}")
                    names.update(hashes(engine))
            assert asked["moved-for-long"] == 1
            assert asked["kept"] == 1 + 1 + 3  # itself, through the lasting way once, through the other each time
            assert (asked["Kept"], asked["changing"], asked["stored-not"], asked["moved"]) == (1, 3, 3, 3)
            assert len(names) == 2 + 3
            asked.clear()
            await ask(running, f"{url}/kept", key="two")
            assert asked["kept"] == 1


async def test_a_picture_in_a_decoder_process_is_looked_at_once():
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(60, 90))).save(file, "WEBP", lossless=True)
    async with strict_engine() as engine, gateway(engine.url, media=MediaPolicy(), tensor_cache_bytes=0) as running:
        url = "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
        for _ in range(2):
            assert (await running.ask([image(url)])).status_code == 200
        assert len(set(tensors(engine, 2))) == 1
        assert await running.metric("pixelgate_cache_events_total", tier="header", outcome="hit") == 1
        assert await running.metric("pixelgate_cache_events_total", tier="header", outcome="miss") == 1
