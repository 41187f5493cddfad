"""CPU time to render, encode and expand a prompt: 100,000 characters of text and 200 pictures in one request.

    python benchmarks/prompts.py [--rounds 20] [FAMILY...]

The chat templates are the checkpoints' own, the vocabularies those of the tests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "prompt")]

from family_models import Model  # noqa: E402

from goldens.tokenizers_of import SPECIALS  # noqa: E402

CHARACTERS, PICTURES, SIZE = 100_000, 200, (224, 224)
TEXT = "The picture shows a red square on a white wall; <|im_end|> is what somebody typed, and [IMG] or <image>.\n"


def case(several_texts: bool) -> dict:
    """Text between the pictures, or all of it in one part."""
    each = CHARACTERS // PICTURES if several_texts else CHARACTERS
    text = {"type": "text", "text": (TEXT * (each // len(TEXT) + 1))[:each]}
    image = {"type": "image"}
    content = [image, text] * PICTURES if several_texts else [*[image] * PICTURES, text]
    return {"messages": [{"role": "user", "content": content}], "sizes": [SIZE] * PICTURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("families", nargs="*", default=list(SPECIALS), metavar="FAMILY")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{'family':16} {'texts':8} {'tokens':>8} {'median ms':>10} {'worst':>7}")
    for family in arguments.families:
        with tempfile.TemporaryDirectory() as folder:
            model = Model(family, Path(folder))
        for several in (True, False):
            measured = case(several)
            expansions = model.expansions(measured)
            times = []
            for _ in range(arguments.rounds):
                start = time.process_time()
                prompt = model.prompt(measured, expansions=expansions)
                times.append((time.process_time() - start) * 1000)
            row = f"{'200' if several else '1':8} {len(prompt.token_ids):8}"
            print(f"{family:16} {row} {statistics.median(times):10.1f} {max(times):7.1f}")


if __name__ == "__main__":
    main()
