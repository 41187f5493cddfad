"""POST /tokenize and /detokenize."""

from __future__ import annotations

import pytest
from running import IM_END, IM_START, PAD, error_of, gateway, image, picture, strict_engine, text

from pixelgate.gateway import tokenization
from pixelgate.prompt.tokenizer_json import JsonTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def tokenize(house, model="demo", **fields):
    return await house.client.post("/tokenize", json={"model": model, **fields})


async def detokenize(house, tokens, model="demo"):
    return await house.client.post("/detokenize", json={"model": model, "tokens": tokens})


async def test_a_prompt_and_back(house, tokenizer):
    answer = (await tokenize(house, prompt="The receipt é😀")).json()
    assert answer == {
        "count": len(answer["tokens"]),
        "max_model_len": 131072,
        "tokens": tokenizer.encode_text("The receipt é😀"),
        "token_strs": None,
    }
    assert (await detokenize(house, answer["tokens"])).json() == {"prompt": "The receipt é😀"}


async def test_special_tokens_of_a_prompt_are_tokens(house, tokenizer):
    prompt = "<|im_start|>user\nHi<|im_end|>"
    answer = (await tokenize(house, "tight", prompt=prompt, return_token_strs=True)).json()
    assert answer["tokens"] == [IM_START, *tokenizer.encode_text("user\nHi"), IM_END]
    assert answer["max_model_len"] == 300
    assert answer["token_strs"] == [tokenizer.token_text(id_) for id_ in answer["tokens"]]
    assert answer["token_strs"][0] == "<|im_start|>"
    assert (await detokenize(house, answer["tokens"])).json() == {"prompt": prompt}


async def test_messages_are_the_ids_that_the_engine_gets(house):
    content = [image(picture(224, 280)), text("And? <|image_pad|>")]
    before = len(house.engines["demo"].requests)
    answer = (await tokenize(house, messages=[{"role": "user", "content": content}])).json()
    assert len(house.engines["demo"].requests) == before
    await house.ask(content)
    assert answer["tokens"] == list(house.received().tokenized.input_ids)
    assert answer["tokens"].count(PAD) == 80
    fields = {"add_generation_prompt": False, "messages": [{"role": "user", "content": content}], "prompt": None}
    assert len((await tokenize(house, **fields)).json()["tokens"]) == answer["count"] - 3


async def test_messages_may_be_longer_than_the_model_takes(house):
    answer = (await tokenize(house, "tight", messages=[{"role": "user", "content": "receipt " * 400}])).json()
    assert answer["count"] > answer["max_model_len"] == 300


async def test_what_the_tokenizer_itself_adds(house, monkeypatch):
    original = JsonTokenizer.__init__

    def framed(self, backend):
        original(self, backend)
        self.framing = (IM_START,), (IM_END,)

    monkeypatch.setattr(JsonTokenizer, "__init__", framed)
    async with strict_engine() as engine, gateway(engine.url) as running:
        bare = (await tokenize(running, prompt="Hi", add_special_tokens=False)).json()["tokens"]
        whole = [IM_START, *bare, IM_END]
        assert (await tokenize(running, prompt="Hi")).json()["tokens"] == whole
        messages = [{"role": "user", "content": "Hi"}]
        bare = (await tokenize(running, messages=messages)).json()["tokens"]
        framed_ids = (await tokenize(running, messages=messages, add_special_tokens=True)).json()["tokens"]
        assert framed_ids == [IM_START, *bare, IM_END]


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({}, 400, "prompt", "give either prompt or messages"),
        ({"messages": None}, 400, "prompt", "give either"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt", "give either"),
        ({"prompt": 5}, 400, "prompt", "must be a string"),
        ({"prompt": "a" * 51}, 413, "prompt", "at most 50 characters"),
        ({"prompt": "a", "model": "other"}, 404, "model", "does not serve that model"),
        ({"messages": 5}, 400, "messages", "must be a list"),
        ({"messages": [{"role": "user", "content": [image(b"x")]}]}, 400, "messages[0].content[0].image_url", "known"),
        ({"messages": [{"role": "user", "content": [image(picture(9, 9))] * 5}]}, 400, "messages", "at most 4"),
    ],
)
async def test_what_cannot_be_tokenised(house, monkeypatch, fields, status, param, words):
    monkeypatch.setattr(tokenization, "MAX_PROMPT_CHARACTERS", 50)
    response = await tokenize(house, **fields)
    assert response.status_code == status
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]


async def test_a_prompt_that_is_no_unicode(house):
    body = '{"model": "demo", "prompt": "a\\ud800"}'
    response = await house.client.post("/tokenize", content=body)
    assert response.status_code == 400


async def test_a_prompt_that_the_vocabulary_refuses(house, monkeypatch):
    def refuse(self, parts):
        raise tokenization.RequestError("no", param="messages")

    monkeypatch.setattr(JsonTokenizer, "encode", refuse)
    response = await tokenize(house, prompt="a")
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("tokens", "status", "param", "words"),
    [
        ([5, 151657], 400, "tokens[1]", "must be from 0 to 151656"),
        ([-1], 400, "tokens[0]", "must be from 0 to 151656"),
        (["a"], 400, "tokens[0]", "must be a whole number"),
        ("a", 400, "tokens", "must be a list"),
        ([1] * 51, 413, "tokens", "at most 50 ids"),
    ],
)
async def test_what_cannot_be_detokenised(house, monkeypatch, tokens, status, param, words):
    monkeypatch.setattr(tokenization, "MAX_TOKENS", 50)
    response = await detokenize(house, tokens)
    assert response.status_code == status
    assert error_of(response)["param"] == param
    assert words in error_of(response)["message"]


async def test_detokenize_without_a_body_or_a_model(house):
    assert error_of(await house.client.post("/detokenize", content=b"{"))["message"] == "the body is not valid JSON"
    assert error_of(await house.client.post("/detokenize", json={"model": "demo"}))["param"] == "tokens"
    assert (await detokenize(house, [1], model="other")).status_code == 404
    assert (await detokenize(house, [])).json() == {"prompt": ""}


async def test_the_key_is_asked_for():
    async with strict_engine() as engine, gateway(engine.url, api_keys=("a" * 20,)) as running:
        for path in ("/tokenize", "/detokenize", "/v1/chat/completions/render"):
            assert (await running.client.post(path, json={})).status_code == 401
