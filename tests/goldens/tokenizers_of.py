"""Stand-in tokenizers: two small vocabularies, and each family's own special tokens with their ids.

The words are those of the demo's tokenizer, or, for the families whose tokenizer came from sentencepiece, of
``sentencepiece.json``. How they treat spaces, bytes and special tokens is the real ones' way.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

HERE = Path(__file__).parent
CHECKPOINTS = HERE / "checkpoints"
BYTES = HERE.parents[1] / "src/pixelgate/demo/checkpoint/tokenizer.json"
PIECES = HERE / "sentencepiece.json"

_QWEN = """
    <|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|>
    <|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>
"""
QWEN = {token: 151643 + i for i, token in enumerate(_QWEN.split())}
LLAVA = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001}
MISTRAL = {
    "<unk>": 0,
    "<s>": 1,
    "</s>": 2,
    "[INST]": 3,
    "[/INST]": 4,
    "[IMG]": 10,
    "<pad>": 11,
    "[IMG_BREAK]": 12,
    "[IMG_END]": 13,
}
LLAMA4 = {
    "<|begin_of_text|>": 200000,
    "<|end_of_text|>": 200001,
    "<|header_start|>": 200005,
    "<|header_end|>": 200006,
    "<|eot|>": 200008,
    "<|python_start|>": 200016,
    "<|python_end|>": 200017,
    "<|image_start|>": 200080,
    "<|image_end|>": 200081,
    "<|tile_x_separator|>": 200084,
    "<|tile_y_separator|>": 200085,
    "<|image|>": 200090,
    "<|patch|>": 200092,
}
PHI3 = {
    "<unk>": 0,
    "<s>": 1,
    "</s>": 2,
    "<|endoftext|>": 32000,
    "<|assistant|>": 32001,
    "<|system|>": 32006,
    "<|end|>": 32007,
    "<|user|>": 32010,
    "<|image|>": 32044,
}
PHI4 = {
    "<|endoftext|>": 199999,
    "<|endoftext10|>": 200010,
    "<|endoftext11|>": 200011,
    "<|assistant|>": 200019,
    "<|end|>": 200020,
    "<|user|>": 200021,
    "<|system|>": 200022,
    "<|tool|>": 200023,
    "<|/tool|>": 200024,
}
SPECIALS = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "llava15_clip": LLAVA,
    "llava_next": LLAVA,
    "llava_onevision": {**dict(list(QWEN.items())[:3]), "<image>": 151646, "<video>": 151647},
    "llama4": LLAMA4,
    "pixtral": MISTRAL,
    "mistral3": MISTRAL,
    "phi3_5_vision": PHI3,
    "phi4_native": PHI4,
    "phi4_remote": PHI4,
}
BOS = {"llava15_clip": "<s>", "llava_next": "<s>", "phi3_5_vision": "<s>", "pixtral": "<s>", "mistral3": "<s>"}
BOS["llama4"] = "<|begin_of_text|>"
EOS = {"llama4": "<|eot|>", "llava_onevision": "<|im_end|>", "phi3_5_vision": "<|endoftext|>"}
EOS |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|im_end|>")
EOS |= dict.fromkeys(("phi4_native", "phi4_remote"), "<|endoftext|>")
EATS_SPACE = {"<|assistant|>", "<|system|>", "<|end|>", "<|user|>"}  # behind it, in Phi-3's tokenizer


def tokenizer(family: str) -> Tokenizer:
    """The stand-in of a family."""
    specials = SPECIALS[family]
    made = _from_pieces(specials) if specials in (LLAVA, PHI3) else _from_bytes(specials)
    rstrips = EATS_SPACE if specials is PHI3 else set()
    made.add_special_tokens([AddedToken(t, normalized=False, special=True, rstrip=t in rstrips) for t in specials])
    if bos := BOS.get(family):
        made.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, specials[bos])])
    return made


def _from_bytes(specials: dict[str, int]) -> Tokenizer:
    """Special tokens are in the vocabulary, so that they have their own ids, with gaps; no merge leads to them."""
    whole = json.loads(BYTES.read_text("utf-8"))
    model = whole["model"]
    words = [word for word, id_ in sorted(model["vocab"].items(), key=lambda item: item[1]) if id_ < 151643]
    first = 1000 if specials is MISTRAL else 0
    vocab = {word: first + i for i, word in enumerate(words)}
    whole.update(added_tokens=[], model={**model, "vocab": vocab | specials})
    return Tokenizer.from_str(json.dumps(whole))


def _from_pieces(specials: dict[str, int]) -> Tokenizer:
    pieces = json.loads(PIECES.read_text("utf-8"))
    vocab = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    vocab |= {piece: 259 + i for i, piece in enumerate(pieces["vocab"])}
    merges = [tuple(merge.split(" ")) for merge in pieces["merges"]]
    made = Tokenizer(models.BPE(vocab | specials, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def complete(family: str, folder: Path) -> Path:
    """The checkpoint of a family with its chat template and its stand-in tokenizer, in ``folder``."""
    shutil.copytree(CHECKPOINTS / family, folder, dirs_exist_ok=True)
    tokenizer(family).save(str(folder / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= {"eos_token": EOS.get(family, "</s>")}
    if family in BOS:
        config["bos_token"] = BOS[family]
    images = {"llama4": "<|image|>", "phi4_native": "<|endoftext10|>", "pixtral": "[IMG]", "mistral3": "[IMG]"}
    if family in images:
        audio = {"audio_token": "<|endoftext11|>"} if family == "phi4_native" else {}
        config["extra_special_tokens"] = {"image_token": images[family]} | audio
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder
