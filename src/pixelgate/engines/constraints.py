"""What an answer must be, for engines that have no choice among texts."""

from __future__ import annotations

import re
from collections.abc import Iterable

_METACHARACTERS = re.compile(r"[\\.^$|?*+()\[\]{}]")


def any_of(choices: Iterable[str]) -> str:
    """A regular expression that one of ``choices`` matches, and nothing else; the same in every dialect."""
    return f"({'|'.join(_METACHARACTERS.sub(_escaped, choice) for choice in choices)})"


def _escaped(found: re.Match[str]) -> str:
    return "\\" + found[0]
