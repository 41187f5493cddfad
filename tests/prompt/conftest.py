"""The demo checkpoint's tokenizer, trained afresh, and its chat template."""

import importlib.util
from pathlib import Path

import pytest
import tokenizers
from family_models import Model
from hypothesis import settings

from pixelgate.demo import CHECKPOINT
from pixelgate.prompt.template import ChatTemplate
from pixelgate.prompt.tokenizer_json import JsonTokenizer

settings.register_profile("pixelgate", derandomize=True, deadline=None)  # the same on every machine, slow or fast
settings.load_profile("pixelgate")

SCRIPT = Path(__file__).parents[2] / "scripts/make_demo_tokenizer.py"


@pytest.fixture(scope="session")
def trained() -> str:
    """tokenizer.json as the script makes it."""
    spec = importlib.util.spec_from_file_location("make_demo_tokenizer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script.train().to_str()


@pytest.fixture(scope="session")
def library(trained: str) -> tokenizers.Tokenizer:
    """The tokenizers package alone, as transformers uses it."""
    return tokenizers.Tokenizer.from_str(trained)


@pytest.fixture(scope="session")
def tokenizer(trained: str) -> JsonTokenizer:
    return JsonTokenizer(tokenizers.Tokenizer.from_str(trained))


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate((CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    made = {}

    def get(family):
        if family not in made:
            made[family] = Model(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get
