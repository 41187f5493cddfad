"""The model that an engine was found with: it must not come back with another unnoticed."""

from __future__ import annotations

import logging

from pixelgate.engines.engine import EngineFacts, other_model
from pixelgate.errors import EngineError

log = logging.getLogger(__name__)


class SameModel:
    """What the engine at ``url`` said of its model when it was asked first."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._first: EngineFacts | None = None
        self._complaint = ""  # what was logged last of a change since then

    @property
    def known(self) -> bool:
        """Whether it has been asked."""
        return self._first is not None

    def check(self, facts: EngineFacts) -> None:
        """Raise EngineError if ``facts``, its newest, are those of another model."""
        self._first = self._first or facts
        change = other_model(facts, self._first)
        if change and change != self._complaint:
            log.error("%s came back with another model: %s", self._url, change)
        self._complaint = change
        if change:
            raise EngineError("The engine came back with another model.")
