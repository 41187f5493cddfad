#!/usr/bin/env python3
"""Checkpoints of 2 to 4 MB with random weights, which real engines load on a CPU. Nothing is downloaded.

    python make_tiny.py DIRECTORY

Needs torch and transformers. The weights are seeded, and large enough that the answer depends on every pixel: what is
wrong in a picture shows in other tokens. Special tokens have no logit, so that an answer does not end by chance.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

LEARNT = 520  # tokens, 256 of them bytes
TEXT = """
A gateway stands in front of the engines and looks at every picture before they do. It turns the picture upright, makes
it smaller or larger, cuts it into tiles or patches, and hands on the numbers that the model was trained to see.
What is in this picture? Describe the image in a few words. There is a harbour with eleven boats, and the nearest has a
green sail. How many people are in the photograph? Four of them are walking, two of them are sitting on the wall.
Read what is written on the ticket: the train leaves at seven, the seat is by the window, and the price is thirty two.
Which of the two pictures is brighter? The second picture is brighter, because the lamp in the corner has been lit.
{"name": "value", "count": 12, "list": [true, false, null]} is an object, and so is {"colour": "red", "size": 3}.
The user asks, the assistant answers, and the system says how. An answer ends where the model has nothing more to say.
"""
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
}
HALF = {**CLIP, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
LANGUAGE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "patch_size": 14}

QWEN_CHAT = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] in ['image', 'image_url'] %}<|vision_start|><|image_pad|><|vision_end|>
{%- else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAVA_CHAT = """\
{%- for message in messages -%}
{{ message['role'] | upper }}: {% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] in ['image', 'image_url'] %}{{ '<image>\\n' }}
{%- else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}{{ ' ' }}
{%- endfor %}
{%- if add_generation_prompt %}ASSISTANT:{% endif %}"""
MISTRAL_CHAT = """\
<s>
{%- for message in messages -%}
{%- if message['role'] == 'assistant' %}{{ message['content'] }}</s>{% else -%}
[INST]{% if message['content'] is string %}{{ message['content'] }}{% else %}
{%- for part in message['content'] %}
{%- if part['type'] in ['image', 'image_url'] %}[IMG]
{%- else %}{{ part['text'] }}{% endif %}
{%- endfor %}{% endif %}[/INST]
{%- endif %}
{%- endfor %}"""


@dataclass(frozen=True)
class Words:
    """A tokenizer and its chat template. ``images`` are the names of the special tokens that pictures have."""

    special: tuple[str, ...]
    eos: str
    pad: str
    chat: str
    images: dict[str, str]
    bos: str | None = None
    begins: bool = False
    kind: str = "PreTrainedTokenizerFast"


QWEN = Words(
    (
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    chat=QWEN_CHAT,
    images={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
    kind="Qwen2Tokenizer",
)
LLAVA = Words(
    ("<unk>", "<s>", "</s>", "<image>", "<pad>"),
    eos="</s>",
    pad="<pad>",
    chat=LLAVA_CHAT,
    images={"image_token": "<image>"},
    bos="<s>",
    begins=True,
)
MISTRAL = Words(
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<pad>"),
    eos="</s>",
    pad="<pad>",
    chat=MISTRAL_CHAT,
    images={"image_token": "[IMG]"},
    bos="<s>",
)


@dataclass(frozen=True)
class Recipe:
    """A checkpoint: what is in its configuration files, as far as it is not the same for all."""

    words: Words
    config: dict[str, Any]
    language: dict[str, Any]
    vision: dict[str, Any]
    pictures: dict[str, Any]
    processor: dict[str, Any] = field(default_factory=dict)


def qwen(number: str, *, processor: str, vision: dict[str, Any], sections: list[int], **pictures: Any) -> Recipe:
    kind = f"qwen{number}_vl"
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    if number == "3":
        rope["mrope_interleaved"] = True
    return Recipe(
        QWEN,
        {"model_type": kind},
        {"rope_parameters": rope},
        {"spatial_merge_size": 2, "temporal_patch_size": 2, **vision},
        {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "processor_class": processor, **pictures},
    )


def llava(kind: str, edge: int, processor: str, **more: Any) -> Recipe:
    grids = [[edge, 2 * edge], [2 * edge, edge], [2 * edge, 2 * edge], [edge, 3 * edge], [3 * edge, edge]]
    only_next = {"image_grid_pinpoints": grids} if kind == "llava_next" else {}
    config = {"vision_feature_layer": -2, "vision_feature_select_strategy": "default", **only_next}
    return Recipe(
        LLAVA,
        {"model_type": kind, "image_seq_length": (edge // 14) ** 2, **config},
        {"model_type": "llama"},
        {"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3, "image_size": edge, "projection_dim": 64},
        {
            **CLIP,
            "size": {"shortest_edge": edge},
            "crop_size": {"height": edge, "width": edge},
            "do_center_crop": True,
            "processor_class": processor,
            **only_next,
            **more,
        },
        {
            "processor_class": processor,
            "image_token": "<image>",
            "patch_size": 14,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
    )


def mistral(kind: str, merge: int, config: dict[str, Any]) -> Recipe:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    tower = {
        "model_type": "pixtral",
        "head_dim": 32,
        "num_hidden_layers": 2,
        "image_size": 448,
        "rope_parameters": rope,
    }
    covered = {"height": 14 * merge, "width": 14 * merge}
    kinds = {"processor_class": "PixtralProcessor", "image_processor_type": "PixtralImageProcessor"}
    return Recipe(
        MISTRAL,
        {"model_type": kind, **config},
        {"model_type": "mistral", "sliding_window": None},
        {**VISION, **tower},
        {**CLIP, "size": {"longest_edge": 448}, "patch_size": covered, **kinds},
        {
            "processor_class": "PixtralProcessor",
            "patch_size": 14,
            "spatial_merge_size": merge,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    )


RECIPES = {
    "qwen2_vl": qwen(
        "2",
        processor="Qwen2VLProcessor",
        vision={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "in_chans": 3,  # the name by which SGLang knows it
        },
        sections=[4, 6, 6],
        **CLIP,
        image_processor_type="Qwen2VLImageProcessor",
        min_pixels=56 * 56,
        max_pixels=448 * 448,
    ),
    "qwen2_5_vl": qwen(
        "2_5",
        processor="Qwen2_5_VLProcessor",
        vision={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
        },
        sections=[4, 6, 6],
        **CLIP,
        image_processor_type="Qwen2VLImageProcessor",
        min_pixels=56 * 56,
        max_pixels=448 * 448,
    ),
    "qwen3_vl": qwen(
        "3",
        processor="Qwen3VLProcessor",
        vision={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        sections=[6, 5, 5],
        **{**HALF, "patch_size": 16},
        image_processor_type="Qwen2VLImageProcessorFast",
        size={"shortest_edge": 64 * 64, "longest_edge": 512 * 512},
    ),
    "llava": llava("llava", 336, "LlavaProcessor", image_processor_type="CLIPImageProcessor"),
    "llava_next": llava(
        "llava_next", 112, "LlavaNextProcessor", image_processor_type="LlavaNextImageProcessor", do_pad=True
    ),
    "pixtral": mistral(
        "llava", 1, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "image_seq_length": 1}
    ),
    "mistral3": mistral("mistral3", 2, {"spatial_merge_size": 2, "tie_word_embeddings": False}),
}


def tokenizer(words: Words) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=LEARNT, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    made.train_from_iterator(TEXT.split("\n"), trainer)
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in words.special])
    if words.begins:
        made.post_processor = processors.TemplateProcessing(
            single=f"{words.bos} $A", special_tokens=[(words.bos, made.token_to_id(words.bos))]
        )
    names = {"bos_token": words.bos} if words.bos else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=words.eos,
        pad_token=words.pad,
        **names,
        extra_special_tokens=words.images,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def model(recipe: Recipe, ids: dict[str, int], rows: int) -> Any:
    """The model of a recipe; ``ids`` are those of the special tokens."""
    image = ids[recipe.words.images["image_token"]]
    pad = ids[recipe.words.pad]
    ending = {
        "eos_token_id": ids[recipe.words.eos],
        "pad_token_id": pad,
        "bos_token_id": ids.get(recipe.words.bos, pad),
    }
    if recipe.words is QWEN:
        named = {"image_token_id": image, "video_token_id": ids["<|video_pad|>"]}
        named |= {f"vision_{end}_token_id": ids[f"<|vision_{end}|>"] for end in ("start", "end")}
    else:
        named = {"image_token_index": image}
    language = {**LANGUAGE, "vocab_size": rows, **recipe.language, **ending}
    kind, rest = recipe.config["model_type"], {k: v for k, v in recipe.config.items() if k != "model_type"}
    config = AutoConfig.for_model(kind, text_config=language, vision_config=recipe.vision, **rest, **named)
    return AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()


def fill(made: Any, silent: list[int]) -> None:
    """Random weights that neither shrink nor grow what passes; the tokens ``silent`` have no logit."""
    generator = torch.Generator().manual_seed(20)

    def noise(like: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * scale

    with torch.no_grad():
        for name, weights in made.named_parameters():
            if weights.ndim < 2:
                weights.copy_(noise(weights, 0.1) + (0 if name.endswith("bias") else 1))
            elif "embed_tokens" in name:
                weights.copy_(noise(weights, 1))
            elif "lm_head" in name:
                weights.copy_(noise(weights, 0.5))
                weights[silent] = 0
            else:
                weights.copy_(noise(weights, 1.3 * weights[0].numel() ** -0.5))


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value, indent=1))


def make(name: str, folder: Path) -> None:
    recipe = RECIPES[name]
    words = tokenizer(recipe.words)
    ids = {token: words.convert_tokens_to_ids(token) for token in recipe.words.special}
    rows = -(-len(words) // 64) * 64
    made = model(recipe, ids, rows)
    fill(made, [*ids.values(), *range(len(words), rows)])
    made.save_pretrained(folder)
    if recipe.words is LLAVA:  # transformers writes CLIP's names without a part that the hub's files, and vLLM, have
        weights = load_file(folder / "model.safetensors")
        long, short = "vision_tower.vision_model.", "vision_tower."
        named = {key if long in key else key.replace(short, long): value for key, value in weights.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    words.chat_template = recipe.words.chat
    words.save_pretrained(folder)
    own = json.loads((folder / "tokenizer_config.json").read_text())
    own |= {"processor_class": recipe.pictures["processor_class"], "tokenizer_class": recipe.words.kind}
    write(folder, "tokenizer_config.json", own)
    write(folder, "preprocessor_config.json", recipe.pictures)
    if recipe.processor:
        write(folder, "processor_config.json", recipe.processor)
    if recipe.words is QWEN:  # its processors have one for videos, too
        kind = "Qwen3VLVideoProcessor" if name == "qwen3_vl" else "Qwen2VLVideoProcessor"
        videos = {key: value for key, value in recipe.pictures.items() if key != "image_processor_type"}
        write(folder, "video_preprocessor_config.json", {**videos, "video_processor_type": kind})
    ending = {"eos_token_id": ids[recipe.words.eos], "pad_token_id": ids[recipe.words.pad], "do_sample": False}
    write(folder, "generation_config.json", ending)


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    for each in RECIPES:
        make(each, Path(sys.argv[1], each))
