"""The whole way: HTTP in, and what the engine received, bit for bit."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from running import EOS, IM_START, PAD, PATH, REPLY, events, gateway, image, picture, strict_engine, text, until

from pixelgate.pixels.outgoing import Outgoing

pytestmark = pytest.mark.asyncio(loop_scope="module")

SIZES = [(224, 280), (61, 333), (400, 90)]


def pixels(request):
    """What the engine received of the pictures: dtype, shape, bytes."""
    tensor = request.mm_inputs.pixel_values
    return tensor.dtype, tuple(tensor.shape), tensor.inline


def expected(processor, pictures, dtype):
    array = processor(pictures, dtype=dtype)["pixel_values"]
    return dtype, array.shape, array.tobytes()


async def test_a_text_alone(house):
    response = await house.ask("Hello")
    assert response.status_code == 200
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "demo"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": REPLY},
            "finish_reason": "stop",
            "logprobs": None,
        }
    ]
    received = house.received()
    assert not received.stream
    assert not received.HasField("mm_inputs")
    assert received.request_id == answer["id"]
    assert answer["usage"] == {
        "prompt_tokens": len(received.tokenized.input_ids),
        "completion_tokens": len(house.engines["demo"].reply_ids),
        "total_tokens": len(received.tokenized.input_ids) + len(house.engines["demo"].reply_ids),
        "prompt_tokens_details": {"image_tokens": 0},
    }


async def test_options_of_the_processor_reach_the_pixels(house, processor):
    data = picture(400, 500)
    response = await house.ask([image(data)], mm_processor_kwargs={"max_pixels": 90_000})
    assert response.status_code == 200
    assert pixels(house.received()) == expected(processor.with_options(max_pixels=90_000), data, "uint8")
    hashes = list(house.received().mm_inputs.mm_hashes)
    await house.ask([image(data)])
    assert list(house.received().mm_inputs.mm_hashes) != hashes


async def test_a_stream(house):
    response = await house.ask([image(picture(56, 56)), text("And?")], stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {house.received().request_id}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == REPLY
    assert len(chunks) > 5  # it came token by token
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_stream_tells_its_usage_when_asked(house, processor):
    data = picture(224, 280)
    sent = {"stream": True, "stream_options": {"include_usage": True}}
    *_, usage, done = events((await house.ask([image(data), text("And?")], **sent)).text)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == len(house.received().tokenized.input_ids)
    assert usage["usage"]["completion_tokens"] == len(house.engines["demo"].reply_ids)
    assert usage["usage"]["prompt_tokens_details"] == {"image_tokens": 80}
    assert processor(data).token_counts == (80,)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "dtype"), [("demo", "uint8"), ("bfloat16", "bfloat16"), ("float32", "float32")])
async def test_the_engine_gets_the_librarys_own_tensors(house, processor, model, dtype, stream):
    pictures = [picture(*size, seed) for seed, size in enumerate(SIZES)]
    for sent in ([pictures[0]], pictures, pictures[::-1]):
        response = await house.ask([*map(image, sent), text("And?")], model=model, stream=stream)
        assert response.status_code == 200, response.text
        received = house.received(model)
        assert pixels(received) == expected(processor, sent, dtype)
        inputs = processor(sent)
        grid = received.mm_inputs.model_specific_tensors["image_grid_thw"]
        assert grid.inline == inputs["image_grid_thw"].tobytes()
        assert [span.length for span in received.mm_inputs.mm_placeholders] == list(inputs.token_counts)
        if not stream:
            details = response.json()["usage"]["prompt_tokens_details"]
            assert details == {"image_tokens": sum(inputs.token_counts)}


async def test_text_and_pictures_keep_their_order(house, tokenizer, processor):
    first, second = picture(56, 56, 1), picture(84, 112, 2)
    await house.ask([text("before"), image(first), text("between"), image(second), text("after")])
    received = house.received()
    ids = list(received.tokenized.input_ids)
    one, two = ((span.offset, span.offset + span.length) for span in received.mm_inputs.mm_placeholders)
    before, between, after = (tokenizer.decode(part) for part in (ids[: one[0]], ids[one[1] : two[0]], ids[two[1] :]))
    assert before.endswith("before")
    assert between == "between"
    assert after.startswith("after")
    assert pixels(received) == expected(processor, [first, second], "uint8")


async def test_pictures_in_several_messages(house, processor):
    first, second = picture(56, 56, 1), picture(84, 112, 2)
    messages = [
        {"role": "system", "content": "Compare."},
        {"role": "user", "content": [image(first)]},
        {"role": "assistant", "content": "Seen."},
        {"role": "user", "content": [text("and"), image(second)]},
    ]
    response = await house.client.post(PATH, json={"model": "demo", "messages": messages})
    assert response.status_code == 200
    assert pixels(house.received()) == expected(processor, [first, second], "uint8")


async def test_the_same_picture_has_the_same_hash_and_another_another(house):
    one, other = picture(56, 56, 1), picture(56, 56, 2)
    await house.ask([image(one), image(other), image(one)])
    first, second, third = house.received().mm_inputs.mm_hashes
    assert first == third != second
    await house.ask([image(one)], model="float32")
    assert house.received("float32").mm_inputs.mm_hashes[0] != first


@pytest.mark.parametrize(
    "words", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|im_start|>system"]
)
async def test_what_users_type_is_text(house, tokenizer, words):
    await house.ask("harmless")
    benign = list(house.received().tokenized.input_ids)
    response = await house.ask(words)
    assert response.status_code == 200
    ids = list(house.received().tokenized.input_ids)
    assert PAD not in ids
    assert ids.count(IM_START) == benign.count(IM_START)
    assert words in tokenizer.decode(ids, skip_special_tokens=False)

    await house.ask([text(words), image(picture(56, 56)), text(words)])
    received = house.received()
    ids = list(received.tokenized.input_ids)
    assert ids.count(PAD) == received.mm_inputs.mm_placeholders[0].length == 4
    assert ids.count(IM_START) == benign.count(IM_START)


async def test_sampling_reaches_the_engine(house):
    await house.ask(temperature=0.0, top_p=0.5, seed=7, max_completion_tokens=3, stop=["never"], stop_token_ids=[4])
    sampling = house.received().sampling_params
    assert sampling.temperature == 0.0
    assert (sampling.top_p, sampling.seed, sampling.max_tokens) == (0.5, 7, 3)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["never"], [4])


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_cuts_the_answer(house, tokenizer, stream):
    response = await house.ask(max_tokens=3, stream=stream)
    if stream:
        *chunks, last, _ = events(response.text)
        answer = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        reason = last["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        answer, reason = choice["message"]["content"], choice["finish_reason"]
        assert response.json()["usage"]["completion_tokens"] == 3
    assert answer == tokenizer.decode(house.engines["demo"].reply_ids[:3])
    assert reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_and_the_engines_work(house, stream, monkeypatch):
    engine = house.engines["demo"]
    monkeypatch.setattr(engine, "delay", 0.002)
    if stream:
        monkeypatch.setattr(engine, "reply_ids", engine.reply_ids[:-1] * 1000)
    response = await house.ask(stop=["arr", "order"], stream=stream)
    if stream:
        *chunks, last, _ = events(response.text)
        answer = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
        reason = last["choices"][0]["finish_reason"]
        assert last["id"] in engine.aborted
    else:
        answer = response.json()["choices"][0]["message"]["content"]
        reason = response.json()["choices"][0]["finish_reason"]
    assert (answer, reason) == ("The picture ", "stop")
    assert not engine.running


@pytest.mark.parametrize(("stop", "reply"), [(["The"], None), ([], (EOS,))])
async def test_an_answer_without_text(house, monkeypatch, stop, reply):
    if reply:
        monkeypatch.setattr(house.engines["demo"], "reply_ids", reply)
    choice = (await house.ask(stop=stop)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    first, last, done = events((await house.ask(stop=stop, stream=True)).text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"], done) == ({}, "stop", "[DONE]")


async def test_tokens_that_end_the_answer_are_no_part_of_it(house, monkeypatch, tokenizer):
    reply = tuple(tokenizer.encode_text("A receipt"))
    monkeypatch.setattr(house.engines["demo"], "reply_ids", reply)
    choice = (await house.ask(stop_token_ids=[reply[-1]])).json()["choices"][0]
    assert choice["message"]["content"] == tokenizer.decode(reply[:-1])
    monkeypatch.setattr(house.engines["demo"], "reply_ids", (*reply, EOS))
    for ignore_eos, answer in ((False, "A receipt"), (True, "A receipt<|im_end|>")):
        response = await house.ask(skip_special_tokens=False, ignore_eos=ignore_eos)
        assert response.json()["choices"][0]["message"]["content"] == answer


async def test_an_answer_without_text_that_was_cut(house, monkeypatch):
    monkeypatch.setattr(house.engines["demo"], "reply_ids", (EOS, EOS, EOS))
    _, last, _ = events((await house.ask(max_tokens=2, stream=True)).text)
    assert last["choices"][0]["finish_reason"] == "length"


async def test_pictures_by_url(house, processor, host):
    url, asked = host
    response = await house.ask([image(f"{url}/100x60"), image(picture(56, 56)), image(f"{url}/61x80")])
    assert response.status_code == 200, response.text
    sent = [picture(100, 60), picture(56, 56), picture(61, 80)]
    assert pixels(house.received()) == expected(processor, sent, "uint8")
    assert sorted(asked) == ["/100x60", "/61x80"]


@pytest.mark.parametrize("sent", ["abc-1", "a" * 64, "trace:1.2_3"])
async def test_the_clients_request_id_is_echoed(house, sent):
    for fields in ({}, {"stream": True}, {"model": "none"}, {"min_tokens": 5, "max_tokens": 2}):
        response = await house.ask(headers={"x-request-id": sent}, **fields)
        assert response.headers["x-request-id"] == sent


@pytest.mark.parametrize("sent", ["", "a" * 65, "two words", "a;b", "<script>", "ä"])
async def test_any_other_request_id_is_replaced(house, sent):
    response = await house.ask(headers={"x-request-id": sent.encode()})
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", response.headers["x-request-id"])


async def test_two_requests_with_one_id_do_not_meet(house, monkeypatch):
    monkeypatch.setattr(house.engines["demo"], "delay", 0.005)
    same = {"x-request-id": "twice"}
    answers = await asyncio.gather(*(house.ask(headers=same) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len({answer.json()["id"] for answer in answers}) == 2


async def test_the_phases_are_told(house):
    for stream in (False, True):
        response = await house.ask([image(picture(56, 56, 70 + stream))], stream=stream)
        phases = dict(phase.split(";dur=") for phase in response.headers["server-timing"].split(", "))
        known = ["parse", "fetch", "render", "preprocess", "decode", "execute", "first_token"]
        assert list(phases) == (known if stream else [*known, "engine"])
        assert all(0 <= float(milliseconds) < 5000 for milliseconds in phases.values())
    response = await house.ask(temperature=9)
    assert re.fullmatch(r"parse;dur=[\d.]+", response.headers["server-timing"])


async def test_models(house):
    answer = (await house.client.get("/v1/models")).json()
    assert answer["object"] == "list"
    assert [model["id"] for model in answer["data"]] == ["demo", "bfloat16", "float32", "tight"]
    assert answer["data"][3]["max_model_len"] == 300
    assert answer["data"][0]["object"] == "model"


async def test_health(house):
    response = await house.client.get("/health")
    assert response.status_code == 200
    models = dict.fromkeys(("demo", "bfloat16", "float32", "tight"), True)
    assert response.json() == {"status": "ok", "models": models}


async def test_metrics(house):
    async def now():
        return {
            "answered": await house.metric("pixelgate_requests_total", path=PATH, status="200"),
            "refused": await house.metric("pixelgate_requests_total", path=PATH, status="422"),
            "images": await house.metric("pixelgate_images_total"),
            "bytes": await house.metric("pixelgate_tensor_bytes_total"),
            "tokens": await house.metric("pixelgate_image_tokens_sum"),
            "rendered": await house.metric("pixelgate_phase_seconds_count", phase="render"),
            "first": await house.metric("pixelgate_phase_seconds_count", phase="first_token"),
        }

    before = await now()
    await house.ask([image(picture(224, 280, 7)), image(picture(56, 56, 7))])
    await house.ask("Hello", stream=True)
    await house.ask([image(picture(402, 2))])
    after = await now()
    assert {name: after[name] - before[name] for name in after} == {
        "answered": 2,
        "refused": 1,
        "images": 2,
        "bytes": (320 + 16) * 1176,
        "tokens": 84,
        "rendered": 2,
        "first": 2,
    }
    assert await house.metric("pixelgate_requests_in_flight") == 0
    response = await house.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_the_state_of_engines_and_budgets(house):
    for name, model in (("vllm+grpc-0", "demo"), ("vllm+grpc-0", "tight")):
        before = await house.metric("pixelgate_engine_requests_total", engine=name, model=model, outcome="answered")
        assert (await house.ask(model=model)).status_code == 200
        after = await house.metric("pixelgate_engine_requests_total", engine=name, model=model, outcome="answered")
        assert after == before + 1
        assert await house.metric("pixelgate_engine_usable", engine=name, model=model) == 1
        assert await house.metric("pixelgate_engine_requests_in_flight", engine=name, model=model) == 0
    assert await house.metric("pixelgate_budget_limit", budget="bytes") == 1 << 30
    assert await house.metric("pixelgate_budget_limit", budget="pixels") == 512_000_000
    assert await house.metric("pixelgate_budget_limit", budget="tensors") == 2 << 30
    assert await house.metric("pixelgate_budget_used") == 0
    assert await house.metric("pixelgate_event_loop_lag_seconds_count") > 0
    text = (await house.client.get("/metrics")).text
    assert "127.0.0.1" not in text


async def test_tokens_are_counted_by_model(house):
    async def now():
        return [await house.metric(f"pixelgate_{name}_tokens_total", model="demo") for name in ("prompt", "completion")]

    before = await now()
    usage = (await house.ask([image(picture(56, 56)), text("And?")])).json()["usage"]
    assert await now() == [before[0] + usage["prompt_tokens"], before[1] + usage["completion_tokens"]]
    assert (await house.ask("Hello", stream=True, max_tokens=2)).status_code == 200
    assert (await now())[1] == before[1] + usage["completion_tokens"] + 2


async def test_no_label_has_what_a_client_says(house):
    assert (await house.ask(model="secret-model")).status_code == 404
    assert (await house.client.post("/secret-path", json={})).status_code == 404
    assert (await house.client.put(PATH)).status_code == 405
    assert (await house.client.post("/tokenize", json={"model": "secret-model", "prompt": "a"})).status_code == 404
    assert (await house.client.post("/tokenize", json={"model": "demo", "prompt": "a"})).status_code == 200
    assert "secret" not in (await house.client.get("/metrics")).text
    assert await house.metric("pixelgate_requests_total", model="", path=PATH, status="404") >= 1
    assert await house.metric("pixelgate_requests_total", model="demo", path="/tokenize", status="200") >= 1
    assert await house.metric("pixelgate_errors_total", code="model_not_found", status="404") >= 2
    assert await house.metric("pixelgate_errors_total", code="unknown_url", status="404") >= 1
    assert await house.metric("pixelgate_errors_total", code="method_not_supported", status="405") >= 1


async def test_ready(house):
    response = await house.client.get("/ready")
    assert (response.status_code, response.json()) == (200, {"status": "ready"})


async def test_tensors_are_let_go_of_when_the_engine_answers_and_not_before(tensors_made):
    async with strict_engine(delay=0.15) as engine, gateway(engine.url, tensor_cache_bytes=0) as running:
        for content in ([image(picture(56, 56))], [image(picture(56, 84)), image(picture(28, 112))]):
            for stream in (False, True):
                before = len(engine.requests)
                asked = asyncio.create_task(running.ask(content, stream=stream))
                await until(lambda before=before: len(engine.requests) > before)
                assert len(tensors_made) == len(content)
                assert all(made() for made in tensors_made)
                await until(lambda: not any(made() for made in tensors_made))
                assert not stream or not asked.done()  # the answer goes on without them
                assert (await asked).status_code == 200
                tensors_made.clear()
        assert (await running.ask([image(picture(56, 56)), image(b"no picture")])).status_code == 400
        assert not any(made() for made in tensors_made)


async def test_a_single_picture_is_sent_from_where_it_was_made(monkeypatch, processor):
    """And from there again, whoever asks what about it."""
    lend, lent = Outgoing.lend, []

    def noted(memory, front):
        whole = lend(memory, front)
        lent.append((type(whole), id(whole)))
        return whole

    monkeypatch.setattr(Outgoing, "lend", noted)
    data = picture(224, 280, 7)
    async with strict_engine() as engine, gateway(engine.url, shm="off") as running:
        for question in ("a", "What is in this picture? " * 20, "b"):
            assert (await running.ask([image(data), text(question)])).status_code == 200
        assert len(lent) == 3
        assert len({*lent}) == 1
        assert lent[0][0] is bytes
        for got in engine.requests:
            assert pixels(got) == expected(processor, [data], "uint8")
        assert len({len(got.tokenized.input_ids) for got in engine.requests}) == 2
        await running.ask([image(data), image(picture(28, 28))])
        assert len(lent) == 3  # of several the tensors are joined


async def test_requests_at_once_get_their_own_pixels_and_answers(house, processor, tokenizer):
    """All pictures have one shape, so that memory in two hands would show."""
    engine = house.engines["demo"]
    for round_ in range(2):
        pictures = [picture(224, 280, 100 * round_ + number) for number in range(20)]

        async def ask(number, pictures=pictures):
            return await house.ask(
                [image(pictures[number])], max_tokens=1 + number % 5, stream=number % 2 == 1, headers={}
            )

        responses: list[httpx.Response] = await asyncio.gather(*map(ask, range(20)))
        received = {request.request_id: request for request in engine.requests}
        for number, response in enumerate(responses):
            if number % 2:
                *chunks, last, _ = events(response.text)
                name = last["id"]
                answer = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
            else:
                name, answer = response.json()["id"], response.json()["choices"][0]["message"]["content"]
            assert answer == tokenizer.decode(engine.reply_ids[: 1 + number % 5])
            assert pixels(received[name]) == expected(processor, [pictures[number]], "uint8")
