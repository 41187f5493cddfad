from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from pixelgate.engines.fleet import EngineState
from pixelgate.errors import BusyError, FetchError, RequestError
from pixelgate.fairness import NOBODY
from pixelgate.gateway.metrics import Metrics, exposition
from pixelgate.gateway.services import Services
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

DOCS = Path(__file__).parents[2] / "docs" / "gateway.md"


def samples(metrics):
    """The samples of the exposition, as {(name, label values in the order of their names): value}."""
    families = text_string_to_metric_families(exposition(metrics.report()).decode())
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_documentation_has_every_metric_with_its_labels():
    metrics = [each for each in vars(Metrics()).values() if isinstance(each, MetricWrapperBase)]
    ours = {
        family.name + ("_total" if family.type == "counter" else ""): (family.type, each._labelnames)
        for each in metrics
        for family in each.describe()
    }
    rows = re.findall(r"^\| `(pixelgate_\w+)` \| (\w+) \| ([\w`, ]*)\|", DOCS.read_text("utf-8"), re.MULTILINE)
    assert {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == ours
    assert len(rows) == len(ours)


def test_gauges_of_several_processes_are_put_together():
    metrics = Metrics()
    gauges = {each._name for each in vars(metrics).values() if getattr(each, "_type", "") == "gauge"}
    assert set(metrics.modes) == gauges
    report = {family["name"]: family for family in metrics.report()}
    assert report["pixelgate_engine_usable"]["mode"] == "min"
    assert report["pixelgate_engine_failures"]["mode"] == "max"
    assert {report[name]["mode"] for name in ("pixelgate_requests_in_flight", "pixelgate_requests")} == {"sum"}


def test_pictures():
    metrics = Metrics()
    metrics.picture("a", pixels=1_500_000, tokens=100)
    metrics.picture("a", pixels=500_000, tokens=None)
    found = samples(metrics)
    assert found["pixelgate_images_total", "a"] == 2
    assert found["pixelgate_image_megapixels_sum", "a"] == 2
    assert found["pixelgate_image_megapixels_bucket", "0.5", "a"] == 1
    assert (found["pixelgate_image_tokens_count", "a"], found["pixelgate_image_tokens_sum", "a"]) == (1, 100)


def test_errors_by_code_and_status():
    metrics = Metrics()
    for error in (BusyError("full"), FetchError("secret.example"), FetchError("other"), RequestError("no")):
        metrics.refused(error)
    found = samples(metrics)
    assert found["pixelgate_errors_total", "gateway_busy", "429"] == 1
    assert found["pixelgate_errors_total", "image_fetch_failed", "400"] == 2
    assert found["pixelgate_errors_total", "invalid_request_error", "400"] == 1


def test_budgets():
    metrics = Metrics()
    metrics.budgets({"bytes": (3, 10), "pixels": (0, 20)})
    metrics.budgets({"bytes": (4, 10)})
    found = samples(metrics)
    assert (found["pixelgate_budget_used", "bytes"], found["pixelgate_budget_limit", "bytes"]) == (4, 10)
    assert (found["pixelgate_budget_used", "pixels"], found["pixelgate_budget_limit", "pixels"]) == (0, 20)


def test_an_engine_that_is_gone_is_not_usable():
    metrics = Metrics()
    metrics.engines("m", [EngineState("a-0", True, 3, 0), EngineState("a-1", True, 2, 4)])
    found = samples(metrics)
    assert (found["pixelgate_engine_usable", "a-0", "m"], found["pixelgate_engine_usable", "a-1", "m"]) == (1, 1)
    assert found["pixelgate_engine_requests_in_flight", "a-1", "m"] == 2
    assert found["pixelgate_engine_failures", "a-1", "m"] == 4
    metrics.engines("m", [EngineState("a-0", True, 0, 0)])
    metrics.engines("other", [])
    found = samples(metrics)
    assert (found["pixelgate_engine_usable", "a-0", "m"], found["pixelgate_engine_usable", "a-1", "m"]) == (1, 0)
    assert found["pixelgate_engine_requests_in_flight", "a-1", "m"] == 0
    assert found["pixelgate_engine_failures", "a-1", "m"] == 0


async def test_work_waits_for_a_worker():
    services = Services.of(GatewaySettings(models=(ModelSettings("x", ("local:reader",)),), threads=1))
    async with services.running():
        assert await services.threads.run(NOBODY, lambda a, b: a + b, 1, 2) == 3
    assert samples(services.metrics)["pixelgate_thread_wait_seconds_count",] == 1
