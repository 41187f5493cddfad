"""Who wrote a special token: the template or the user.

The rendered prompt is one string, in which ``<|im_end|>`` typed by a user looks like the one the template writes. So
every literal in the user's strings is broken before rendering, by a marker character behind its first character. What
is still whole in the rendered string was written by the template. The marker goes away before the text is encoded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from pixelgate.errors import CheckpointError, RequestError

# Markers are rare letters without case: templates may trim text, change its case or print it as Python or JSON would,
# which escapes characters that are not printable.
_MARKERS = range(0x3400, 0x4DC0)
_MARKER = re.compile("[\u3400-\u4dbf]")
_ESCAPED = re.compile(r"\\u([34][0-9a-f]{3})")
_NOTHING = "(?!)"
_MAX_DEPTH = 100


class SpecialTokens:
    """The special tokens of a vocabulary, as they look in text.

    Raises CheckpointError for a token that cannot be told from ordinary words: a single character, or one that begins
    with a letter, a digit or a space.
    """

    def __init__(self, names: Iterable[str]) -> None:
        names = sorted(names)
        for name in names:
            if len(name) < 2 or name[0].isalnum() or name[0].isspace():
                raise CheckpointError(f"The special token {name!r} of the tokenizer is not supported.")
        # One character of each literal is consumed, so that overlapping literals are all found.
        self._literal = re.compile(
            "|".join(f"{re.escape(c)}(?={_any_of(rest)})" for c, rest in _by_first(names)) or "(?!)"
        )
        self._whole = re.compile(f"({_any_of(names)})" if names else "((?!))")
        self._beginnings = frozenset(name[:n] for name in names for n in range(1, len(name)))
        self._longest = max(map(len, self._beginnings), default=0)

    def broken(self, text: str, marker: str) -> str:
        """``text`` with ``marker`` inside each special token.

        One that only begins at the end of the text is broken too: what comes next in the prompt could complete it,
        be it the next part of the message or words of the template, even if the template trims the text.
        """
        if text.isalnum():  # no special token begins with a letter or a digit
            return text
        end = len(text.rstrip())
        original = text
        for n in range(1, min(self._longest, end) + 1):
            if original[end - n : end] in self._beginnings:
                cut = end - n + 1
                text = text[:cut] + marker + text[cut:]
        return self._literal.sub(rf"\g<0>{marker}", text)

    def split(self, rendered: str) -> list[str]:
        """Cut at whole special tokens, the longest at each place: [text, token, text, ..., token, text]."""
        return self._whole.split(rendered)


def break_specials(value: Any, specials: SpecialTokens, marker: str, depth: int = 0) -> Any:
    """A copy of JSON-like ``value`` in which the special tokens of every string, keys included, are broken.

    Raises RequestError if lists and objects are nested more than 100 deep.
    """
    if depth > _MAX_DEPTH:
        raise RequestError("The messages or tools are nested too deeply.", param="messages")
    if isinstance(value, str):
        return specials.broken(value, marker)
    if isinstance(value, Mapping):
        return {
            break_specials(key, specials, marker, depth + 1): break_specials(item, specials, marker, depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [break_specials(item, specials, marker, depth + 1) for item in value]
    return value


def unused_marker(value: Any) -> str:
    """A character that no string in JSON-like ``value`` has, even escaped. Raises RequestError if all are taken.

    Which one cannot be known before: strings put together by a template could spell one that none of them has.
    """
    used: set[str] = set()
    for text in _strings(value):
        if "\\u" in text:
            used.update(chr(int(code, 16)) for code in _ESCAPED.findall(text))
        if not text.isascii():
            used.update(_MARKER.findall(text))
    first = secrets.randbelow(len(_MARKERS))
    for code in chain(_MARKERS[first:], _MARKERS[:first]):
        if chr(code) not in used:
            return chr(code)
    raise RequestError("The messages use too many different characters.", param="messages")


def without_marker(text: str, marker: str) -> str:
    """``text`` as it was before ``marker`` broke its special tokens, also where it was written as ASCII JSON."""
    return text.replace(marker, "").replace(f"\\u{ord(marker):04x}", "")


def _strings(value: Any) -> Iterator[str]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)


def _by_first(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for word in words:
        if word:
            groups.setdefault(word[0], []).append(word[1:])
    return sorted(groups.items())


def _any_of(words: list[str]) -> str:
    """A pattern for the longest of ``words``. Shared beginnings are tried once: there may be a thousand words."""
    branches = [re.escape(first) + _any_of(rest) for first, rest in _by_first(words)]
    if not branches:
        return ""
    if len(branches) == 1 and "" not in words:
        return branches[0]
    return f"(?:{'|'.join(branches)})" + ("?" if "" in words else "")
