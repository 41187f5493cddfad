"""Traces by OpenTelemetry; extra ``otel``. Loaded only where a collector is configured.

A request is one span, continued from the client's ``traceparent``; below it lie its phases and pictures, side by side.
The SDK's own environment variables, OTEL_..., hold for what no setting of ours says.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import requests
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pixelgate._version import __version__

_EXPORT_SECONDS = 5.0
_PATH = "/v1/traces"
_W3C = TraceContextTextMapPropagator()


def exporter(endpoint: str) -> SpanExporter:
    """OTLP over HTTP to ``endpoint``, whose path is ``/v1/traces`` if it has none."""
    session = requests.Session()
    session.trust_env = False  # a proxy variable is meant for fetching
    path = "" if "/" in endpoint.partition("://")[2].rstrip("/") else _PATH
    return OTLPSpanExporter(endpoint.rstrip("/") + path, timeout=_EXPORT_SECONDS, session=session)


class Tracing:
    """Traces of a ``sample`` of the requests, and of those whose client says that they are traced, to ``exporter``."""

    def __init__(self, exporter: SpanExporter, sample: float) -> None:
        ours = Resource({"service.name": "pixelgate", "service.version": __version__})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)),
            resource=ours.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pixelgate", __version__)

    def request(self, method: str, path: str, headers: Mapping[str, str], request_id: str) -> Trace:
        """Begin the trace of a request, or continue its client's."""
        span = self._tracer.start_span(
            f"{method} {path}",
            context=_W3C.extract(headers, context=Context()),
            kind=trace.SpanKind.SERVER,
            attributes={"http.request.method": method, "http.route": path, "pixelgate.request_id": request_id},
        )
        return Trace(self._tracer, span)

    def close(self) -> None:
        """Send what has not been sent. Takes seconds where the collector is not there."""
        self._provider.shutdown()


class Trace:
    """The trace of one request. Used from several threads."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span, Context())

    @property
    def traceparent(self) -> str:
        """The W3C header of what belongs to this request. What else a client's headers say goes no further."""
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, context=self._context)
        return carrier.get("traceparent", "")

    def span(self, name: str, seconds: float, facts: Mapping[str, str | int]) -> None:
        """Show something that took ``seconds`` until now."""
        end = time.time_ns()
        attributes = {f"pixelgate.{fact}": value for fact, value in facts.items()}
        start = end - round(seconds * 1e9)
        self._tracer.start_span(name, context=self._context, start_time=start, attributes=attributes).end(end)

    def end(self, status: int, facts: Mapping[str, str | int]) -> None:
        """End the trace of a request that was answered with ``status``."""
        self._span.set_attributes({f"pixelgate.{fact}": value for fact, value in facts.items()})
        self._span.set_attribute("http.response.status_code", status)
        if status >= 500:
            self._span.set_status(trace.StatusCode.ERROR)
        self._span.end()
