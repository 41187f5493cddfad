"""A token's own bytes, for vocabularies of all kinds."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pixelgate.prompt.tokenizer_json import JsonTokenizer


@pytest.fixture
def byte_level():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return JsonTokenizer(backend)


def test_every_byte_of_a_byte_level_vocabulary(byte_level):
    found = {byte_level.token_bytes(id_) for id_ in range(256)}
    assert found == {bytes([byte]) for byte in range(256)}
    euro = byte_level.encode_text("€")
    assert [byte_level.token_bytes(id_) for id_ in euro] == [b"\xe2", b"\x82", b"\xac"]
    (letter,) = byte_level.encode_text("a")
    assert byte_level.token_bytes(letter) == b"a"


def test_bytes_that_a_vocabulary_falls_back_to_and_the_replacement_character_itself():
    vocabulary = {"<unk>": 0, "a": 1, "<0xE2>": 2, "<0x61>": 3, "\ufffd": 4}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = JsonTokenizer(backend)
    assert [tokenizer.token_bytes(id_) for id_ in (2, 3, 4)] == [b"\xe2", b"a", "\ufffd".encode()]
    assert tokenizer.token_bytes(99) == b""
    assert tokenizer.token_text(99) is None
