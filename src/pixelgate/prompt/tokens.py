"""What a prompt needs of a tokenizer, whichever library reads it, and text from token ids as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pixelgate.prompt.origin import SpecialTokens

_REPLACEMENT = "\ufffd"
_CONTEXT = 8
_LONG = 16


class Tokenizer(Protocol):
    """A checkpoint's tokenizer, which never reads a special token out of text: they enter a prompt as ids only."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of the special tokens by their texts."""

    @property
    def specials(self) -> SpecialTokens:
        """The special tokens as they look in text."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def framing(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids that the tokenizer by itself puts before and after a text, such as that of ``<s>``."""

    def encode(self, parts: Iterable[str | int]) -> list[int]:
        """Encode a prompt: strings are ordinary text, integers are the ids of special tokens. No token is added.

        Raises RequestError for text that is not valid Unicode or that the vocabulary reads as a special token.
        """

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text. Special tokens written in it stay text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Ids that are not in the vocabulary have none, bytes that are no UTF-8 are U+FFFD."""

    def token_text(self, id_: int) -> str | None:
        """How the vocabulary writes a token, or None where it has none."""

    def token_bytes(self, id_: int) -> bytes:
        """What a token adds to a text, in UTF-8; it may be a part of a character. Nothing where there is no token."""


def open_tokenizer(path: Path) -> Tokenizer:
    """Read a ``tokenizer.json`` or a ``tekken.json``. Raises CheckpointError."""
    if path.name == "tekken.json":
        from pixelgate.prompt.tekken import TekkenTokenizer

        return TekkenTokenizer(path)
    from pixelgate.prompt.tokenizer_json import JsonTokenizer

    return JsonTokenizer.from_file(path)


class Detokenizer:
    """Turns token ids into text as they arrive. All pieces together are ``decode`` of all ids, however they are cut.

    A character whose bytes are not complete is held back. A token is decoded together with a few before it: they may
    hold the beginning of its character, and some vocabularies write the space between two words only where something
    stands before it. ``stop_ids`` are tokens that end an answer and are no part of it, special or not.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, stop_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids.values() if skip_special_tokens else ()
        self._skipped = frozenset((*special, *stop_ids))
        self._ids: list[int] = []  # the last ids
        self._given = 0  # characters of their text given out

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that is now certain, which may be empty."""
        self._ids += [id_ for id_ in ids if id_ not in self._skipped and self._tokenizer.token_text(id_) is not None]
        text = self._decode(self._ids)
        end = _certain(text)
        piece = text[self._given : end]
        self._given = max(self._given, end)
        if len(self._ids) > _LONG:
            self._forget()
        return piece

    def flush(self) -> str:
        """The text held back: at the end of an answer, bytes that are no character become U+FFFD."""
        text = self._decode(self._ids)
        rest, self._given = text[self._given :], len(text)
        return rest

    def _forget(self) -> None:
        """Keep only the ids that what follows is decoded with, so that a long answer takes no more time a token."""
        recent = self._ids[-_CONTEXT:]
        text = self._decode(recent)
        # The first of them may be the rest of a character, three bytes at most: what comes after them is as before.
        if len(text) > 3:
            self._ids, self._given = recent, _certain(text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _certain(text: str) -> int:
    """How much of a text no further byte can change: bytes that begin a character are one U+FFFD at its end."""
    return len(text) - text.endswith(_REPLACEMENT)
