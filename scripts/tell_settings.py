#!/usr/bin/env python3
"""Write what each setting is for into the tables of docs/gateway.md, from the text behind its field.

    python scripts/tell_settings.py

A link at the end of a line stays; names and defaults are written by hand, and compared by a test.
"""

from __future__ import annotations

import re
from pathlib import Path

from pixelgate.gateway.configure import settings

DOCUMENT = Path(__file__).parents[1] / "docs" / "gateway.md"
ROW = re.compile(r"^(\| `(\w+)` \| [^|]+ \| )[^|]+?( \(\[[^]]+\]\([^)]+\)\))? \|$", re.M)


def main() -> None:
    """Rewrite the document."""
    words = {setting.name: setting.explanation.replace("``", "`") for setting in settings()}
    DOCUMENT.write_text(
        ROW.sub(
            lambda row: f"{row[1]}{words[row[2]]}{row[3] or ''} |" if row[2] in words else row[0],
            DOCUMENT.read_text("utf-8"),
        ),
        "utf-8",
    )


if __name__ == "__main__":
    main()
