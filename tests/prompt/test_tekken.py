import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import tekken

from pixelgate.errors import CheckpointError, RequestError
from pixelgate.prompt.expand import build
from pixelgate.prompt.rules import Rules
from pixelgate.prompt.tekken import TekkenTokenizer
from pixelgate.prompt.template import ChatTemplate
from pixelgate.prompt.tokens import open_tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tekken(tmp_path_factory.mktemp("tekken") / "tekken.json")


@pytest.fixture(scope="module")
def mistral(file):
    return open_tokenizer(file)


def test_special_tokens_have_the_first_ids(mistral):
    assert isinstance(mistral, TekkenTokenizer)
    assert mistral.special_ids["[IMG]"] == 5
    assert list(mistral.special_ids)[8:] == ["<SPECIAL_8>", "<SPECIAL_9>"]
    assert mistral.specials.split("a[IMG]b") == ["a", "[IMG]", "b"]
    assert mistral.vocab_size == 276
    assert mistral.framing == ((1,), ())
    assert [mistral.token_text(id_) for id_ in (5, 10 + ord("a"), 271, -1, 276)] == [
        "[IMG]",
        "a",
        "receipt",
        None,
        None,
    ]


def test_special_tokens_enter_by_id_only(mistral):
    assert mistral.encode([1, 3, "a re", "ceipt", 5, "[IMG]", 4]) == [
        1, 3, 10 + ord("a"), 10 + ord(" "), 271, 5, *(10 + byte for byte in b"[IMG]"), 4,
    ]  # fmt: skip


@given(st.text(st.characters(codec="utf-8"), max_size=40) | st.text("receipt a[IMG]<s>é😀", max_size=40))
def test_text_comes_back(mistral, text):
    ids = mistral.encode_text(text)
    assert mistral.decode(ids, skip_special_tokens=False) == text
    assert mistral.encode([text]) == ids
    assert all(id_ >= 10 for id_ in ids)


def test_special_tokens_are_skipped_as_if_they_were_not_there(mistral):
    first, second = (10 + byte for byte in "é".encode())
    assert mistral.decode([first, 1, second, 400, -1]) == "é"
    assert mistral.decode([first, 1, second], skip_special_tokens=False) == "\ufffd<s>\ufffd"


def test_a_prompt_with_pictures(mistral):
    template = ChatTemplate(
        "<s>{% for m in messages %}[INST]{% for p in m.content %}"
        "{{ '[IMG]' if p.type == 'image' else p.text }}{% endfor %}[/INST]{% endfor %}"
    )
    content = [{"type": "image"}, {"type": "text", "text": "receipt [IMG]"}]
    image = [mistral.special_ids[name] for name in ("[IMG]", "[IMG]", "[IMG_BREAK]", "[IMG]", "[IMG]", "[IMG_END]")]
    prompt = build([{"role": "user", "content": content}], template, mistral, Rules("[IMG]"), expansions=[image])
    assert prompt.spans == ((2, 6),)
    assert prompt.token_ids == (1, 3, *image, *mistral.encode_text("receipt [IMG]"), 4)


def test_half_a_surrogate_pair_is_refused(mistral):
    with pytest.raises(RequestError, match="not valid Unicode"):
        mistral.encode(["a\ud800"])


def test_text_on_which_the_library_gives_up_is_refused(mistral):
    with pytest.raises(RequestError, match="too monotonous"):
        mistral.encode_text(" " * 1_000_000)


@pytest.mark.parametrize("content", [None, "", "{}", '{"config": {"version": "v99"}}'])
def test_unreadable_file(tmp_path, content):
    if content is not None:
        (tmp_path / "tekken.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match="missing or is not a vocabulary"):
        open_tokenizer(tmp_path / "tekken.json")


def test_the_extra_is_named_where_it_is_missing(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.tekken", None)
    with pytest.raises(CheckpointError, match=r"pip install 'pixelgate\[mistral\]'"):
        open_tokenizer(file)
