"""Models whose engines prepare pictures themselves: what reaches them, and what comes back."""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager

import httpx
import numpy as np
import pytest
from PIL import Image
from running import error_of, events, gateway, image, picture, strict_engine, text, until

from goldens import golden
from pixelgate.demo import CHECKPOINT
from pixelgate.engines import vllm_http
from pixelgate.errors import NotCarriedError
from pixelgate.gateway.passthrough import resized
from pixelgate.gateway.settings import ModelSettings
from pixelgate.media.handing import png
from pixelgate.media.policy import MediaPolicy
from pixelgate.processor import load
from pixelgate.testing.openai_server import OpenAIServer
from pixelgate.testing.strict_http import StrictHttpEngine

REPLY = "An answer of theirs"


@asynccontextmanager
async def passing(checkpoint="", *, settings=None, model=None, **server):
    """A gateway in front of a server of others, and that server."""
    async with OpenAIServer(reply=REPLY, **server) as engine:
        made = ModelSettings(checkpoint, (engine.url,), "demo", **(model or {}))
        async with gateway([made], media=MediaPolicy(allow_private=("127.0.0.1",)), **(settings or {})) as running:
            yield running, engine


def turned(height, width):
    """A picture that a camera held sideways has taken."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.open(io.BytesIO(picture(height, width))).save(file, "PNG", exif=exif)
    return file.getvalue()


def said(answer):
    """The text of an answer, streamed or not."""
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]["message"]["content"]
    return "".join(c["delta"].get("content", "") for e in events(answer.text)[:-1] for c in e["choices"])


async def test_an_answer_comes_back_under_the_gateways_names():
    async with passing() as (house, server):
        answer = await house.ask([text("What is this?"), image(picture(20, 30))], temperature=0.5)
        body = answer.json()
        assert await house.metric("pixelgate_prompt_tokens_total", model="demo") == 7
        assert await house.metric("pixelgate_completion_tokens_total", model="demo") == 4
        assert await house.metric("pixelgate_image_megapixels_sum", model="demo") == 0.0006
        asked = {"model": "demo", "engine": "openai+http-0", "outcome": "answered"}
        assert await house.metric("pixelgate_engine_requests_total", **asked) == 1
    assert answer.status_code == 200
    assert body["choices"][0]["message"]["content"] == REPLY + " "
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}
    assert (body["model"], body["object"]) == ("demo", "chat.completion")
    assert body["id"] == answer.headers["x-request-id"]
    assert answer.headers["x-pixelgate-preprocessing"] == "engine"
    assert "private" not in body
    assert server.requests[0]["model"] == "test"
    assert server.requests[0]["temperature"] == 0.5
    assert {"fetch", "preprocess", "first_token"} <= {
        p.split(";")[0] for p in answer.headers["server-timing"].split(", ")
    }


async def test_a_stream_comes_back_event_by_event():
    async with passing() as (house, _):
        answer = await house.ask("Hello", stream=True, stream_options={"include_usage": True})
        *chunks, done = events(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-pixelgate-preprocessing"] == "engine"
    assert done == "[DONE]"
    assert "".join(c["delta"].get("content", "") for e in chunks for c in e["choices"]) == REPLY + " "
    assert {(e["model"], e["object"], e["id"]) for e in chunks} == {
        ("demo", "chat.completion.chunk", answer.headers["x-request-id"])
    }
    assert chunks[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.asyncio(loop_scope="module")
async def test_messages_arrive_in_their_order_and_as_they_were(host):
    url, _ = host
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                text("one"),
                {"type": "image_url", "image_url": {"url": f"{url}/20x30", "detail": "low"}},
                text("two"),
                image(picture(8, 8, seed=1)),
            ],
            "name": "me",
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{"}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "user", "content": "And?"},
    ]
    async with passing() as (house, server):
        answer = await house.client.post("/v1/chat/completions", json={"model": "demo", "messages": messages})
        assert answer.status_code == 200
    sent = server.requests[0]["messages"]
    assert server.pictures == [picture(20, 30), picture(8, 8, seed=1)]
    assert [part["type"] for part in sent[1]["content"]] == ["text", "image_url", "text", "image_url"]
    assert sent[1]["content"][1]["image_url"]["detail"] == "low"
    del messages[2]["content"]
    assert [sent[0], *sent[2:]] == [messages[0], *messages[2:]]


async def test_what_only_the_engine_can_do_is_handed_on_and_unknown_fields_are_not():
    fields = {
        "n": 2,
        "logprobs": True,
        "response_format": {"type": "json_object"},
        "stop": ["x"],
        "tool_choice": "none",
    }
    async with passing() as (house, server):
        assert (await house.ask("Hello", **fields, kv_transfer_params={}, documents=[])).status_code == 200
    sent = dict(server.requests[0])
    assert sent.pop("messages") == [{"role": "user", "content": "Hello"}]
    assert sent.pop("model") == "test"
    assert sent == fields


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs"),
    ],
)
async def test_programs_are_not_handed_on(fields, param):
    async with passing() as (house, server):
        answer = await house.ask("Hello", **fields)
        assert (answer.status_code, error_of(answer)["param"]) == (400, param)
    assert not server.requests


async def test_pictures_of_formats_that_are_decoded_elsewhere_go_on_as_png():
    async with passing() as (house, server):
        sent = picture(20, 30, form="BMP")
        assert (await house.ask([image(sent), image(picture(20, 30, form="GIF")), text("?")])).status_code == 200
    assert [file[1:4] for file in server.pictures] == [b"PNG", b"PNG"]


async def test_a_picture_that_decoders_read_differently_goes_on_as_ours_sees_it():
    async with passing() as (house, server):
        assert (await house.ask([image(turned(20, 30)), text("?")])).status_code == 200
    (file,) = server.pictures
    with Image.open(io.BytesIO(file)) as sent, Image.open(io.BytesIO(picture(20, 30))) as taken:
        assert (sent.format, sent.size) == ("PNG", (20, 30))
        assert np.array_equal(np.asarray(sent), np.asarray(taken.transpose(Image.Transpose.ROTATE_270)))


@pytest.mark.parametrize(
    ("part", "status", "param"),
    [
        ("file:///etc/passwd", 400, "messages[0].content[0].image_url"),
        ("http://10.0.0.1/x.png", 400, "messages[0].content[0].image_url"),
        (b"no picture", 400, "messages[0].content[0].image_url"),
    ],
)
async def test_pictures_are_checked_before_anything_is_sent(part, status, param):
    async with passing() as (house, server):
        answer = await house.ask([image(part), text("?")])
        assert answer.status_code == status
        assert error_of(answer)["param"] == param
    assert not server.requests


async def test_more_pictures_than_the_policy_allows():
    async with passing() as (house, server):
        answer = await house.ask([image(picture(8, 8))] * 33)
        assert "at most 32" in error_of(answer)["message"]
    assert not server.requests


async def test_with_a_checkpoint_pictures_are_planned():
    async with passing(str(CHECKPOINT)) as (house, server):
        answer = await house.ask([image(picture(4, 900)), text("?")])
        assert answer.status_code == 422
        assert not server.requests
        assert (await house.ask([image(picture(60, 60)), text("?")])).status_code == 200
        assert await house.metric("pixelgate_image_tokens_count") == 1
        assert await house.metric("pixelgate_images_total") == 1


@pytest.mark.parametrize("resize", [True, False])
async def test_a_picture_may_be_sent_in_the_size_that_is_used(resize):
    processor = load(CHECKPOINT).with_options(max_pixels=200_704)
    large, small = picture(700, 900), picture(56, 84)
    model = {"resize": resize, "mm_processor_kwargs": {"max_pixels": 200_704}}
    async with passing(str(CHECKPOINT), model=model) as (house, server):
        assert (await house.ask([image(large), image(small), text("?")])).status_code == 200
        assert server.requests[0]["mm_processor_kwargs"] == {"max_pixels": 200_704}
    first, second = server.pictures
    assert second == small
    assert (first == large) is not resize
    ours, theirs = processor(large), processor(first)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("name", "size", "sent"),
    [
        ("qwen2_vl", (500, 700), "less"),
        ("qwen2_5_vl", (20, 30), "as it is"),
        ("llava15_clip", (1000, 1500), "less"),
        ("llava15_pad", (1000, 1500), "as it is"),
        ("llava_next", (1000, 1500), "as it is"),
        ("phi3_vision", (3000, 1500), "as it is"),
        ("pixtral", (3000, 2500), "less"),
    ],
)
def test_only_what_the_model_would_not_notice_is_resized(name, size, sent):
    processor = load(golden.CHECKPOINTS / name)
    if name == "qwen2_vl":
        processor = processor.with_options(max_pixels=100_000)
    data = png(np.random.default_rng(3).integers(0, 256, (*size, 3), np.uint8))
    plan = processor.plan(height=size[0], width=size[1])
    smaller = resized(processor, plan, data)
    assert (smaller is not None) == (sent == "less")
    if smaller is not None:
        ours, theirs = processor(data), processor(smaller)
        assert all(np.array_equal(ours[array], theirs[array]) for array in ours)


async def test_options_of_requests_are_taken_where_they_are_trusted():
    async with passing() as (house, server):
        answer = await house.ask("Hello", mm_processor_kwargs={"max_pixels": 9000})
        assert error_of(answer)["param"] == "mm_processor_kwargs"
        assert not server.requests
    async with passing(settings={"trust_request_mm_kwargs": True}) as (house, server):
        assert (await house.ask("Hello", mm_processor_kwargs={"max_pixels": 9000})).status_code == 200
        assert server.requests[0]["mm_processor_kwargs"] == {"max_pixels": 9000}


async def test_the_key_goes_to_the_engine():
    async with passing(api_key="k", model={"engine_api_key": "k"}) as (house, _):
        assert (await house.ask("Hello")).status_code == 200
    async with passing(api_key="k", model={"engine_api_key": "x"}) as (house, _):
        answer = await house.ask("Hello")
        assert answer.status_code == 502
        assert "x" not in error_of(answer)["message"].split()


async def test_models_and_health():
    async with passing(max_model_len=77) as (house, server):
        (model,) = (await house.client.get("/v1/models")).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("demo", 77)
        assert (await house.client.get("/health")).json() == {"status": "ok", "models": {"demo": True}}
        await server.stop()
        assert (await house.client.get("/health")).status_code == 503
        answer = await house.ask("Hello")
        assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_unavailable")


async def test_an_engine_that_ends_in_mid_stream_ends_it_with_an_error_event():
    async with passing(delay=0.2) as (house, server):
        task = asyncio.create_task(house.ask("Hello", stream=True))
        await until(lambda: server.requests)
        await asyncio.sleep(0.3)
        await server.stop()
        *_, last = events((await task).text)
    assert last["error"]["code"] == "engine_unavailable"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_ends_the_request_on_the_engine(stream):
    async with passing(delay=0.5) as (house, server):
        with pytest.raises(httpx.ReadTimeout):
            await house.client.post(
                "/v1/chat/completions",
                json={"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": stream},
                timeout=0.3,
            )
        await until(lambda: server.cancelled == 1)


async def test_an_unknown_model_is_told_the_known_ones():
    async with passing() as (house, _):
        assert "it serves demo" in error_of(await house.ask("Hello", model="other"))["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_tensors_over_http_and_what_they_cannot_carry_through_the_other_engine(stream, monkeypatch):
    async with (
        StrictHttpEngine(CHECKPOINT, reply="From tensors.", device_normalize=True, eos_token_ids=(151645,)) as strict,
        OpenAIServer(("demo", "other"), reply=REPLY) as server,
    ):
        model = ModelSettings(str(CHECKPOINT), (strict.url, server.url), "demo")
        async with gateway([model]) as house:
            content = [text("one"), image(picture(60, 60)), text("two"), image(picture(90, 60, seed=2))]
            assert said(await house.ask(content, stream=stream)) == "From tensors."
            assert len(strict.requests[0].mm_inputs.mm_hashes) == 2
            assert not server.requests

            def refuse(request):
                raise NotCarriedError("no masks here")

            monkeypatch.setattr(vllm_http, "refuse_masks", refuse)
            assert said(await house.ask(content, stream=stream)) == REPLY + " "
            assert len(strict.requests) == 1
            assert server.requests[0]["model"] == "demo"
            assert (await house.client.get("/health")).json()["models"] == {"demo": True}


async def test_parameters_of_vllm_are_handed_on_as_they_came():
    async with passing() as (house, server):
        await house.ask("Hello")
        await house.ask("Hello", best_of=2, echo=False, structured_outputs={"regex": "a"}, prompt_logprobs=1)
    bare, full = server.requests
    asked = {"best_of": 2, "echo": False, "structured_outputs": {"regex": "a"}, "prompt_logprobs": 1}
    assert {name: full[name] for name in asked} == asked
    assert full.keys() - bare.keys() == asked.keys()


async def test_engines_that_are_found_by_their_name():
    async with (
        OpenAIServer(reply=REPLY) as server,
        gateway([ModelSettings("", (f"dns+{server.url}",), "demo")]) as house,
    ):
        assert said(await house.ask("Hello")) == REPLY + " "


async def test_a_picture_goes_to_the_server_that_has_seen_it():
    async with OpenAIServer(reply="one") as one, OpenAIServer(reply="two") as two:
        model = ModelSettings("", (one.url, two.url), "demo", balance="image-affinity")
        async with gateway([model]) as house:
            pictures = [image(picture(20, 30, seed)) for seed in range(6)]
            first = [said(await house.ask([each, text("?")])) for each in pictures]
            second = [said(await house.ask([each, text("?")])) for each in pictures]
    assert first == second
    assert set(first) == {"one ", "two "}


async def test_health_says_why_servers_are_not_used():
    async with passing() as (house, server):
        await server.stop()
        health = (await house.client.get("/health")).json()
    assert health["models"] == {"demo": False}
    assert health["troubles"] == {"demo": ["The engine does not take requests now."]}


async def test_what_tensors_cannot_carry_is_refused_where_nobody_else_can(monkeypatch):
    def refuse(request):
        raise NotCarriedError("no masks here")

    monkeypatch.setattr(vllm_http, "refuse_masks", refuse)
    async with StrictHttpEngine(CHECKPOINT, device_normalize=True) as strict, gateway(strict.url) as house:
        answer = await house.ask("Hello")
    assert (answer.status_code, error_of(answer)["code"]) == (422, "not_carried")


@pytest.mark.parametrize("beside", [False, True])
async def test_of_prompts_that_engines_make_nothing_is_told_and_why(beside):
    async with OpenAIServer(("other",), reply=REPLY) as server, strict_engine() as strict:
        models = [ModelSettings("", (server.url,), "other")]
        if beside:
            models.append(ModelSettings(str(CHECKPOINT), (strict.url,), "demo"))
        async with gateway(models) as house:
            asked = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [1]}
            for path, names in (
                ("/v1/chat/completions/render", ("model", "messages")),
                ("/tokenize", ("model", "prompt")),
                ("/tokenize", ("model", "messages")),
                ("/detokenize", ("model", "tokens")),
            ):
                answer = await house.client.post(path, json={name: asked[name] for name in names})
                error = error_of(answer)
                assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
                assert error["message"].startswith("the engines of other make its prompts themselves, so its tokens")
                assert ("; this path serves demo" in error["message"]) == beside
            answer = await house.client.post("/tokenize", json={"model": "third", "prompt": "a"})
            served = "demo, other" if beside else "other"
            assert error_of(answer)["message"] == f"this gateway does not serve that model; it serves {served}"


async def test_what_waits_for_another_engine_is_told_so(monkeypatch):
    def refuse(request):
        raise NotCarriedError("no masks here")

    monkeypatch.setattr(vllm_http, "refuse_masks", refuse)
    async with (
        StrictHttpEngine(CHECKPOINT, device_normalize=True) as http,
        OpenAIServer(("demo",), reply=REPLY) as server,
    ):
        async with strict_engine() as grpc, gateway((http.url, grpc.url)) as house:
            await grpc.stop()
            answer = await house.ask("Hello")
            assert (answer.status_code, error_of(answer)["code"]) == (503, "engine_unavailable")
        async with strict_engine() as grpc:
            model = ModelSettings(str(CHECKPOINT), (http.url, grpc.url, server.url), "demo")
            async with gateway([model]) as house:
                await grpc.stop()
                assert said(await house.ask("Hello")) == REPLY + " "


async def test_engines_of_both_protocols_serve_one_model():
    async with (
        strict_engine() as grpc,
        StrictHttpEngine(CHECKPOINT, reply="Two", device_normalize=True) as http,
        gateway([ModelSettings(str(CHECKPOINT), (http.url, grpc.url), "demo")]) as house,
    ):
        for _ in range(4):
            assert (await house.ask([image(picture(60, 60)), text("?")])).status_code == 200
        assert grpc.requests
        assert http.requests
        assert grpc.requests[0].mm_inputs == http.requests[0].mm_inputs
