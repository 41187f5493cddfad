"""Every family through the gateway: a strict engine takes what is sent, and users cannot write what pictures have."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager

import pytest
from running import error_of, gateway, image, picture, text

from goldens.tokenizers_of import SPECIALS, complete
from pixelgate.errors import CheckpointError
from pixelgate.gateway.served import open_model
from pixelgate.gateway.settings import GatewaySettings, ModelSettings
from pixelgate.prompt.tokens import open_tokenizer
from pixelgate.testing.openai_server import OpenAIServer
from pixelgate.testing.strict_engine import StrictEngine

FAMILIES = sorted(SPECIALS)
DEVICE = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "mistral3"}  # these normalise on the device
ONE_SIZE = {"pixtral", "mistral3"}


@asynccontextmanager
async def served(family, folder, **settings):
    complete(family, folder)
    vocab_size = json.loads((folder / "config.json").read_text()).get("vocab_size", 210_000)
    facts = {"vocab_size": vocab_size, "device_normalize": family in DEVICE, "reply_ids": (5, 6)}
    async with (
        StrictEngine(folder, **facts) as engine,
        gateway(engine.url, checkpoint=folder, **settings) as running,
    ):
        yield engine, running


def spans(message):
    return [(span.offset, span.length) for span in message.mm_inputs.mm_placeholders]


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_family_is_served(family, tmp_path):
    large, small = picture(120, 200, 1), picture(40, 40, 2)
    second = picture(120, 200, 3) if family in ONE_SIZE else small
    async with served(family, tmp_path / family) as (engine, running):
        answer = await running.ask([image(large), text("Well?")])
        assert answer.status_code == 200, answer.text
        assert len(engine.requests[-1].mm_inputs.mm_hashes) == 1
        answer = await running.ask([text("First: "), image(large), text("second: "), image(second), text("?")])
        assert answer.status_code == 200, answer.text
        both = engine.requests[-1].mm_inputs
        assert len(both.mm_hashes) == 2
        assert answer.json()["usage"]["prompt_tokens"] == len(engine.requests[-1].tokenized.input_ids)
        answer = await running.ask([image(second), text("And "), image(large)])
        assert list(engine.requests[-1].mm_inputs.mm_hashes) == list(reversed(both.mm_hashes))
        assert (await running.ask("No picture.")).status_code == 200
        assert not engine.requests[-1].HasField("mm_inputs")


@pytest.mark.parametrize("family", FAMILIES)
async def test_typed_tokens_steal_nothing_and_wedge_nothing(family, tmp_path):
    """Recipes D43 to D45: the whole conversation is sent again with every turn."""
    typed = " ".join([*SPECIALS[family], "<|image_1|>", "<|image_2|>", "<image>", "[IMG]"])
    turns = [
        {"role": "user", "content": [text(f"what is {typed}?"), image(picture(56, 56)), text(typed)]},
        {"role": "assistant", "content": f"{typed} are tokens"},
        {"role": "user", "content": f"and {typed}"},
    ]
    harmless = json.loads(json.dumps(turns).replace(json.dumps(typed)[1:-1], "x"))
    specials = set(SPECIALS[family].values())
    for special_tokens in ("text", "allow"):
        async with served(family, tmp_path / special_tokens, special_tokens_in_text=special_tokens) as (
            engine,
            running,
        ):
            for length in (1, 3):
                sent = []
                for messages in (turns[:length], harmless[:length]):
                    answer = await running.ask(model="demo", messages=messages)
                    assert answer.status_code == 200, answer.text
                    ids = list(engine.requests[-1].tokenized.input_ids)
                    ((offset, count),) = spans(engine.requests[-1])
                    sent.append(([id_ for id_ in ids if id_ in specials], ids[offset : offset + count]))
                if special_tokens == "text":
                    assert sent[0] == sent[1]
                assert sent[0][1] == sent[1][1]


@pytest.mark.parametrize("family", sorted(ONE_SIZE))
async def test_pictures_that_one_tensor_cannot_hold_are_refused_by_name(family, tmp_path):
    async with served(family, tmp_path / family) as (engine, running):
        answer = await running.ask([image(picture(120, 200)), image(picture(40, 40))])
        assert (answer.status_code, error_of(answer)["code"]) == (422, "not_carried")
        assert "only if they become equally large" in error_of(answer)["message"]
        assert not engine.requests


@pytest.mark.parametrize("family", sorted(ONE_SIZE))
@pytest.mark.parametrize("stream", [False, True])
async def test_pictures_that_one_tensor_cannot_hold_go_to_an_engine_that_prepares_them(family, stream, tmp_path):
    folder = complete(family, tmp_path / family)
    async with (
        StrictEngine(folder, vocab_size=210_000, device_normalize=family in DEVICE, reply_ids=(5, 6)) as engine,
        OpenAIServer(("demo",), reply="Both.") as server,
        gateway((engine.url, server.url), checkpoint=folder) as running,
    ):
        same = [image(picture(120, 200)), image(picture(120, 200, 1))]
        assert (await running.ask(same, stream=stream)).status_code == 200
        assert (len(engine.requests), len(server.requests)) == (1, 0)
        answer = await running.ask([image(picture(120, 200)), image(picture(40, 40))], stream=stream)
        assert "Both." in answer.text
        assert (len(engine.requests), len(server.requests), len(server.pictures)) == (1, 1, 2)


@pytest.mark.parametrize(
    ("family", "bos", "first"),
    [
        ("llava15_clip", "engine", [False, False]),
        ("llava15_clip", "transformers", [True, True]),
        ("phi3_5_vision", "engine", [True, False]),
        ("phi3_5_vision", "transformers", [True, True]),
        ("pixtral", "engine", [True, True]),
        ("pixtral", "transformers", [True, True]),
    ],
)
async def test_a_prompt_begins_as_the_operator_says(family, bos, first, tmp_path):
    """With a picture, and without."""
    async with served(family, tmp_path / family, bos=bos) as (engine, running):
        for content, begins in zip(([image(picture(56, 56)), text("Well?")], "Well?"), first, strict=True):
            assert (await running.ask(content)).status_code == 200
            ids = list(engine.requests[-1].tokenized.input_ids)
            assert (ids[0] == 1) is begins
            assert ids[1] != 1


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


async def test_a_request_with_tools_has_the_template_for_them(tmp_path):
    folder = complete("qwen2_vl", tmp_path / "qwen2_vl")
    (folder / "additional_chat_templates").mkdir()
    own = (folder / "chat_template.jinja").read_text()
    (folder / "additional_chat_templates/tool_use.jinja").write_text(own + "TOOLS: {{ tools | length }}")
    async with StrictEngine(folder, reply_ids=(5,), device_normalize=True) as engine, gateway(engine.url, folder) as it:
        shown = []
        for fields in ({}, {"tools": TOOLS}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            assert (await it.ask(**fields)).status_code == 200
            ids = list(engine.requests[-1].tokenized.input_ids)
            shown.append(open_tokenizer(folder / "tokenizer.json").decode(ids).endswith("TOOLS: 1"))
        assert shown == [False, True, False, False]


async def test_the_final_message_is_continued(tmp_path):
    async with served("qwen2_vl", tmp_path / "qwen2_vl") as (engine, running):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is "}]
        assert (await running.ask(messages=messages, continue_final_message=True)).status_code == 200
        tokenizer = open_tokenizer(tmp_path / "qwen2_vl/tokenizer.json")
        assert tokenizer.decode(list(engine.requests[-1].tokenized.input_ids)).endswith("assistant\nIt is ")
        both = await running.ask(messages=messages, continue_final_message=True, add_generation_prompt=True)
        assert both.status_code == 400
        assert error_of(both)["param"] == "add_generation_prompt"


async def test_a_tokenizer_that_lacks_a_familys_tokens(tmp_path):
    folder = complete("pixtral", tmp_path / "pixtral")
    config = json.loads((folder / "processor_config.json").read_text())
    (folder / "processor_config.json").write_text(json.dumps(config | {"image_end_token": "[END]"}))
    settings = GatewaySettings(models=(ModelSettings(str(folder), ("vllm+grpc://127.0.0.1:1",)),))
    with pytest.raises(CheckpointError, match=r"no special token '\[END\]'"):
        open_model(settings.models[0], settings)
