"""Small vocabularies of every kind that checkpoints have."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers


def sentencepiece(scheme: str) -> tokenizers.Tokenizer:
    """A vocabulary in the manner of Llama: words begin with a visible space, other bytes have tokens of their own."""
    letters = "▁ab<s>x|"
    names = ["<unk>", "<s>", "<img>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁a", "▁b"]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [("▁", "a"), ("▁", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if scheme == "normalizer":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken("<s>", normalized=False), AddedToken("<img>", normalized=False, lstrip=True)]
    )
    backend.add_special_tokens(
        [AddedToken("<|end|>", normalized=False, rstrip=True), AddedToken("<unk>", normalized=False)]
    )
    return backend


def metaspace() -> tokenizers.Tokenizer:
    """A vocabulary in the manner of T5, whose decoder drops the space of the first token; bytes fall back."""
    backend = sentencepiece("always")
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    """A vocabulary in the manner of BERT: what continues a word begins with ##."""
    names = ["[UNK]", "[CLS]", "[SEP]", "receipt", "##s", "##é", "say", "a", "##a", ".", "'", "s", "n", "##t", "中"]
    backend = tokenizers.Tokenizer(models.WordPiece({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names[:3]])
    return backend


def tekken(path: Path) -> Path:
    """Write a tekken.json: bytes, a few longer tokens, and Mistral's first special tokens."""
    longer = [b"re", b"ce", b"ip", b"rece", b"ipt", b"receipt", b" a", "é".encode(), b"\xf0\x9f", b"\x98\x80"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    vocabulary = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            "num_vocab_tokens": 256 + len(longer),
            "default_vocab_size": 256 + len(longer) + 10,
            "default_num_special_tokens": 10,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *longer])
        ],
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(special)],
    }
    path.write_text(json.dumps(vocabulary), encoding="utf-8")
    return path
