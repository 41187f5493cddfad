#!/usr/bin/env python3
"""What transformers answers, as JSON: for each model and chat ``prompt`` and ``tokens`` (ids), ``texts``, ``logprobs``.

    python reference.py CHECKPOINTS OUTPUT

Runs in the engines' environment: needs torch and transformers.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import torch
from chats import ANSWER, CHATS, MODELS, PICTURES, named
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


def answer(model: Any, processor: Any, chat: tuple[str, ...]) -> dict[str, Any]:
    content = [{"type": "image"} if part.startswith("@") else {"type": "text", "text": part} for part in chat]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    images = [Image.open(io.BytesIO(PICTURES[name])) for name in named(chat)] or None
    # an engine adds no BOS to a prompt that a template has made
    inputs = processor(text=[prompt], images=images, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        made = model.generate(
            **inputs, max_new_tokens=ANSWER, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    prompt_ids = inputs["input_ids"][0].tolist()
    tokens = made.sequences[0, len(prompt_ids) :].tolist()
    steps = zip(made.logits, tokens, strict=True)
    logprobs = [torch.log_softmax(logits[0].double(), -1)[token].item() for logits, token in steps]
    texts = [processor.tokenizer.decode([token]) for token in tokens]
    return {"prompt": prompt_ids, "tokens": tokens, "texts": texts, "logprobs": logprobs}


def main(checkpoints: Path, output: Path) -> None:
    found = {}
    for name in MODELS:
        model = AutoModelForImageTextToText.from_pretrained(checkpoints / name, dtype=torch.float32).eval()
        processor = AutoProcessor.from_pretrained(checkpoints / name)
        found[name] = {title: answer(model, processor, chat) for title, chat in CHATS.items()}
    output.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
