import pytest
from hypothesis import given
from hypothesis import strategies as st

from pixelgate.errors import RequestError
from pixelgate.prompt.stops import StopStrings

STOPS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, bool]:
    cutter = StopStrings(stops, include)
    out = ""
    for piece in pieces:
        text, stopped = cutter.push(piece)
        out += text
        if stopped:
            assert cutter.flush() == ""
            return out, True
    return out + cutter.flush(), False


def reference(stops: list[str], text: str, include: bool) -> tuple[str, bool]:
    """Look at the text as it grows by one character."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end if include else end - max(map(len, ending))], True
    return text, False


@given(STOPS, st.lists(st.text("ab<", max_size=5), max_size=6), st.booleans())
def test_the_cut_does_not_depend_on_the_pieces(stops, pieces, include):
    assert run(stops, pieces, include) == reference(stops, "".join(pieces), include)


def test_only_a_possible_beginning_is_held_back():
    cutter = StopStrings(["\n\nUser:", "END"])
    assert cutter.push("Hello\n") == ("Hello", False)
    assert cutter.push("world E") == ("\nworld ", False)
    assert cutter.push("N") == ("", False)
    assert cutter.push("D of it") == ("", True)
    assert cutter.push("more") == ("", True)
    assert cutter.flush() == ""


def test_the_end_of_the_answer_gives_back_what_was_held():
    cutter = StopStrings(["END"])
    assert cutter.push("EN") == ("", False)
    assert cutter.flush() == "EN"
    assert cutter.flush() == ""


def test_the_stop_string_can_be_kept():
    assert run(["stop"], ["a st", "op b"]) == ("a ", True)
    assert run(["stop"], ["a st", "op b"], include=True) == ("a stop", True)


def test_of_two_that_end_together_the_longest_cuts():
    assert run(["c", "bc"], ["abcd"]) == ("a", True)


def test_the_one_complete_first_cuts():
    assert run(["abcd", "bc"], ["abcd"]) == ("a", True)


def test_without_stop_strings_nothing_is_held():
    assert StopStrings([]).push("any\n") == ("any\n", False)


def test_empty_stop_string():
    with pytest.raises(RequestError, match="must not be empty"):
        StopStrings(["a", ""])
