"""Whose picture is it: what engines keep a picture under must never be another's, whatever the two have in common."""

from __future__ import annotations

import io

import numpy as np
import pytest
from aiohttp import web
from PIL import Image
from running import PAD, gateway, image, picture, strict_engine

from pixelgate.media.policy import MediaPolicy

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOISE = np.random.default_rng(7).integers(0, 256, (30 * 150 * 3,), np.uint8)


def encoded(made, form="PNG", **options):
    file = io.BytesIO()
    made.save(file, form, **options)
    return file.getvalue()


def paletted(first, second):
    """Two stripes of palette entries 0 and 1, in these colours."""
    made = Image.new("P", (56, 56), 0)
    made.putpalette([*first, *second])
    made.paste(1, (0, 0, 56, 28))
    return encoded(made)


def with_alpha(alpha):
    made = Image.fromarray(NOISE.reshape(150, 30, 3)).resize((56, 56))
    made.putalpha(alpha)
    return encoded(made)


PAIRS = {
    "geometry": [encoded(Image.fromarray(NOISE.reshape(shape))) for shape in ((30, 150, 3), (150, 30, 3))],
    "raw geometry": [encoded(Image.fromarray(NOISE.reshape(shape)), "BMP") for shape in ((30, 150, 3), (150, 30, 3))],
    "alpha": [with_alpha(255), with_alpha(40)],
    "palette": [paletted((255, 0, 0), (0, 0, 255)), paletted((0, 0, 255), (255, 0, 0))],
}


async def seen(house, data, **fields):
    """What the engine got for a picture: its hash, its grid and its pixels."""
    response = await house.ask([image(data)], **fields)
    assert response.status_code == 200, response.text
    received = house.received().mm_inputs
    grid = np.frombuffer(received.model_specific_tensors["image_grid_thw"].inline, np.int64)
    return received.mm_hashes[0], tuple(grid), received.pixel_values.inline


@pytest.mark.parametrize("pair", PAIRS)
async def test_equal_bytes_of_pixels_are_not_an_equal_picture(house, processor, pair):
    """D51: the same pixels in another shape, under another alpha or another palette."""
    found = [await seen(house, data) for data in PAIRS[pair]]
    for (_, grid, pixels), data in zip(found, PAIRS[pair], strict=True):
        own = processor(data, dtype="uint8")
        assert pixels == own["pixel_values"].tobytes()
        assert grid == tuple(own["image_grid_thw"][0])
    assert found[0][0] != found[1][0]
    assert found[0][2] != found[1][2]


async def test_an_equal_beginning_is_not_an_equal_picture(house, processor):
    """D52: scans of one machine have the same first kilobytes."""
    header = {"comment": b"scanner " * 1000, "quality": 90}
    pages = [encoded(Image.fromarray(np.full((112, 112, 3), grey, np.uint8)), "JPEG", **header) for grey in (30, 220)]
    assert pages[0][:8000] == pages[1][:8000]
    assert len(pages[0]) == len(pages[1])
    found = [await seen(house, page) for page in pages]
    assert found[0][0] != found[1][0]
    assert [pixels for _, _, pixels in found] == [
        processor(page, dtype="uint8")["pixel_values"].tobytes() for page in pages
    ]


async def test_options_belong_to_the_identity(house):
    """D53: in either order, each gets the grid that it asked for."""
    data = picture(600, 700, 53)
    small = {"mm_processor_kwargs": {"max_pixels": 200_704}}
    found = [await seen(house, data, **fields) for fields in (small, {}, small, {})]
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]


async def test_what_is_behind_a_transparent_picture_belongs_to_the_identity():
    """D53: gateways with other backgrounds may share an engine."""
    data, found = with_alpha(40), set()
    async with strict_engine() as engine:
        for background in ("#ffffff", "#000000"):
            async with gateway(engine.url, media=MediaPolicy(background=background)) as running:
                assert (await running.ask([image(data)])).status_code == 200
                found.add(engine.requests[-1].mm_inputs.mm_hashes[0])
    assert len(found) == 2


async def test_a_whole_digest_is_sent(house):
    """D54: 256 bits, of which no two of a thousand pictures share the first 64."""
    data = [picture(28, 28, seed) for seed in range(1000)]
    hashes = set()
    for start in range(0, 1000, 4):
        assert (await house.ask([image(each) for each in data[start : start + 4]])).status_code == 200
        hashes.update(house.received().mm_inputs.mm_hashes)
    assert {len(bytes.fromhex(each)) for each in hashes} == {32}
    assert len({each[:16] for each in hashes}) == len({each[-16:] for each in hashes}) == 1000


async def test_a_url_is_no_identity(house, processor):
    """D55: paths that differ in their case, and one whose picture changes."""
    pictures = {"/Case.png": picture(56, 56, 1), "/case.png": picture(56, 56, 2)}
    versions = iter([picture(56, 56, 3), picture(56, 56, 4)])

    async def answer(request):
        return web.Response(body=pictures[request.path] if request.path in pictures else next(versions))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        paths = ("/Case.png", "/case.png", "/changing.png", "/changing.png")
        found = [await seen(house, host + path) for path in paths]
    finally:
        await runner.cleanup()
    expected = [picture(56, 56, seed) for seed in (1, 2, 3, 4)]
    assert [pixels for _, _, pixels in found] == [
        processor(data, dtype="uint8")["pixel_values"].tobytes() for data in expected
    ]
    assert len({hash_ for hash_, _, _ in found}) == 4
    # by content: the same picture in a data URL is the same
    assert (await seen(house, expected[3]))[0] == found[3][0]
    assert PAD in house.received().tokenized.input_ids
