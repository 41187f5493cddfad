#!/usr/bin/env python3
"""``local:transformers`` beside transformers itself: the same greedy answers from our tensors as from its processor's.

    pip install torch torchvision transformers==5.24.0 pixelgate[gateway]
    python tests/engines/real_transformers.py [CHECKPOINT...]

Without checkpoints tiny ones are made, with random weights, of every family that transformers can run: it has no model
for Phi's remote code, Phi-4's is another kind, and its Llama 4 fails on its own in 5.24.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "goldens"))
from tokenizers_of import CHECKPOINTS, EOS, SPECIALS, complete, tokenizer

from pixelgate.engines.engine import Delta, EngineRequest
from pixelgate.fairness import Owner
from pixelgate.gateway import wire
from pixelgate.gateway.chat import Chat, prepare
from pixelgate.gateway.phases import Phases
from pixelgate.gateway.served import ServedModel, open_model
from pixelgate.gateway.services import Services
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

QUESTION = "What is in the picture?"
TOKENS = 16
SIZES = {"no picture": [], "a picture": [(210, 300)], "two pictures": [(210, 300), (100, 330)]}
# with several pictures its processor leaves the tiles out, and engines do not
ALONE = {"llava_onevision"}

_TEXT = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
}
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2}
_QWEN2 = {"hidden_size": 64, "intermediate_size": 128, "depth": 2, "num_heads": 2, "out_hidden_size": 128}
_SMALL: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"vision_config": {"embed_dim": 64, "hidden_size": 128, "depth": 2, "num_heads": 2, "mlp_ratio": 2}},
    "qwen2_5_vl": {"vision_config": {**_QWEN2, "fullatt_block_indexes": [1]}},
    "qwen3_vl": {"vision_config": {**_QWEN2, "depth": 3, "deepstack_visual_indexes": [0, 1]}},
    "llava15_clip": {"text_config": {"model_type": "llama"}},
    "llava_next": {"text_config": {"model_type": "llama"}},
    "llava_onevision": {"text_config": {"model_type": "qwen2"}},
    "pixtral": {"text_config": {"model_type": "mistral"}, "vision_config": {"head_dim": 32}},
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {"head_dim": 32}},
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}


def made(family: str, folder: Path) -> Path:
    """A small checkpoint of a family, in whose random answers every pixel counts."""
    complete(family, folder)
    config = json.loads((folder / "config.json").read_text())
    small = _SMALL[family]
    vision = {} if family.startswith("qwen") else _VISION
    config["vision_config"] = {**config["vision_config"], **vision, **small.get("vision_config", {})}
    rows = max(tokenizer(family).get_vocab().values()) + 1
    config["text_config"] = {
        **config.get("text_config", {}),
        **_TEXT,
        "vocab_size": rows,
        **small.get("text_config", {}),
    }
    if family.startswith("qwen"):
        config["text_config"]["rope_parameters"] = _ROPE
        config["vocab_size"] = rows
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.from_pretrained(folder))
    specials = sorted(SPECIALS[family].values())
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim >= 2:
                scale = 1.0 if "embed_tokens" in name else 1.3 / weights[0].numel() ** 0.5
                weights.copy_(torch.randn(weights.shape, generator=dice) * scale)
        model.get_output_embeddings().weight[specials] = 0.0  # they end nothing, and are no picture
    model.save_pretrained(folder)
    end = SPECIALS[family][EOS.get(family, "</s>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    return folder


def picture(height: int, width: int, seed: int) -> Image.Image:
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 10, width // 10, 3), np.uint8)
    return Image.fromarray(blocks).resize((width, height))


def question(pictures: list[Image.Image], **fields: Any) -> bytes:
    content: list[dict[str, Any]] = [] if pictures else [{"type": "text", "text": QUESTION}]
    for each in pictures:
        file = io.BytesIO()
        each.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0}
    return json.dumps({**body, **fields}).encode()


class Gateway:
    """The gateway's own way from a question to an answer's deltas."""

    def __init__(self, model: ServedModel, services: Services) -> None:
        self.model, self.services = model, services

    async def request(self, body: bytes) -> EngineRequest:
        model, phases = self.model, Phases(self.services.metrics)
        with self.services.holding(Owner("real"), phases) as held:
            chat = Chat("real", wire.parse_chat(body), model, model.facts, phases, model.processor, held)
            return await prepare(chat, self.services)

    async def answer(self, request: EngineRequest, most: int = 1 << 30) -> list[Delta]:
        deltas = []
        async with aclosing(self.model.fleet.generate(request)) as answer:
            async for delta in answer:
                deltas.append(delta)
                if len(deltas) == most:
                    break
        return deltas


@asynccontextmanager
async def gateway(checkpoint: Path, options: str = "") -> AsyncIterator[Gateway]:
    model = ModelSettings(str(checkpoint), (f"local:transformers{options}",), "m")
    settings = GatewaySettings(models=(model,))
    served, services = open_model(model, settings), Services.of(settings)
    try:
        await served.connect(0.0)
        async with services.running():
            yield Gateway(served, services)
    finally:
        await served.fleet.close()


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def theirs(checkpoint: Path, pictures: list[Image.Image]) -> tuple[list[int], list[int]]:
    """The prompt and the answer of transformers alone."""
    processor = transformers.AutoProcessor.from_pretrained(checkpoint)
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
    content: list[dict[str, Any]] = [] if pictures else [{"type": "text", "text": QUESTION, "content": QUESTION}]
    for each in pictures:
        content += [{"type": "image", "image": each}, {"type": "text", "text": QUESTION, "content": QUESTION}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)[0].tolist()
    length = inputs["input_ids"].shape[1]
    return answer[:length], answer[length:]


async def same_answers(checkpoint: Path, family: str) -> None:
    answers = []
    async with gateway(checkpoint) as ours:
        for name, sizes in SIZES.items():
            if len(sizes) > 1 and family in ALONE:
                continue
            pictures = [picture(height, width, seed) for seed, (height, width) in enumerate(sizes)]
            request = await ours.request(question(pictures))
            deltas = await ours.answer(request)
            prompt, answer = theirs(checkpoint, pictures)
            assert list(request.token_ids) == prompt, f"{family}: the prompt with {name} is another"
            assert ids_of(deltas) == answer, f"{family}: the answer to {name} is {ids_of(deltas)}, not {answer}"
            answers.append(answer)
        other = await ours.answer(await ours.request(question([picture(210, 300, 99)])))
        assert ids_of(other) not in answers, f"{family}: another picture has the same answer"
        print(f"{family}: {len(answers)} prompts and answers are those of transformers")


async def parameters(checkpoint: Path) -> None:
    """What chooses tokens, on one checkpoint: each does what it says."""
    pictures = [picture(210, 300, 0)]
    async with gateway(checkpoint) as ours:

        async def ask(**fields: Any) -> list[Delta]:
            return await ours.answer(await ours.request(question(pictures, **fields)))

        greedy = ids_of(await ask())
        assert ids_of(await ask(temperature=2.0, top_k=1)) == greedy
        assert ids_of(await ask(temperature=2.0, top_p=1e-6)) == greedy
        assert ids_of(await ask(temperature=2.0, min_p=1.0)) == greedy
        some = [ids_of(await ask(temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
        assert some[0] == some[1] != some[2]
        assert len({tuple(ids_of(await ask(temperature=1.5))) for _ in range(3)}) == 3
        penalised = ids_of(await ask(repetition_penalty=10.0, max_tokens=64))
        assert len(set(penalised)) == 64
        stopped = await ask(stop_token_ids=[greedy[3]])
        assert (ids_of(stopped), stopped[-1].finish_reason) == (greedy[: greedy.index(greedy[3]) + 1], "stop")
        later = await ask(stop_token_ids=[greedy[3]], min_tokens=8)
        assert len(later) >= 8
        assert greedy[3] not in ids_of(later)[:8]
        told = await ask(logprobs=True, top_logprobs=3, max_tokens=5)
        for delta in told:
            (entry,) = delta.logprobs
            assert entry.top[0] == (delta.token_ids[0], entry.logprob)
            assert 0 > entry.top[0][1] > entry.top[1][1] > entry.top[2][1]
        request = await ours.request(question(pictures, max_tokens=8000))
        assert ids_of(await ours.answer(request, most=3)) == greedy[:3]
        assert ids_of(await ask()) == greedy  # at once, for what was left behind has ended
    async with gateway(checkpoint, "?device=cpu&dtype=bfloat16") as ours:
        request = await ours.request(question(pictures))
        assert request.images is not None
        assert request.images.tensors[0].dtype == "bfloat16"
        assert len(await ours.answer(request)) == TOKENS
    print(f"{checkpoint.name}: parameters do what they say")


def checkpoints(given: list[str], folder: Path) -> Iterator[tuple[str, Path]]:
    yield from ((Path(each).name, Path(each)) for each in given)
    if not given:
        assert _SMALL.keys() <= {each.name for each in CHECKPOINTS.iterdir()}
        yield from ((family, made(family, folder / family)) for family in _SMALL)


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        found = checkpoints(sys.argv[1:], Path(folder))
        first = next(found)
        for family, checkpoint in itertools.chain([first], found):
            asyncio.run(same_answers(checkpoint, family))
        asyncio.run(parameters(first[1]))


if __name__ == "__main__":
    main()
