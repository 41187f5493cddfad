"""How a picture stands in a prompt, in the commonest way."""

from __future__ import annotations

from pixelgate.pixels.plan import ImagePlan

NUMBERED_TAG = "<|image_{number}|>"
"""Phi's own way to name a picture in text."""


class InPrompt:
    """Mixed into every family; a family that differs says so."""

    placeholder: str
    separate_texts: bool = False
    """Whether the texts around pictures are tokenised one by one, each as if it were a prompt of its own."""

    @property
    def in_text(self) -> str:
        """What stands for a picture in content that is a string; ``{number}`` in it counts pictures from 1."""
        return self.placeholder

    @property
    def image_tokens(self) -> tuple[str, ...]:
        """The special tokens that only pictures have."""
        return (self.placeholder,)


class OnePlaceholder(InPrompt):
    """Mixed into families that repeat the placeholder itself, as often as there are embeddings."""

    @property
    def embedded(self) -> str:
        """The token that receives an embedding."""
        return self.placeholder

    def expansion(self, plan: ImagePlan) -> list[tuple[str, int]]:
        """As many placeholders as there are embeddings."""
        return [(self.placeholder, plan.tokens)]
