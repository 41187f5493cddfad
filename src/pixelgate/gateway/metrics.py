"""What /metrics shows, and the timings of one request by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pixelgate.gateway.cache import Cache

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKENS = (16, 64, 256, 1024, 4096, 16384)


class Metrics:
    """The gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("pixelgate_requests", "Requests answered.", ["path", "status"], registry=self.registry)
        self.phases = Histogram(
            "pixelgate_phase_seconds", "Time by phase.", ["phase"], buckets=_SECONDS, registry=self.registry
        )
        self.images = Counter("pixelgate_images", "Pictures preprocessed.", registry=self.registry)
        self.image_tokens = Histogram(
            "pixelgate_image_tokens", "Prompt tokens of one picture.", buckets=_TOKENS, registry=self.registry
        )
        self.tensor_bytes = Counter("pixelgate_tensor_bytes", "Bytes of pixel tensors made.", registry=self.registry)
        self.cache_events = Counter(
            "pixelgate_cache_events", "Looks into a cache.", ["tier", "outcome"], registry=self.registry
        )
        self.cache_bytes = Gauge("pixelgate_cache_bytes", "Bytes kept in a cache.", ["tier"], registry=self.registry)
        self.in_flight = Gauge("pixelgate_requests_in_flight", "Requests under way.", registry=self.registry)

    def watch_cache(self, tier: str, cache: Cache[Any, Any]) -> None:
        """Show how much a cache holds."""
        self.cache_bytes.labels(tier).set_function(lambda: cache.nbytes)

    def exposition(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class Phases:
    """Seconds of one request by phase, in the order in which the phases began."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Time a block; a phase entered several times adds up."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - start)

    def add(self, phase: str, seconds: float) -> None:
        """Count ``seconds`` for ``phase``."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def server_timing(self) -> str:
        """The phases so far as a Server-Timing header, in milliseconds."""
        return ", ".join(f"{phase};dur={seconds * 1000:.2f}" for phase, seconds in self.seconds.items())

    def finish(self) -> None:
        """Put the phases into the metrics."""
        for phase, seconds in self.seconds.items():
            self._metrics.phases.labels(phase).observe(seconds)
