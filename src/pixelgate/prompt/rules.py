"""How prompts of one model are made: the facts of its family, and what the operator has chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from pixelgate.prompt.origin import SpecialTokens
from pixelgate.prompt.tokens import Tokenizer

Bos = Literal["engine", "transformers"]
TypedSpecials = Literal["text", "allow"]
_NUMBER = "{number}"


@dataclass(frozen=True)
class Rules:
    """``placeholder`` is the special token, one of the tokenizer's, that templates write for an image.

    ``in_text`` stands for one in content that is a string; ``{number}`` in it counts images from 1, and the texts with
    numbers are placeholders, too, where a template writes them. ``image_tokens`` are the special tokens that only
    images have: typed by a user they are text, whatever ``typed_specials`` says of the others.

    With ``separate_texts`` the texts around images are encoded one by one, each with the tokens that the tokenizer
    puts before a prompt. ``bos`` is whose habit is followed for these tokens otherwise: vLLM's chat API adds none to
    what the template wrote, transformers' processors do unless it wrote them itself.
    """

    placeholder: str
    in_text: str = ""
    image_tokens: Sequence[str] = field(default=())
    separate_texts: bool = False
    bos: Bos = "engine"
    typed_specials: TypedSpecials = "text"

    @property
    def numbered(self) -> bool:
        """Whether images have numbers in text."""
        return _NUMBER in self.in_text

    def text(self, number: int) -> str:
        """What stands for image ``number`` in content that is a string."""
        return self.in_text.replace(_NUMBER, str(number)) or self.placeholder

    def slots(self, images: int) -> dict[str, int]:
        """Texts that stand for an image where the template wrote them, with the image's number; 0: the next one."""
        numbers = range(1, images + 1) if self.numbered else ()
        return {self.placeholder: 0, **{self.text(number): number for number in numbers}}

    def written(self, tokenizer: Tokenizer, images: int) -> SpecialTokens:
        """Everything in a rendered prompt with ``images`` that is more than text."""
        return _of((*tokenizer.special_ids, *self.slots(images))) if self.numbered else tokenizer.specials

    def guarded(self, tokenizer: Tokenizer, images: int) -> SpecialTokens:
        """Everything that a user must not be able to write."""
        if self.typed_specials == "text":
            return self.written(tokenizer, images)
        return _of((*self.slots(images), *self.image_tokens))


@lru_cache(maxsize=64)
def _of(tokens: tuple[str, ...]) -> SpecialTokens:
    return SpecialTokens(set(tokens))
