from __future__ import annotations

from pathlib import Path

import pytest
from chats import MODELS
from kinds import KINDS
from starting import Workshop

ROOT = Path(__file__).parents[2]
OPTIONS = {"vllm": "engines", "sglang": "sglang"}


def pytest_addoption(parser):
    parser.addoption("--engines", type=Path, default=ROOT / ".venv/engines", help="the environment of set_up.sh")
    parser.addoption("--sglang", type=Path, default=ROOT / ".venv/sglang", help="the environment of set_up_sglang.sh")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """By model and kind of engine, so that each engine is started once; what breaks one comes last."""
    models, kinds = list(MODELS), list(KINDS)

    def place(item):
        if "served" not in item.callspec.params:
            return False, -1, -1
        kind, model = item.callspec.params["served"]
        return item.get_closest_marker("breaks") is not None, models.index(model), kinds.index(kind)

    items.sort(key=place)


@pytest.fixture(scope="session")
def workshop(request):
    environments = {maker: request.config.getoption(option).absolute() for maker, option in OPTIONS.items()}
    made = Workshop(environments, ROOT / "build/engines")
    yield made
    made.close()


@pytest.fixture
def served(request, workshop):
    """The workshop with an engine of the kind and the model that the test is for, and a gateway in front of it."""
    kind, model = request.param
    workshop.serve(KINDS[kind], model)
    return workshop
