"""What is noted of one request on its way, for its reply's head, the metrics, the log and its trace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from pixelgate.engines.fleet import Outcome
from pixelgate.errors import ConfigError
from pixelgate.gateway.metrics import Metrics
from pixelgate.gateway.settings import GatewaySettings

if TYPE_CHECKING:
    from pixelgate.gateway.tracing import Trace, Tracing

Fact = str | int


class Phases:
    """Seconds of one request by phase, in the order in which the phases began, and facts by name.

    Used from the event loop and from workers' threads. A phase that is entered several times, be it at once, adds up;
    what ends after the request is not counted. Facts are names of the operator's and numbers, never text, URLs or
    headers of a client: they are logged and sent to the collector of traces.
    """

    def __init__(self, metrics: Metrics, trace: Trace | None = None) -> None:
        self._metrics = metrics
        self._trace = trace
        self._lock = threading.Lock()
        self._begun = time.perf_counter()
        self._over = False
        self._order: list[str] = []
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, Fact] = {}

    @property
    def model(self) -> str:
        """The model that is asked; empty while it is not known, and for one that there is not."""
        return str(self.facts.get("model", ""))

    @property
    def traceparent(self) -> str:
        """By which an engine can continue the trace (W3C); empty where nothing is traced."""
        return self._trace.traceparent if self._trace else ""

    def note(self, **facts: Fact) -> None:
        """Keep facts; a later one replaces an earlier one of its name."""
        self.facts.update(facts)

    @contextmanager
    def measure(self, phase: str, **facts: Fact) -> Iterator[None]:
        """Time a block, however it ends; ``facts`` are for the trace."""
        with self._lock:
            if phase not in self._order:
                self._order.append(phase)
        start = time.perf_counter()
        with self.span(phase, **facts):
            try:
                yield
            finally:
                self.count(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Count the ``seconds`` that ``phase`` took until now."""
        self.count(phase, seconds)
        if self._trace:
            self._trace.span(phase, seconds, {})

    def count(self, phase: str, seconds: float) -> None:
        """Count ``seconds`` for ``phase``, one of so many pieces that a trace shows none."""
        with self._lock:
            if self._over:
                return
            if phase not in self._order:
                self._order.append(phase)
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def tried(self, engine: str, outcome: Outcome, seconds: float) -> None:
        """Note that an engine was tried, as `Pool.generate` tells it."""
        self._metrics.engine_requests.labels(self.model, engine, outcome).inc()
        self.note(engine=engine)
        self.count("engine", seconds)
        if self._trace:
            self._trace.span("engine", seconds, {"engine": engine, "outcome": outcome})

    def waiting(self, budget: str) -> Callable[[float], None]:
        """What a `Share` of a budget calls when the request had to wait for it."""
        return partial(self.add, f"wait_{budget}")

    @contextmanager
    def span(self, name: str, **facts: Fact) -> Iterator[None]:
        """Show a block in the trace alone."""
        if self._trace is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        except BaseException as failure:
            facts["error"] = type(failure).__name__
            raise
        finally:
            self._trace.span(name, time.perf_counter() - start, facts)

    def server_timing(self) -> str:
        """The phases so far as a Server-Timing header, in milliseconds."""
        with self._lock:
            ended = [(phase, self.seconds[phase]) for phase in self._order if phase in self.seconds]
        return ", ".join(f"{phase};dur={seconds * 1000:.2f}" for phase, seconds in ended)

    def finish(self, path: str, status: int) -> None:
        """Put everything into the metrics and end the trace. ``path`` is the route's, not what the client asked for."""
        self.count("total", time.perf_counter() - self._begun)
        with self._lock:
            self._over = True
        metrics, model = self._metrics, self.model
        metrics.requests.labels(model, path, status).inc()
        for phase, seconds in self.seconds.items():
            metrics.phases.labels(model, phase).observe(seconds)
        for counter, fact in (
            (metrics.prompt_tokens, "prompt_tokens"),
            (metrics.completion_tokens, "completion_tokens"),
        ):
            if tokens := self.facts.get(fact):
                counter.labels(model).inc(int(tokens))
        if self._trace:
            self._trace.end(status, self.facts)


def open_tracing(settings: GatewaySettings) -> Tracing | None:
    """Where traces go, if they go anywhere. Raises ConfigError where the extra is missing."""
    if not settings.trace_endpoint:
        return None
    check_tracing(settings)
    from pixelgate.gateway.tracing import Tracing, exporter

    return Tracing(exporter(settings.trace_endpoint), settings.trace_sample)


def check_tracing(settings: GatewaySettings) -> None:
    """Raise ConfigError where traces are wanted and the extra is missing."""
    if settings.trace_endpoint:
        try:
            import pixelgate.gateway.tracing  # noqa: F401
        except ImportError as failure:
            raise ConfigError(f"trace_endpoint needs {failure.name}: pip install 'pixelgate[otel]'") from None
