"""Stop strings: the answer ends before the first of them, wherever the engine's tokens cut it."""

from __future__ import annotations

from collections.abc import Sequence

from pixelgate.errors import RequestError


class StopStrings:
    """Cuts streamed text at the stop string that is complete first; of several that end together, the longest.

    The result does not depend on how the text is cut into pieces. With ``include`` the stop string itself is
    part of the text. Raises RequestError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise RequestError("A stop string must not be empty.", param="stop")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that is certain, and whether a stop string has been met.

        The end of the text is held back while it may be the beginning of a stop string. Nothing follows a stop.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self._stopped, self._held = True, ""
            return text[: end if self._include else start], True
        certain = min((_beginning(text, stop) for stop in self._stops), default=len(text))
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """The text held back, at the end of an answer that met no stop string."""
        held, self._held = self._held, ""
        return held


def _beginning(text: str, stop: str) -> int:
    """Where the longest end of ``text`` that is a beginning of ``stop`` starts."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return start if start >= 0 else len(text)
