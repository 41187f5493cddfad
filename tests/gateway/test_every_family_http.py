"""Every family over vLLM's HTTP protocol: what it can carry arrives, and what it cannot is refused before sending."""

from __future__ import annotations

import pytest
from running import error_of, gateway, image, picture, text
from test_every_family import DEVICE, FAMILIES

from goldens.tokenizers_of import complete
from pixelgate.testing.strict_http import StrictHttpEngine

WITH_MASKS = {"pixtral", "mistral3", "llama4"}


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_over_http(family, tmp_path):
    folder = tmp_path / family
    complete(family, folder)
    large, small = image(picture(120, 200, 1)), image(picture(40, 40, 2))
    facts = {"vocab_size": 210_000, "device_normalize": family in DEVICE, "reply_ids": (5, 6)}
    async with (
        StrictHttpEngine(folder, encoder_dtype="float32", **facts) as engine,
        gateway(engine.url, checkpoint=folder) as running,
    ):
        assert (await running.ask("No picture.")).status_code == 200
        answers = [
            await running.ask([large, text("Well?")]),
            await running.ask([text("First: "), small, text("second: "), large, text("?")], stream=True),
            await running.ask([small, text("And "), small]),
        ]
        if family in WITH_MASKS:
            assert [(a.status_code, error_of(a)["code"]) for a in answers] == [(422, "not_carried")] * 3
            assert len(engine.requests) == 1
            return
        assert [answer.status_code for answer in answers] == [200] * 3, [answer.text for answer in answers]
        assert [len(request.mm_inputs.mm_hashes) for request in engine.requests] == [0, 1, 2, 2]
        assert engine.nulls == 3
