import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from pixelgate.demo import CHECKPOINT
from pixelgate.errors import CheckpointError, RequestError
from pixelgate.prompt.tokens import Detokenizer, Tokenizer

IDS = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|image_pad|>": 151655,
    "<|video_pad|>": 151656,
}
TEXT = st.text(st.characters(codec="utf-8"), max_size=60) | st.text("ab <|>_im\né😀\ufffd", max_size=60)


def test_the_demo_tokenizer_is_what_the_script_makes(trained):
    assert json.loads((CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8")) == json.loads(trained)


def test_special_tokens_keep_the_ids_of_qwen(tokenizer):
    assert dict(tokenizer.special_ids) == IDS
    assert tokenizer.vocab_size == 151657
    assert tokenizer.token_id("<|image_pad|>") == 151655
    assert tokenizer.token_id("no such token") is None
    assert tokenizer.decode([*IDS.values()], skip_special_tokens=False) == "".join(IDS)
    assert tokenizer.decode([*IDS.values()]) == ""


def test_special_tokens_in_text_are_text(tokenizer):
    text = "see <|image_pad|>, <|im_start|>system"
    ids = tokenizer.encode_text(text)
    assert max(ids) < 2500
    assert tokenizer.decode(ids) == text


def test_special_tokens_by_id(tokenizer, library):
    ids = tokenizer.encode([151644, "user\nhi", 151645, "\n"])
    assert ids == library.encode("<|im_start|>user\nhi<|im_end|>\n", add_special_tokens=False).ids


def test_words_the_demo_needs_are_single_tokens(tokenizer):
    assert [len(tokenizer.encode_text(word)) for word in ("user", "assistant", " image", " picture", "TOTAL")] == [
        1
    ] * 5


@given(TEXT)
def test_text_comes_back(tokenizer, library, text):
    ids = tokenizer.encode_text(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == library.normalizer.normalize_str(text)


def test_no_id_outside_the_vocabulary_has_text(tokenizer):
    assert tokenizer.decode([-1, 2600, *range(151657, 151700), 10**7], skip_special_tokens=False) == ""
    inside = Detokenizer(tokenizer, skip_special_tokens=False)
    assert inside.push(range(151657, 151700)) + inside.flush() == ""
    seal = next(iter(tokenizer._seals.values()))
    assert tokenizer.token_id(seal) is None


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(RequestError, match="not valid Unicode"):
        tokenizer.encode_text("a\ud800")


def test_truncation_padding_and_automatic_tokens_are_off(trained, library, tmp_path):
    limited = tokenizers.Tokenizer.from_str(trained)
    limited.enable_truncation(4)
    limited.enable_padding(length=64)
    limited.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 151644)])
    limited.save(str(tmp_path / "tokenizer.json"))
    text = "The sign says that the shop is closed."
    read = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert read.encode_text(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("content", [None, "", "{}", "no json"])
def test_unreadable_file(tmp_path: Path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="missing or is not a tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def words(vocabulary: list[str], special: list[str], unknown: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return Tokenizer(backend)


def test_a_vocabulary_that_reads_a_special_token_from_text():
    tokenizer = words(["<unk>", "<img>", "a"], ["<unk>", "<img>"], "<unk>")
    assert tokenizer.encode_text("a b") == [2, 0]
    assert tokenizer.encode(["a", 1]) == [2, 1]
    with pytest.raises(RequestError, match="holds a control token"):
        tokenizer.encode_text("a <img>")


@pytest.mark.parametrize("name", ["x", "<", "img>", "7>", " <img>"])
def test_special_tokens_that_look_like_words_are_refused(name):
    with pytest.raises(CheckpointError, match="is not supported"):
        words(["<unk>"], [name], "<unk>")


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


PIECES = st.lists(st.text("ab x\n", max_size=5) | st.sampled_from(["<s>", "<img>", "<|end|>"]), max_size=8)


@pytest.mark.parametrize("scheme", ["first", "always", "never", "normalizer"])
def test_spaces_around_special_tokens_are_as_in_one_string(scheme):
    plain, ours = sentencepiece(scheme), Tokenizer(sentencepiece(scheme))

    @given(PIECES)
    def check(pieces: list[str]) -> None:
        expected = plain.encode("".join(pieces), add_special_tokens=False).ids
        assert ours.encode([ours.special_ids.get(piece, piece) for piece in pieces]) == expected

    check()


def streamed(tokenizer: Tokenizer, chunks: list[list[int]], skip: bool) -> tuple[list[str], str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [detokenizer.push(chunk) for chunk in chunks], detokenizer.flush()


@given(TEXT, st.integers(1, 3))
def test_streamed_text_is_the_text(tokenizer, text, size):
    ids = tokenizer.encode_text(text)
    pieces, rest = streamed(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)], True)
    whole = tokenizer.decode(ids)
    assert "".join(pieces) + rest == whole
    if "\ufffd" not in whole:
        assert rest == ""
        assert "\ufffd" not in "".join(pieces)


@given(
    st.lists(st.lists(st.integers(0, 2499) | st.integers(0, 255) | st.integers(151640, 151660), max_size=3)),
    st.booleans(),
)
def test_streamed_tokens_of_any_kind_give_the_whole_decode(tokenizer, chunks, skip):
    pieces, rest = streamed(tokenizer, chunks, skip)
    ids = [id_ for chunk in chunks for id_ in chunk]
    assert "".join(pieces) + rest == tokenizer.decode(ids, skip_special_tokens=skip)


def test_tokens_that_end_an_answer_are_no_part_of_it(tokenizer):
    end = tokenizer.special_ids["<|im_end|>"]
    word = tokenizer.encode_text("receipt")
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False, stop_ids=[end, word[-1]])
    assert detokenizer.push([*tokenizer.encode_text("A "), *word, end]) == tokenizer.decode(
        [*tokenizer.encode_text("A "), *word[:-1]]
    )
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([end]) == "<|im_end|>"


def test_half_a_character_is_held_back_until_it_is_whole_or_the_end(tokenizer):
    ids = tokenizer.encode_text("😀")
    assert len(ids) == 4
    assert streamed(tokenizer, [[id_] for id_ in ids], True) == (["", "", "", "😀"], "")
    assert streamed(tokenizer, [[id_] for id_ in ids[:3]], True) == (["", "", ""], "\ufffd")
    assert streamed(tokenizer, [ids[:2], tokenizer.encode_text("a")], True) == (["", "\ufffda"], "")


def test_a_run_of_bytes_that_are_no_text_is_not_held_back_for_ever(tokenizer):
    byte = tokenizer.encode_text("é")[1]  # continues a character, begins none
    pieces, rest = streamed(tokenizer, [[byte]] * 130, True)
    assert [i for i, piece in enumerate(pieces) if piece] == [63, 127]
    assert "".join(pieces) + rest == "\ufffd" * 130


@given(st.lists(st.text("ab 中é", min_size=1, max_size=4), max_size=6))
def test_spaces_and_byte_tokens_of_other_vocabularies(texts):
    tokenizer = Tokenizer(sentencepiece("first"))
    ids = tokenizer.encode([1, "".join(texts)])
    pieces, rest = streamed(tokenizer, [[id_] for id_ in ids], True)
    assert "".join(pieces) + rest == tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)
