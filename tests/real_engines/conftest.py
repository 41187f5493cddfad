from __future__ import annotations

from pathlib import Path

import pytest
from chats import MODELS
from kinds import KINDS
from starting import Workshop

ROOT = Path(__file__).parents[2]


def pytest_addoption(parser):
    parser.addoption("--engines", type=Path, default=ROOT / ".venv/engines", help="the environment of set_up.sh")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """By model and kind of engine, so that each engine is started once; what breaks one comes last."""
    models, kinds = list(MODELS), list(KINDS)

    def place(item):
        kind, model = item.callspec.params["served"]
        return item.get_closest_marker("breaks") is not None, models.index(model), kinds.index(kind)

    items.sort(key=place)


@pytest.fixture(scope="session")
def workshop(request):
    made = Workshop({"vllm": request.config.getoption("engines").absolute()}, ROOT / "build/engines")
    yield made
    made.close()


@pytest.fixture
def served(request, workshop):
    """The workshop with an engine of the kind and the model that the test is for, and a gateway in front of it."""
    kind, model = request.param
    workshop.serve(KINDS[kind], model)
    return workshop
