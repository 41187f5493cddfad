"""Text from tokens as they arrive, for vocabularies of every kind."""

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import metaspace, sentencepiece, tekken, wordpiece

from pixelgate.prompt.stops import StopStrings
from pixelgate.prompt.tokenizer_json import JsonTokenizer
from pixelgate.prompt.tokens import Detokenizer, Tokenizer, open_tokenizer

TEXT = st.text(st.characters(codec="utf-8"), max_size=60) | st.text("ab <|>_im\né😀\ufffd", max_size=60)


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


def test_bytes_that_are_no_text_are_not_held_back_for_ever(tokenizer):
    byte = tokenizer.encode_text("é")[1]  # continues a character, begins none
    pieces, rest = streamed(tokenizer, [[byte]] * 130, True)
    assert (pieces, rest) == (["", *["\ufffd"] * 129], "\ufffd")


def test_a_character_behind_bytes_that_are_no_text_is_whole(tokenizer):
    lead, byte = tokenizer.encode_text("é")
    assert streamed(tokenizer, [[byte]] * 99 + [[lead], [byte]], True) == (["", *["\ufffd"] * 99, "é"], "")


KINDS = ("bytes", "sentencepiece", "prepended", "metaspace", "wordpiece", "tekken")


@pytest.fixture(scope="module", params=KINDS)
def any_tokenizer(request, trained, tmp_path_factory) -> Tokenizer:
    match request.param:
        case "bytes":
            return JsonTokenizer(tokenizers.Tokenizer.from_str(trained))
        case "sentencepiece":
            return JsonTokenizer(sentencepiece("first"))
        case "prepended":
            return JsonTokenizer(sentencepiece("normalizer"))
        case "metaspace":
            return JsonTokenizer(metaspace())
        case "wordpiece":
            return JsonTokenizer(wordpiece())
    return open_tokenizer(tekken(tmp_path_factory.mktemp("tekken") / "tekken.json"))


# What may follow in a random answer: any id, bytes of characters and of nothing, spaces, special tokens.
CHUNKS = st.lists(st.lists(st.integers(0, 300) | st.integers(0, 2499) | st.integers(-1, 20), max_size=5), max_size=40)


@given(CHUNKS, st.booleans())
def test_the_pieces_of_any_answer_are_its_text(any_tokenizer, chunks, skip):
    ids = [id_ for chunk in chunks for id_ in chunk]
    whole = any_tokenizer.decode(ids, skip_special_tokens=skip)
    for cut in (chunks, [[id_] for id_ in ids], [ids]):
        pieces, rest = streamed(any_tokenizer, cut, skip)
        assert "".join(pieces) + rest == whole
        assert rest in ("", "\ufffd")


@given(st.text("ab receipt.\n'中é😀\u2581", max_size=60))
def test_no_piece_has_half_a_character(any_tokenizer, text):
    ids = any_tokenizer.encode_text(text)
    pieces, rest = streamed(any_tokenizer, [[id_] for id_ in ids], True)
    assert "".join(pieces) + rest == any_tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces) + rest


@given(
    st.lists(st.sampled_from([*"abst", "re", "rece", "ipt", " ", "é", "😀"]), max_size=30).map("".join),
    st.lists(st.text("abst é😀", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_stop_strings_are_met_across_tokens(any_tokenizer, text, stops, size):
    ids = any_tokenizer.encode_text(text)
    whole = any_tokenizer.decode(ids)
    expected, _ = StopStrings(stops).push(whole)
    detokenizer, cut = Detokenizer(any_tokenizer), StopStrings(stops)
    found = ""
    for start in range(0, len(ids), size):
        piece, stopped = cut.push(detokenizer.push(ids[start : start + size]))
        found += piece
        if stopped:
            break
    else:
        piece, stopped = cut.push(detokenizer.flush())
        found += piece
    if not stopped:
        found += cut.flush()
        expected = whole
    assert found == expected


def test_valid_characters_of_a_run_of_bytes_stay():
    tokenizer = JsonTokenizer(sentencepiece("first"))
    ids = [[tokenizer.special_ids["<s>"] + 3 + byte for byte in c.encode()] for c in "中\u2581"]
    assert tokenizer.decode([*ids[0], *ids[1][:2], *ids[1]]) == "中\ufffd\u2581"
    assert tokenizer.decode([*ids[0], *ids[1]]) == "中\u2581"
    assert tokenizer.decode([*ids[0][:1], 1, 0, *ids[0][1:], *ids[1]]) == "中\u2581"
    assert tokenizer.decode([*ids[0][:1], 1, *ids[0][1:]], skip_special_tokens=False) == "\ufffd<s>\ufffd\ufffd"


def test_a_long_answer_takes_no_more_time_a_token(tokenizer):
    decoded = 0

    class Counting:
        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def decode(self, ids, skip_special_tokens=True):
            nonlocal decoded
            decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens)

    lead, byte = tokenizer.encode_text("é")
    text = tokenizer.encode_text("The receipt says 5.60 中文 😀. ")
    for answer in (text * 200, [byte] * 3000, [lead] * 3000, [*text, *[2600] * 3000]):
        decoded = 0
        streamed(Counting(), [[id_] for id_ in answer], True)
        assert decoded < 30 * len(answer)
