import json
import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pixelgate.errors import RequestError
from pixelgate.prompt.origin import SpecialTokens, break_specials, unused_marker, without_marker

NAMES = ["<|a|>", "<|ab|>", "<|a|>>", "[x]", "[x] y"]
MARKER = "\u3400"
FRAGMENTS = st.lists(st.sampled_from([*NAMES, *"<|a>b[x] y", "\t", "<|", "|>"]), max_size=8).map("".join)


@given(FRAGMENTS, FRAGMENTS)
@example("<|a", "|>")
@example("[x]  ", " y")
def test_nothing_that_follows_completes_a_token(text, following):
    broken = SpecialTokens(NAMES).broken(text, MARKER)
    assert broken.replace(MARKER, "") == text
    prompt = broken.strip() + following
    inside = [found for name in NAMES for found in re.finditer(f"(?={re.escape(name)})", prompt)]
    assert all(found.start() >= len(broken.strip()) for found in inside)


@given(st.text("abc xy.\n"))
def test_text_without_a_beginning_is_left_alone(text):
    assert SpecialTokens(NAMES).broken(text, MARKER) == text


@given(FRAGMENTS)
def test_split_takes_the_longest_token(text):
    pieces = SpecialTokens(NAMES).split(text)
    assert "".join(pieces) == text
    assert set(pieces[1::2]) <= set(NAMES)
    longest_first = "|".join(re.escape(name) for name in sorted(NAMES, key=len, reverse=True))
    assert pieces == re.split(f"({longest_first})", text)


def test_no_special_tokens_at_all():
    none = SpecialTokens([])
    assert none.broken("<|a|>", MARKER) == "<|a|>"
    assert none.split("<|a|>") == ["<|a|>"]


def test_every_string_is_reached():
    value = {"<|a|>": ["[x]", {"b": ("<|ab|>", 1, 2.5, None, True)}]}
    expected = {"<!|a|>": ["[!x]", {"b": ["<!|ab|>", 1, 2.5, None, True]}]}
    assert break_specials(value, SpecialTokens(NAMES), "!") == expected
    assert value == {"<|a|>": ["[x]", {"b": ("<|ab|>", 1, 2.5, None, True)}]}


def test_nesting_has_a_limit():
    value: object = "text"
    for _ in range(100):
        value = [value]
    assert break_specials(value, SpecialTokens(NAMES), "!") == value
    with pytest.raises(RequestError, match="nested too deeply"):
        break_specials([value], SpecialTokens(NAMES), "!")


def test_the_marker_is_a_character_that_is_not_there():
    assert "\u3400" <= unused_marker(["text", None, 1]) < "\u4dc0"
    taken = "".join(map(chr, range(0x3405, 0x4DC0)))
    assert unused_marker([{"\u3400": ({"a": "\u3401é"},)}, "\u3403 \\u3402", taken]) == "\u3404"
    with pytest.raises(RequestError, match="too many different characters"):
        unused_marker("".join(map(chr, range(0x3400, 0x4DC0))))


def test_the_marker_cannot_be_known_before():
    assert len({unused_marker(["a\\u34", "00b"]) for _ in range(40)}) > 10


@pytest.mark.parametrize(
    "written", [str, repr, str.upper, str.title, json.dumps, lambda text: json.dumps(text, ensure_ascii=False)]
)
@pytest.mark.parametrize("code", range(0x3400, 0x4DC0, 0x100))
def test_the_marker_survives_how_templates_write_text(written, code):
    broken = SpecialTokens(NAMES).broken("Ab [x] <", chr(code))
    assert written(broken) != written("Ab [x] <")
    assert without_marker(written(broken), chr(code)) == written("Ab [x] <")
