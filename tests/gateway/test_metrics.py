from __future__ import annotations

import pytest

from pixelgate.gateway.metrics import Metrics, Phases


def test_phases_add_up_in_the_order_in_which_they_began():
    metrics = Metrics()
    phases = Phases(metrics)
    assert phases.server_timing() == ""
    phases.add("fetch", 0.5)
    phases.add("render", 0.001)
    phases.add("fetch", 0.25)
    assert phases.server_timing() == "fetch;dur=750.00, render;dur=1.00"
    phases.finish()
    text = metrics.exposition().decode()
    assert 'pixelgate_phase_seconds_sum{phase="fetch"} 0.75' in text
    assert 'pixelgate_phase_seconds_count{phase="fetch"} 1.0' in text
    assert 'pixelgate_phase_seconds_bucket{le="0.5",phase="fetch"} 0.0' in text


def test_a_phase_that_fails_is_measured_too():
    phases = Phases(Metrics())
    with pytest.raises(KeyError), phases.measure("fetch"):
        raise KeyError
    assert phases.seconds["fetch"] > 0
