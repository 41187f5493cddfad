"""``tekken.json``, Mistral's own vocabularies, by the mistral-common package (extra ``mistral``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

from pixelgate.errors import CheckpointError, RequestError
from pixelgate.prompt.origin import SpecialTokens


class TekkenTokenizer:
    """A `Tokenizer` around mistral-common's ``Tekkenizer``. Its special tokens have the first ids.

    Raises CheckpointError for a file that cannot be read, and where mistral-common is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
            from mistral_common.tokens.tokenizers.tekken import Tekkenizer
        except ImportError:
            raise CheckpointError(f"{path} needs mistral-common: pip install 'pixelgate[mistral]'") from None
        try:
            backend = Tekkenizer.from_file(path)
            begin = backend.bos_id
        except Exception as error:  # assertions and others, whatever is wrong with the file
            raise CheckpointError(f"{path} is missing or is not a vocabulary that mistral-common can read.") from error
        texts = [backend.id_to_piece(id_) for id_ in range(backend.num_special_tokens)]
        self.special_ids: Mapping[str, int] = MappingProxyType({text: id_ for id_, text in enumerate(texts)})
        self.specials = SpecialTokens(self.special_ids)
        self.vocab_size = backend.n_words
        self.framing: tuple[tuple[int, ...], tuple[int, ...]] = ((begin,), ())
        self._backend = backend
        self._keep = SpecialTokenPolicy.KEEP

    def encode(self, parts: Iterable[str | int]) -> list[int]:
        """Encode a prompt: strings are ordinary text, integers are the ids of special tokens. No token is added.

        Raises RequestError for text that is not valid Unicode, or on which the library gives up.
        """
        ids: list[int] = []
        for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
            if is_text:
                ids += self.encode_text("".join(map(str, group)))
            else:
                ids += map(int, group)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Encode ordinary text. Special tokens written in it stay text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError("The text is not valid Unicode.", param="messages") from None
        try:
            return self._backend.encode(text, bos=False, eos=False)
        except ValueError:  # its pattern gives up on a million spaces
            raise RequestError("The text is too long or too monotonous to be tokenised.", param="messages") from None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``. Ids that are not in the vocabulary have none, bytes that are no UTF-8 are U+FFFD."""
        first = self._backend.num_special_tokens if skip_special_tokens else 0
        return self._backend.decode([id_ for id_ in ids if first <= id_ < self.vocab_size], self._keep)

    def token_text(self, id_: int) -> str | None:
        """How the vocabulary writes a token, or None where it has none."""
        return self._backend.id_to_piece(id_) if 0 <= id_ < self.vocab_size else None

    def token_bytes(self, id_: int) -> bytes:
        """What a token adds to a text, in UTF-8; it may be a part of a character. Nothing where there is no token."""
        return self._backend.id_to_byte_piece(id_, self._keep) if 0 <= id_ < self.vocab_size else b""
