"""``tokenizer.json``, by the tokenizers package."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import tokenizers

from pixelgate.errors import CheckpointError, InternalError, RequestError
from pixelgate.prompt.origin import SpecialTokens

_REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer:
    """A `Tokenizer` around a ``tokenizers.Tokenizer``, which is changed and must not be used elsewhere."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # in the library's words: special tokens in text are encoded as text
        added = backend.get_added_tokens_decoder()
        special = {id_: token for id_, token in sorted(added.items()) if token.special}
        self.special_ids: Mapping[str, int] = MappingProxyType({token.content: id_ for id_, token in special.items()})
        self.specials = SpecialTokens(self.special_ids)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.framing = _framing(backend)
        self._backend = backend
        falls_back = '"ByteFallback"' in json.dumps(json.loads(backend.to_str())["decoder"])
        self._bytes = _byte_tokens(backend) if falls_back else {}
        self._encoder, self._seals = _with_seals(backend, special, self.vocab_size)
        self._sealed = {self._encoder.token_to_id(seal): id_ for id_, seal in self._seals.items()}
        self._check_seals()
        # A text that the vocabulary has no token for may become the unknown token, which is special, too.
        unknown = getattr(backend.model, "unk_token", None)
        self._not_from_text = frozenset(id_ for id_, token in special.items() if token.content != unknown)

    @classmethod
    def from_file(cls, path: str | Path) -> JsonTokenizer:
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
        parts = list(parts)
        sealed = "".join([part if isinstance(part, str) else self._seals[part] for part in parts])
        try:
            # a batch of one: it releases the GIL, which encode() holds for as long as the text is
            ids = self._encoder.encode_batch([sealed], add_special_tokens=False)[0].ids
        except TypeError as error:  # not a string to the library: half of a surrogate pair has no UTF-8 form
            raise RequestError("The text is not valid Unicode.", param="messages") from error
        if not self._not_from_text.isdisjoint(ids):
            raise RequestError(
                "The text holds a control token of the model, which cannot be sent as text.", param="messages"
            )
        wanted = [part for part in parts if not isinstance(part, str)]
        if [self._sealed[id_] for id_ in ids if id_ in self._sealed] != wanted:
            raise InternalError("the tokenizer has lost a special token of the prompt")
        return [self._sealed.get(id_, id_) for id_ in ids]

    def _check_seals(self) -> None:
        """Raise CheckpointError for a special token that would not be found everywhere in a prompt."""
        for id_, seal in self._seals.items():
            for before, after in (("", ""), ("a", "a"), (" ", " "), ("1", "."), (seal, seal)):
                ids = self._encoder.encode(before + seal + after, add_special_tokens=False).ids
                if [self._sealed[i] for i in ids if i in self._sealed] != [id_] * (1 + 2 * (before == seal)):
                    token = self._backend.id_to_token(id_)
                    raise CheckpointError(
                        f"the tokenizer finds its special token {token!r} in some places only (single_word, or "
                        "normalized by a rule that changes it), so prompts cannot be told from text"
                    )

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text. Special tokens written in it stay text."""
        return self.encode([text])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Ids that are not in the vocabulary have none, bytes that are no UTF-8 are U+FFFD.

        A run of byte tokens with an invalid byte is U+FFFD as a whole in the library; here, as in byte-level
        vocabularies and in SentencePiece, its valid characters stay, so that they need not wait for the run's end.
        """
        known = [id_ for id_ in ids if 0 <= id_ < self.vocab_size]
        if not self._bytes.keys().isdisjoint(known):
            skipped = frozenset(self.special_ids.values()) if skip_special_tokens else frozenset()
            if (tokens := self._mended([id_ for id_ in known if id_ not in skipped])) is not None:
                return str(self._backend.decoder.decode(tokens))
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token_text(self, id_: int) -> str | None:
        """How the vocabulary writes a token, or None where it has none."""
        return self._backend.id_to_token(id_) if 0 <= id_ < self.vocab_size else None

    def token_bytes(self, id_: int) -> bytes:
        """What a token adds to a text, in UTF-8; it may be a part of a character. Nothing where there is no token."""
        if id_ in self._bytes:
            return bytes([self._bytes[id_]])
        text, written = self.decode([id_], skip_special_tokens=False), self.token_text(id_) or ""
        if _REPLACEMENT in text and all(character in _BYTE_LEVEL for character in written):
            return bytes(_BYTE_LEVEL[character] for character in written)
        return text.encode()

    def _mended(self, ids: Sequence[int]) -> list[str] | None:
        """The tokens with what is not UTF-8 replaced in their runs of bytes; None where all of it is."""
        tokens: list[str] = []
        mended = False
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            if are_bytes:
                text = bytes(map(self._bytes.__getitem__, run)).decode("utf-8", "replace")
                mended |= _REPLACEMENT in text
                # spelled as bytes again: the decoder would read some characters, such as that for a space
                tokens += [t for c in text for t in ([c] if c == _REPLACEMENT else _spelled(c))]
            else:
                tokens += filter(None, map(self._backend.id_to_token, run))
        return tokens if mended else None


