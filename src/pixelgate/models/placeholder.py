"""How a picture stands in a prompt, in the simplest and commonest way."""

from __future__ import annotations

from pixelgate.pixels.plan import ImagePlan


class OnePlaceholder:
    """Mixed into families that repeat the placeholder itself, as often as there are embeddings."""

    placeholder: str

    @property
    def embedded(self) -> str:
        """The token that receives an embedding."""
        return self.placeholder

    def expansion(self, plan: ImagePlan) -> list[tuple[str, int]]:
        """As many placeholders as there are embeddings."""
        return [(self.placeholder, plan.tokens)]
