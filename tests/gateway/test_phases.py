from __future__ import annotations

import sys
import threading

import pytest

from pixelgate.errors import ConfigError
from pixelgate.gateway.metrics import Metrics, exposition
from pixelgate.gateway.phases import Phases, check_tracing, open_tracing
from pixelgate.gateway.settings import GatewaySettings, ModelSettings

MODELS = (ModelSettings("x", ("local:reader",)),)


def shown(metrics):
    return exposition(metrics.report()).decode()


def test_phases_add_up_and_are_told_once():
    metrics = Metrics()
    phases = Phases(metrics)
    assert phases.server_timing() == ""
    phases.add("fetch", 0.5)
    phases.count("render", 0.001)
    phases.add("fetch", 0.25)
    phases.note(model="m", prompt_tokens=7)
    phases.note(completion_tokens=2, prompt_tokens=9)
    assert phases.server_timing() == "fetch;dur=750.00, render;dur=1.00"
    phases.finish("/path", 200)
    text = shown(metrics)
    assert 'pixelgate_phase_seconds_sum{model="m",phase="fetch"} 0.75' in text
    assert 'pixelgate_phase_seconds_count{model="m",phase="fetch"} 1.0' in text
    assert 'pixelgate_phase_seconds_bucket{le="0.5",model="m",phase="fetch"} 0.0' in text
    assert 'pixelgate_phase_seconds_count{model="m",phase="total"} 1.0' in text
    assert 'pixelgate_requests_total{model="m",path="/path",status="200"} 1.0' in text
    assert 'pixelgate_prompt_tokens_total{model="m"} 9.0' in text
    assert 'pixelgate_completion_tokens_total{model="m"} 2.0' in text


def test_a_request_that_fails_early_counts_under_no_model():
    metrics = Metrics()
    Phases(metrics).finish("/path", 404)
    text = shown(metrics)
    assert 'pixelgate_requests_total{model="",path="/path",status="404"} 1.0' in text
    assert "pixelgate_prompt_tokens_total{" not in text


def test_a_phase_stands_where_it_began():
    phases = Phases(Metrics())
    with phases.measure("preprocess"):
        with phases.measure("decode"):
            pass
        assert phases.server_timing().startswith("decode;")  # the other has not ended
    assert list(dict(phase.split(";") for phase in phases.server_timing().split(", "))) == ["preprocess", "decode"]
    assert 0 <= phases.seconds["decode"] <= phases.seconds["preprocess"]


def test_a_phase_that_fails_is_measured_too():
    phases = Phases(Metrics())
    with pytest.raises(KeyError), phases.measure("fetch"):
        raise KeyError
    assert phases.seconds["fetch"] > 0


def test_what_ends_after_the_request_is_not_counted():
    metrics = Metrics()
    phases = Phases(metrics)
    with phases.measure("decode"):
        phases.finish("/path", 499)
        phases.count("send", 1.0)
    assert set(phases.seconds) == {"total"}
    assert 'phase="decode"' not in shown(metrics)


def test_threads_lose_nothing(monkeypatch):
    phases = Phases(Metrics())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:

        def work():
            for _ in range(2000):
                phases.count("decode", 1.0)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert phases.seconds["decode"] == 8000


def test_waits_and_engines():
    metrics = Metrics()
    phases = Phases(metrics)
    phases.note(model="m")
    phases.waiting("bytes")(0.5)
    phases.tried("vllm+grpc-0", "declined", 0.25)
    phases.tried("vllm+grpc-1", "answered", 1.0)
    assert phases.seconds == {"wait_bytes": 0.5, "engine": 1.25}
    assert phases.facts == {"model": "m", "engine": "vllm+grpc-1"}
    assert phases.traceparent == ""
    text = shown(metrics)
    for engine, outcome in (("vllm+grpc-0", "declined"), ("vllm+grpc-1", "answered")):
        assert f'pixelgate_engine_requests_total{{engine="{engine}",model="m",outcome="{outcome}"}} 1.0' in text


def test_nothing_is_traced_unless_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)  # which is not needed for that
    monkeypatch.delitem(sys.modules, "pixelgate.gateway.tracing", raising=False)
    without = GatewaySettings(models=MODELS)
    check_tracing(without)
    assert open_tracing(without) is None
    for check in (check_tracing, open_tracing):
        with pytest.raises(ConfigError, match=r"trace_endpoint needs opentelemetry: pip install 'pixelgate\[otel\]'"):
            check(GatewaySettings(models=MODELS, trace_endpoint="http://127.0.0.1:4318"))