def _with_seals(
    backend: tokenizers.Tokenizer, special: Mapping[int, tokenizers.AddedToken], vocab_size: int
) -> tuple[tokenizers.Tokenizer, dict[int, str]]:
    """A tokenizer that also finds seals, and the seal that stands in a text for each special id.

    A prompt is encoded in one piece, so that spaces around special tokens come out as everywhere else. The ids stand in
    it as seals: added tokens with the flags of the special ones, and a text that nobody can type.
    """
    secret = secrets.token_hex(16)
    seals = {id_: f"\ue000{secret}.{id_}\ue001" for id_ in special}
    added = [
        tokenizers.AddedToken(
            seal,
            single_word=special[id_].single_word,
            lstrip=special[id_].lstrip,
            rstrip=special[id_].rstrip,
            normalized=special[id_].normalized,
        )
        for id_, seal in seals.items()
    ]
    gaps = vocab_size - backend.get_vocab_size(with_added_tokens=True)
    encoder = _copy(backend) if gaps > 0 else backend
    encoder.add_tokens(added)
    if gaps > 0 and _collide(encoder, seals.values(), vocab_size):
        # The library numbers added tokens from the count of the others, and in this vocabulary words have these
        # numbers. So they are filled up with tokens that nobody can type either; decoding must not see those.
        encoder = _copy(backend)
        fillers = [f"\ue000{secret}-{number}\ue001" for number in range(gaps)]
        encoder.add_tokens([tokenizers.AddedToken(filler, normalized=False) for filler in fillers])
        encoder.add_tokens(added)
    if _collide(encoder, seals.values(), vocab_size):
        raise CheckpointError("the tokenizer's vocabulary has numbers that do not follow each other")
    return encoder, seals


def _copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    copy = tokenizers.Tokenizer.from_str(backend.to_str())
    copy.encode_special_tokens = True  # which is not part of the string
    return copy


def _collide(encoder: tokenizers.Tokenizer, seals: Iterable[str], vocab_size: int) -> bool:
    """Whether a seal has the number of another token."""
    return any((encoder.token_to_id(seal) or 0) < vocab_size for seal in seals)


def _spelled(character: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in character.encode()]


def _byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """The byte behind each id that stands for one."""
    found = ((id_, _BYTE.fullmatch(token)) for token, id_ in backend.get_vocab(with_added_tokens=True).items())
    return {id_: int(byte[1], 16) for id_, byte in found if byte}


def _framing(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts around a text, found out by encoding one."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    start = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return tuple(whole[:start]), tuple(whole[start + len(bare) :])


def _byte_level() -> Mapping[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for.

    Bytes that are visible in Latin-1 stand for themselves, the others for the characters from U+0100 on, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level()
