"""Every family's prompts equal those of transformers, token for token, or are refused where it fails too."""

from __future__ import annotations

import itertools
import json

import pytest

from goldens.conversations import conversations
from goldens.tokenizers_of import HERE, SPECIALS
from pixelgate.errors import RequestError

GOLDEN = json.loads((HERE / "data/prompts.json").read_text("utf-8"))
CASES = [(family, name) for family in SPECIALS for name in GOLDEN[family]]
# Where transformers fails, or has no way to express the case, and this package does not.
OURS = {
    *itertools.product(("llava15_clip", "llava_next"), ("typed", "typed without pictures")),
    *itertools.product(("phi3_5_vision", "phi4_remote"), ("typed", "typed without pictures", "tools")),
    *itertools.product(("phi4_native",), ("empty", "typed", "tools")),
}


def ids(runs):
    return tuple(id_ for id_, count in zip(runs[::2], runs[1::2], strict=True) for _ in range(count))


@pytest.mark.parametrize(("family", "name"), CASES)
def test_prompts_are_those_of_transformers(models, family, name):
    model, row = models(family), GOLDEN[family][name]
    case = conversations(list(SPECIALS[family]))[name]
    if "typed" in name and "refused" not in row:
        # transformers cuts the text at every special token that somebody typed, and encodes the pieces
        ours, theirs = model.prompt(case, bos="transformers").token_ids, ids(row["ids"])
        assert model.text(ours) == model.text(theirs)
        assert model.specials(ours) == model.specials(theirs)
    elif "refused" not in row:
        assert model.prompt(case, bos="transformers").token_ids == ids(row["ids"])
        assert model.prompt(case).token_ids == ids(row.get("engine", row["ids"]))
    elif (family, name) not in OURS:
        with pytest.raises(RequestError) as caught:
            model.prompt(case)
        assert caught.value.status == 400
    else:
        model.prompt(case)
