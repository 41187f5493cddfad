import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, pre_tokenizers, processors
from vocabularies import sentencepiece

from pixelgate.demo import CHECKPOINT
from pixelgate.errors import CheckpointError, RequestError
from pixelgate.prompt.tokenizer_json import JsonTokenizer
from pixelgate.prompt.tokens import Detokenizer

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
    assert tokenizer.token_text(151655) == "<|image_pad|>"
    assert tokenizer.framing == ((), ())
    assert tokenizer.decode([*IDS.values()], skip_special_tokens=False) == "".join(IDS)
    assert tokenizer.decode([*IDS.values()]) == ""


def test_special_tokens_in_text_are_text(tokenizer):
    text = "see <|image_pad|>, <|im_start|>system"
    ids = tokenizer.encode_text(text)
    assert max(ids) < 2500
    assert tokenizer.decode(ids) == text


def with_gaps(trained):
    """The demo's tokenizer with special tokens first and numbers that nothing has."""
    value = json.loads(trained)
    words = value["model"]["vocab"]
    value["model"]["vocab"] = {word: id_ + 500 + 3 * (id_ > 1000) for word, id_ in words.items()}
    for number, token in enumerate(value["added_tokens"]):
        token["id"] = number
    return json.dumps(value)


def test_a_vocabulary_with_gaps_has_no_words_that_are_control_tokens(trained):
    """The library gives new tokens numbers that words have there."""
    tokenizer = JsonTokenizer(tokenizers.Tokenizer.from_str(with_gaps(trained)))
    library = tokenizers.Tokenizer.from_str(with_gaps(trained))
    for id_ in range(500, tokenizer.vocab_size):
        word = library.decode([id_], skip_special_tokens=False)
        assert tokenizer.decode([id_], skip_special_tokens=False) == word
        assert not set(tokenizer.encode_text(word)) & set(tokenizer.special_ids.values())
    im_end = tokenizer.special_ids["<|im_end|>"]
    assert tokenizer.encode(["user", im_end, "x"]) == library.encode("user<|im_end|>x", add_special_tokens=False).ids


@pytest.mark.parametrize("flag", ["single_word", "normalized"])
def test_special_tokens_that_are_found_in_some_places_only_are_refused(trained, flag):
    value = json.loads(trained)
    for token in value["added_tokens"]:
        token[flag] = True
    value["normalizer"] = {"type": "Prepend", "prepend": "_"}
    with pytest.raises(CheckpointError, match=r"finds its special token .* in some places only"):
        JsonTokenizer(tokenizers.Tokenizer.from_str(json.dumps(value)))


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
    assert {tokenizer.token_text(id_) for id_ in (-1, 2600, *range(151657, 151700))} == {None}


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
    read = JsonTokenizer.from_file(tmp_path / "tokenizer.json")
    assert read.encode_text(text) == library.encode(text, add_special_tokens=False).ids
    assert read.framing == ((151644,), ())


@pytest.mark.parametrize("content", [None, "", "{}", "no json"])
def test_unreadable_file(tmp_path: Path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="missing or is not a tokenizer"):
        JsonTokenizer.from_file(tmp_path / "tokenizer.json")


def words(vocabulary: list[str], special: list[str], unknown: str) -> JsonTokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    return JsonTokenizer(backend)


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


PIECES = st.lists(st.text("ab x\n", max_size=5) | st.sampled_from(["<s>", "<img>", "<|end|>"]), max_size=8)


@pytest.mark.parametrize("scheme", ["first", "always", "never", "normalizer"])
def test_spaces_around_special_tokens_are_as_in_one_string(scheme):
    plain, ours = sentencepiece(scheme), JsonTokenizer(sentencepiece(scheme))

    @given(PIECES)
    def check(pieces: list[str]) -> None:
        expected = plain.encode("".join(pieces), add_special_tokens=False).ids
        assert ours.encode([ours.special_ids.get(piece, piece) for piece in pieces]) == expected

    check()
