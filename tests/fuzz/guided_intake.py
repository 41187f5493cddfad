"""The intake under a coverage-guided fuzzer: it keeps what finds a new way through our code and Pillow's readers.

    python tests/fuzz/guided_intake.py [libFuzzer's options, such as -max_total_time=600] [corpus folders]

Needs atheris (`pip install --group fuzz`). All decoders run in this process, so that a crash of theirs ends it. The
seeds are written to build/fuzz/corpus, where what is found is kept too.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["pixelgate.media", "PIL"]):
    from fuzz_intake import intake
    from seeds import pictures

    from pixelgate.media.isolation import Isolation
    from pixelgate.media.policy import MediaPolicy

CORPUS = Path("build/fuzz/corpus")
HERE = Isolation(MediaPolicy(isolate=()), 1)


def one(data: bytes) -> None:
    with contextlib.suppress(StopIteration):
        intake(data, HERE).send(None)  # in one process nothing is waited for


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    CORPUS.mkdir(parents=True, exist_ok=True)
    for name, data in pictures().items():
        (CORPUS / name.replace(" ", "-")).write_bytes(data)
    atheris.Setup([*sys.argv, str(CORPUS)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
