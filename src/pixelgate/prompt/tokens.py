"""The checkpoint's tokenizer: text to token ids, and token ids to text as they arrive."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import tokenizers

from pixelgate.errors import CheckpointError, RequestError
from pixelgate.prompt.origin import SpecialTokens

_REPLACEMENT = "\ufffd"
_MOST_HELD = 64  # tokens; a character that is coming has at most four


class Tokenizer:
    """A ``tokenizers.Tokenizer`` that never reads a special token out of text.

    Special tokens enter a prompt as ids only. The wrapped tokenizer is changed and must not be used elsewhere.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # in the library's words: special tokens in text are encoded as text
        added = backend.get_added_tokens_decoder()
        special = {id_: token for id_, token in sorted(added.items()) if token.special}
        self.special_ids: Mapping[str, int] = MappingProxyType({token.content: id_ for id_, token in special.items()})
        self.specials = SpecialTokens(self.special_ids)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._backend = backend
        # A prompt is encoded in one piece, so that spaces around special tokens come out as everywhere else. The ids
        # stand in it as seals: added tokens with the flags of the special ones, and a text that nobody can type.
        secret = secrets.token_hex(16)
        self._seals = {id_: f"\ue000{secret}.{id_}\ue001" for id_ in special}
        backend.add_tokens(
            [
                tokenizers.AddedToken(
                    seal,
                    single_word=special[id_].single_word,
                    lstrip=special[id_].lstrip,
                    rstrip=special[id_].rstrip,
                    normalized=special[id_].normalized,
                )
                for id_, seal in self._seals.items()
            ]
        )
        self._sealed = {backend.token_to_id(seal): id_ for id_, seal in self._seals.items()}
        # A text that the vocabulary has no token for may become the unknown token, which is special, too.
        unknown = getattr(backend.model, "unk_token", None)
        self._not_from_text = frozenset(id_ for id_, token in special.items() if token.content != unknown)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a ``tokenizer.json``. Raises CheckpointError."""
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} is missing or is not a tokenizer this package can read.") from error
        return cls(backend)

    def encode(self, parts: Iterable[str | int]) -> list[int]:
        """Encode a prompt: strings are ordinary text, integers are the ids of special tokens. No token is added.

        Added tokens that are not special, such as ``<think>``, are found in text, as everywhere.
        Raises RequestError for text that is not valid Unicode or that the vocabulary reads as a special token.
        """
        sealed = "".join([part if isinstance(part, str) else self._seals[part] for part in parts])
        try:
            # a batch of one: it releases the GIL, which encode() holds for as long as the text is
            ids = self._backend.encode_batch([sealed], add_special_tokens=False)[0].ids
        except TypeError as error:  # not a string to the library: half of a surrogate pair has no UTF-8 form
            raise RequestError("The text is not valid Unicode.", param="messages") from error
        if not self._not_from_text.isdisjoint(ids):
            raise RequestError(
                "The text holds a control token of the model, which cannot be sent as text.", param="messages"
            )
        return [self._sealed.get(id_, id_) for id_ in ids]

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text. Special tokens written in it stay text."""
        return self.encode([text])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Ids that are not in the vocabulary have none."""
        return self._backend.decode(self._known(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written ``text``, or None."""
        id_ = self._backend.token_to_id(text)
        return id_ if id_ is not None and id_ < self.vocab_size else None

    def _known(self, ids: Sequence[int]) -> list[int]:
        return [id_ for id_ in ids if 0 <= id_ < self.vocab_size]


class Detokenizer:
    """Turns token ids into text as they arrive. All pieces together are ``decode`` of all ids.

    A character whose bytes are not complete is held back, though not for more than 64 tokens. A token is decoded
    together with those before it, because some vocabularies write the space between two words only where something
    stands before it. ``stop_ids`` are tokens that end an answer and are no part of it, special or not.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, stop_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids.values() if skip_special_tokens else ()
        self._skipped = frozenset((*special, *stop_ids))
        self._before: list[int] = []  # ids whose text has been given out; enough of them to decode what follows
        self._ids: list[int] = []  # ids since then
        self._given = 0  # characters of decode(_before + _ids) given out

    def push(self, ids: Iterable[int]) -> str:
        """Add tokens and return the text that is now certain, which may be empty."""
        self._ids += [id_ for id_ in ids if id_ not in self._skipped]
        text = self._decode()
        if text.endswith(_REPLACEMENT) and len(self._ids) < _MOST_HELD:
            return self._give(text, len(text.rstrip(_REPLACEMENT)))
        piece = self._give(text, len(text))
        if alone := self._tokenizer.decode(self._ids, skip_special_tokens=False):
            self._before, self._ids, self._given = self._ids, [], len(alone)
        return piece

    def flush(self) -> str:
        """The text held back: at the end of an answer, bytes that are no character become U+FFFD."""
        text = self._decode()
        return self._give(text, len(text))

    def _decode(self) -> str:
        return self._tokenizer.decode(self._before + self._ids, skip_special_tokens=False)

    def _give(self, text: str, end: int) -> str:
        piece = text[self._given : end]
        self._given = max(self._given, end)
        return piece
