"""For how long a host says that an answer holds: RFC 9111, for a cache that belongs to one client."""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime

from multidict import MultiMapping

_DIRECTIVE = re.compile(r'([A-Za-z-]+)(?:\s*=\s*(?:"([^"]*)"|([^\s,]*)))?')
_LONGEST = 86400.0  # seconds, whatever the host says


def seconds(headers: MultiMapping[str]) -> float:
    """Seconds for which an answer with these headers may be used again without asking; 0 where they do not say.

    Nothing is guessed from ``Last-Modified``. ``private`` is no obstacle, for nobody else gets the answer.
    """
    directives = _directives(", ".join(headers.getall("Cache-Control", ())))
    if {"no-store", "no-cache"} & directives.keys() or "*" in "".join(headers.getall("Vary", ())):
        return 0.0
    lifetime = _number(directives["max-age"]) if "max-age" in directives else _until_expiry(headers)
    return min(max(lifetime - _number(headers.get("Age", "0")), 0.0), _LONGEST)


def _directives(text: str) -> dict[str, str]:
    return {match[1].lower(): match[2] or match[3] or "" for match in _DIRECTIVE.finditer(text)}


def _number(text: str) -> float:
    """Seconds as a header writes them; what is no number is stale."""
    return float(text) if text.isascii() and text.isdecimal() else 0.0


def _until_expiry(headers: MultiMapping[str]) -> float:
    try:
        return (parsedate_to_datetime(headers["Expires"]) - parsedate_to_datetime(headers["Date"])).total_seconds()
    except (KeyError, ValueError, TypeError):  # TypeError: one of them without a zone
        return 0.0
