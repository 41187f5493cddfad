"""What /metrics shows.

No value of a label is a client's: models, paths, codes and engines are as many as the operator has. Every metric is of
a kind that can be put together from several processes, gauges as their mode says. The table is in docs/gateway.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from pixelgate.engines.fleet import EngineState
from pixelgate.errors import PixelgateError
from pixelgate.gateway.cache import Cache
from pixelgate.gateway.sums import Family

_M = TypeVar("_M", Counter, Gauge, Histogram)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_TOKENS = (16, 64, 256, 1024, 4096, 16384)
_MEGAPIXELS = (0.1, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """The gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.modes: dict[str, str] = {}
        self.requests = self._counter("requests", "Requests answered.", "model", "path", "status")
        self.errors = self._counter("errors", "Requests and connections answered with an error.", "code", "status")
        self.in_flight = self._gauge("requests_in_flight", "Requests under way.")
        self.phases = self._histogram("phase_seconds", "Time of a request by phase.", _SECONDS, "model", "phase")
        self.thread_wait = self._histogram("thread_wait_seconds", "Time that work waits for a worker.", _SECONDS)
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered.", "model")
        self.completion_tokens = self._counter("completion_tokens", "Tokens of answers.", "model")

        self.images = self._counter("images", "Pictures made ready.", "model")
        self.image_megapixels = self._histogram("image_megapixels", "Size of a picture.", _MEGAPIXELS, "model")
        self.image_tokens = self._histogram("image_tokens", "Prompt tokens of one picture.", _TOKENS, "model")
        self.tensor_bytes = self._counter("tensor_bytes", "Bytes of pixel tensors made.", "model")

        self.budget_used = self._gauge("budget_used", "What requests hold of a budget.", "budget")
        self.budget_limit = self._gauge("budget_limit", "The most they may.", "budget")
        self.cache_events = self._counter("cache_events", "What came of looks into caches.", "tier", "outcome")
        self.cache_bytes = self._gauge("cache_bytes", "Bytes in caches.", "tier")

        engine = ("model", "engine")
        self.engine_requests = self._counter("engine_requests", "What engines made of requests.", *engine, "outcome")
        self.engine_usable = self._gauge("engine_usable", "1 if an engine gets requests.", *engine, mode="min")
        self.engine_in_flight = self._gauge("engine_requests_in_flight", "Requests at an engine.", *engine)
        self.engine_failures = self._gauge(
            "engine_failures", "Requests that an engine failed on in a row.", *engine, mode="max"
        )
        self._engines: dict[str, set[str]] = {}

        self.loop_lag = self._histogram("event_loop_lag_seconds", "How late the event loop is.", _LAG_SECONDS)
        self.loop_lag_max = self._gauge(
            "event_loop_lag_max_seconds", "The most that it was late in the last minute.", mode="max"
        )

    def picture(self, model: str, *, pixels: int, tokens: int | None) -> None:
        """Count a picture that is ready for an engine. Of one that the engine prepares itself less may be known."""
        self.images.labels(model).inc()
        self.image_megapixels.labels(model).observe(pixels / 1e6)
        if tokens is not None:
            self.image_tokens.labels(model).observe(tokens)

    def refused(self, error: PixelgateError) -> None:
        """Count an error that a client was told."""
        self.errors.labels(error.code or error.type, error.status).inc()

    def budgets(self, budgets: Mapping[str, tuple[int, int]]) -> None:
        """Show what is used of each budget, and its limit."""
        for name, (used, limit) in budgets.items():
            self.budget_used.labels(name).set(used)
            self.budget_limit.labels(name).set(limit)

    def engines(self, model: str, states: Iterable[EngineState]) -> None:
        """Show the engines of a model. One that is gone is shown as not usable until its name is another's."""
        gone = set(self._engines.get(model, ()))
        for state in states:
            self._engine(model, state)
            self._engines.setdefault(model, set()).add(state.name)
            gone.discard(state.name)
        for name in gone:
            self._engine(model, EngineState(name, usable=False, in_flight=0, failures=0))

    def _engine(self, model: str, state: EngineState) -> None:
        self.engine_usable.labels(model, state.name).set(state.usable)
        self.engine_in_flight.labels(model, state.name).set(state.in_flight)
        self.engine_failures.labels(model, state.name).set(state.failures)

    def watch_cache(self, tier: str, cache: Cache[Any, Any]) -> None:
        """Show how much a cache holds."""
        self.cache_bytes.labels(tier).set_function(lambda: cache.nbytes)

    def report(self) -> list[Family]:
        """All samples, as a supervisor adds them to those of other processes."""
        return [
            Family(
                name=metric.name,
                words=metric.documentation,
                kind=metric.type,
                mode=self.modes.get(metric.name, "sum"),
                samples=[[s.name, s.labels, s.value] for s in metric.samples if not s.name.endswith("_created")],
            )
            for metric in self.registry.collect()
        ]

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return _remembering(Counter(f"pixelgate_{name}", words, labels, registry=self.registry))

    def _histogram(self, name: str, words: str, buckets: Iterable[float], *labels: str) -> Histogram:
        return _remembering(
            Histogram(f"pixelgate_{name}", words, labels, buckets=tuple(buckets), registry=self.registry)
        )

    def _gauge(self, name: str, words: str, *labels: str, mode: str = "sum") -> Gauge:
        """A gauge; ``mode`` is how those of several processes become one."""
        self.modes[f"pixelgate_{name}"] = mode
        return _remembering(Gauge(f"pixelgate_{name}", words, labels, registry=self.registry))


def _remembering(metric: _M) -> _M:
    """``metric``, which finds the child for the same labels at once: the library compares strings under a lock."""
    vars(metric)["labels"] = cache(metric.labels)
    return metric


def exposition(report: Iterable[Family]) -> bytes:
    """The Prometheus text format of a report."""
    return generate_latest(_Collected(report))


class _Collected(Collector):
    def __init__(self, report: Iterable[Family]) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """The report's families."""
        for family in self._report:
            metric = Metric(family["name"], family["words"], family["kind"])
            for sample in family["samples"]:
                metric.add_sample(*sample)
            yield metric
