"""An answer through the gateway is SGLang's own to the same request, and, of a Qwen, that of transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest
from asking import ask
from chats import CHATS
from kinds import SGLANG, SGLANG_GRPC, SGLANG_HTTP
from processes import free_port
from questions import greedy
from test_answers import CLOSE, every

from pixelgate.prompt.tokens import open_tokenizer


@every(kinds=SGLANG)
@pytest.mark.parametrize("title", CHATS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_equal(served, title, stream):
    model = served.model
    answer = ask(served.gateway.client, greedy(model, title), stream)
    assert answer.status == 200, answer.error
    assert answer.done
    (choice,), (their,) = answer.choices, served.own[title]["choices"]
    assert choice.text.rstrip("\ufffd") == their["message"]["content"].rstrip("\ufffd")
    assert choice.reason == their["finish_reason"] == "length"
    for name in ("prompt_tokens", "completion_tokens"):
        assert answer.usage[name] == served.own[title]["usage"][name]
    logprobs = [[entry["logprob"] for entry in entries] for entries in (choice.logprobs, their["logprobs"]["content"])]
    # what it streams itself lacks those of tokens that end within a character
    complete = served.kind is not SGLANG_HTTP or not stream
    if complete:
        assert logprobs[0] == pytest.approx(logprobs[1], abs=CLOSE)
    if model.startswith("qwen"):  # its Pixtral and Mistral 3 are others, and it begins LLaVA's prompts with a BOS
        expected = served.expected[title]
        tokenizer = open_tokenizer(served.checkpoints / model / "tokenizer.json")
        assert choice.text.rstrip("\ufffd") == tokenizer.decode(expected["tokens"]).rstrip("\ufffd")
        assert logprobs[1] == pytest.approx(expected["logprobs"], abs=CLOSE)
        assert answer.usage["prompt_tokens"] == len(expected["prompt"])


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_qwen_over_grpc_is_refused_before_anything_is_asked(workshop, model):
    url = f"{SGLANG_GRPC.scheme}://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "pixelgate.cli", "serve", workshop.checkpoints / model, "--engine", url]
    done = subprocess.run([*command, "--port", str(free_port())], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "position" in done.stderr
