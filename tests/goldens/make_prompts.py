#!/usr/bin/env python3
"""Make ``data/prompts.json``: the prompts of every family's chat template and processor, by transformers itself.

    pip install torch torchvision transformers==5.24.0 pillow
    python tests/goldens/make_prompts.py [FILE]        (default: tests/goldens/data/prompts.json)

Token ids are kept as runs of [id, count, id, count, ...]; "engine" has those without what the processor puts before a
prompt. Phi's remote code is no part of transformers: what it does with a prompt is repeated here, step by step. Special
tokens that a user types are text with ``sanitize_control_tokens``.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import remote
import transformers
from conversations import conversations
from PIL import Image
from tokenizers_of import HERE, SPECIALS, complete
from transformers import AutoProcessor, AutoTokenizer

TARGET = HERE / "data/prompts.json"
PARTS_ONLY = {"llava15_clip", "llava_next", "llava_onevision"}
STRINGS_ONLY = {"phi3_5_vision", "phi4_native", "phi4_remote"}
TAG = r"<\|image_\d+\|>"


def in_the_templates_form(family: str, messages: list[dict[str, Any]], pictures: list[Image.Image]) -> Any:
    """The messages as somebody who knows the template writes them for transformers."""
    left, number, ready = iter(pictures), itertools.count(1), []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and family in PARTS_ONLY:
            content = [{"type": "text", "text": content}]
        if isinstance(content, list) and family in STRINGS_ONLY:
            tag = "<|endoftext10|>" if family == "phi4_native" else "<|image_{}|>"
            content = "\n".join(p["text"] if "text" in p else tag.format(next(number)) for p in content)
        elif isinstance(content, list):
            parts = [{"type": "image", "image": next(left)} if p["type"] == "image" else dict(p) for p in content]
            if family == "pixtral":  # its template looks for the text there
                parts = [p | ({"content": p["text"]} if "text" in p else {}) for p in parts]
            if family in ("pixtral", "mistral3") and message["role"] == "system" and all("text" in p for p in parts):
                parts = "".join(p["text"] for p in parts)
            content = parts
        ready.append({**message, "content": content})
    return ready


def main() -> None:
    found = {}
    for family in SPECIALS:
        with tempfile.TemporaryDirectory() as folder:
            found[family] = prompts(family, complete(family, Path(folder) / family))
        refused = [name for name, row in found[family].items() if "refused" in row]
        print(f"{family}: {len(found[family])} prompts, refused: {', '.join(refused) or 'none'}")
    rows = ",\n".join(
        f" {json.dumps(family)}: {{\n"
        + ",\n".join(f"  {json.dumps(n)}: {json.dumps(r)}" for n, r in of.items())
        + "\n }"
        for family, of in found.items()
    )
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(f'{{\n "transformers": "{transformers.__version__}",\n{rows}\n}}\n', "utf-8")


def prompts(family: str, folder: Path) -> dict[str, Any]:
    make = Remote(folder) if family in ("phi3_5_vision", "phi4_remote") else Real(family, folder)
    rows: dict[str, Any] = {}
    for name, case in conversations(list(SPECIALS[family])).items():
        pictures = [Image.new("RGB", (width, height)) for height, width in case.get("sizes", ())]
        options = {key: case[key] for key in ("tools", "continue_final_message") if key in case}
        options["add_generation_prompt"] = case.get("add_generation_prompt", True)
        messages = in_the_templates_form(family, copy.deepcopy(case["messages"]), pictures)
        try:
            with_bos, without = (
                make(messages, pictures, options, typed=case.get("typed", False), special=special)
                for special in (True, False)
            )
        except Exception as failure:  # whatever a template or a processor raises
            rows[name] = {"refused": str(failure).split("\n")[0][:80]}
            continue
        rows[name] = {"ids": runs(with_bos)} | ({} if with_bos == without else {"engine": runs(without)})
    return rows


class Real:
    """transformers' own processor."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        if family == "phi4_native":
            tokenizer = AutoTokenizer.from_pretrained(folder)
            images = transformers.Phi4MultimodalImageProcessor.from_pretrained(folder)
            audio = transformers.Phi4MultimodalFeatureExtractor()
            self.processor = transformers.Phi4MultimodalProcessor(images, audio, tokenizer)
            self.processor.chat_template = tokenizer.chat_template
        else:
            self.processor = AutoProcessor.from_pretrained(folder)

    def __call__(self, messages: Any, pictures: Any, options: Any, *, typed: bool, special: bool) -> list[int]:
        given = {} if special else {"add_special_tokens": False}
        if self.family in STRINGS_ONLY and pictures:
            given["images"] = pictures
        inputs = self.processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            sanitize_control_tokens=typed,
            processor_kwargs=given,
            **options,
        )
        ids = inputs["input_ids"]
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        return ids[0] if isinstance(ids[0], list) else ids


class Remote:
    """The remote code of Phi-3-vision and Phi-4-multimodal, and the id that engines use for its pictures."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.phi3 = "phi3" in folder.name
        config = json.loads((folder / "preprocessor_config.json").read_text("utf-8"))
        self.images = remote.PROCESSORS[config["image_processor_type"]](config)

    def __call__(self, messages: Any, pictures: Any, options: Any, *, typed: bool, special: bool) -> list[int]:
        if typed:
            raise ValueError("the remote code knows no way to type a special token")
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **options)
        tags = re.findall(TAG, text)
        if len(tags) != len(pictures):
            raise ValueError(f"{len(tags)} tags for {len(pictures)} pictures")
        counts = self.images(pictures)["num_img_tokens"].tolist() if pictures else []
        if self.phi3:
            if not pictures:
                return self.tokenizer(text, add_special_tokens=special).input_ids
            # each chunk is tokenised alone, special tokens included; vLLM does the same
            chunks = [self.tokenizer(chunk).input_ids for chunk in re.split(TAG, text)]
            between = [[32044] * counts[int(tag.split("_")[1][:-2]) - 1] for tag in tags]
            return [id_ for pair in itertools.zip_longest(chunks, between, fillvalue=[]) for ids in pair for id_ in ids]
        ids = self.tokenizer(re.sub(TAG, "<|endoftext10|>", text), add_special_tokens=special).input_ids
        left = iter(counts)
        return [i for id_ in ids for i in ([id_] * next(left) if id_ == 200010 else [id_])]


def runs(ids: list[int]) -> list[int]:
    return [n for id_, group in itertools.groupby(ids) for n in (id_, sum(1 for _ in group))]


if __name__ == "__main__":
    main()
