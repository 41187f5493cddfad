"""The dashboard in deploy/ asks for what there is."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase

from pixelgate.gateway.configure import settings
from pixelgate.gateway.metrics import Metrics

DEPLOY = Path(__file__).parents[2] / "deploy"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
OF_PROMETHEUS = {"job", "instance", "le"}


@pytest.fixture(scope="module")
def dashboard():
    return json.loads((DEPLOY / "grafana" / "pixelgate.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def series():
    """The labels of every series there is, by its name."""
    metrics = [each for each in vars(Metrics()).values() if isinstance(each, MetricWrapperBase)]
    return {
        family.name + suffix: set(each._labelnames) | OF_PROMETHEUS
        for each in metrics
        for family in each.describe()
        for suffix in SUFFIXES[family.type]
    }


def queries(dashboard):
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return [*targets, *(each["definition"] for each in dashboard["templating"]["list"] if "definition" in each)]


def test_every_series_exists(dashboard, series):
    asked = {name for query in queries(dashboard) for name in re.findall(r"\bpixelgate_\w+", query)}
    assert asked <= set(series)
    shown = {re.sub("_(total|bucket|sum|count)$", "", name) for name in asked}
    assert shown == {re.sub("_(total|bucket|sum|count)$", "", name) for name in series}  # and every metric is shown


def test_every_label_exists(dashboard, series):
    asked = 0
    for query in queries(dashboard):
        for name, selector in re.findall(r"\b(pixelgate_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~?\"", selector)) <= series[name], query
            asked += 1
        for labels in re.findall(r"\bby \(([\w, ]+)\)", query):
            for name in re.findall(r"\bpixelgate_\w+", query):
                assert {*labels.split(", ")} <= series[name], query
    assert asked > 20


def test_panels_do_not_lie_upon_each_other(dashboard):
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_settings_of_the_examples_exist():
    text = (DEPLOY / "README.md").read_text("utf-8")
    assert set(re.findall(r"PIXELGATE_SERVE_\w+", text)) <= {setting.variable for setting in settings()}
    assert re.findall(r"PIXELGATE_SERVE_\w+", text)
