"""OpenTelemetry spans of a request's life; imported only if traces are on.

::

    POST /v1/completions            the Ingress, from the request's first byte to the answer's last
      generate                      the Router, for each prompt and choice
        queue                       until the request gets a place
        prefill                     until the first token: the prompt's steps, and the first verdict
        rounds                      until the end; attributes count drafted and accepted tokens
      stream                        from the first event sent to the last

Spans hold no prompts, tokens, texts or keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from specray import __version__
from specray.config import TelemetryConfig
from specray.errors import ConfigError
from specray.requests import FinishReason, RequestLife

Attributes = Mapping[str, AttributeValue]
_PROPAGATOR: Final = TraceContextTextMapPropagator()


class RequestSpan:
    """Span of one request in its ingress. Times are in nanoseconds since 1970."""

    def __init__(self, tracer: trace.Tracer, span: Span, wall_ns: Callable[[], int]) -> None:
        self._tracer = tracer
        self._span = span
        self._wall_ns = wall_ns
        self._first_ns: int | None = None

    @property
    def traceparent(self) -> str:
        """W3C trace context for further spans of the request; empty when it is not sampled."""
        return _traceparent(self._span) if self._span.is_recording() else ""

    def answered(self) -> None:
        """Marks that the first event of a stream is sent now; idempotent."""
        if self._first_ns is None:
            self._first_ns = self._wall_ns()

    def end(self, attributes: Attributes, *, error: str | None = None) -> None:
        """Ends the span now, with attributes of the request."""
        end_ns = self._wall_ns()
        if self._first_ns is not None:
            _add(self._tracer, "stream", self._span, self._first_ns, end_ns)
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(end_ns)


class Tracing:
    """Makes spans; interfaces.RequestTracer for a router.

    Args:
        provider: receives the spans.
        wall_ns: clock in nanoseconds since 1970.
    """

    def __init__(self, provider: TracerProvider, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("specray", __version__)
        self._wall_ns = wall_ns

    def start(self, name: str, traceparent: str, attributes: Attributes) -> RequestSpan:
        """Begins a request's span within ``traceparent``; empty or invalid: it begins a new trace."""
        span = self._tracer.start_span(
            name, _context(traceparent), SpanKind.SERVER, attributes, start_time=self._wall_ns()
        )
        return RequestSpan(self._tracer, span, self._wall_ns)

    def request_ended(self, life: RequestLife, now: float) -> None:
        offset_ns = self._wall_ns() - round(now * 1e9)

        def at(seconds: float) -> int:
            return offset_ns + round(seconds * 1e9)

        parent = _context(life.traceparent)
        start, end = at(life.arrived_s), at(life.ended_s)
        span = self._tracer.start_span("generate", parent, attributes=_life(life), start_time=start)
        if not span.is_recording():
            return
        queued = end if life.admitted_s is None else at(life.admitted_s)
        _add(self._tracer, "queue", span, start, queued)
        if life.admitted_s is not None:
            first = end if life.first_token_s is None else at(life.first_token_s)
            _add(self._tracer, "prefill", span, queued, first, _prompt(life))
            if life.first_token_s is not None:
                _add(self._tracer, "rounds", span, first, end, _rounds(life))
        if life.finish_reason is FinishReason.ERROR:
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def close(self) -> None:
        """Sends the remaining spans at the end of the process; waits a few seconds at most."""
        self._provider.shutdown()


def make_tracing(config: TelemetryConfig, *, role: str) -> Tracing:
    """Makes tracing as configured, for a process in ``role`` (ingress or router).

    Raises:
        ConfigError: the OTLP exporter package is not installed.
    """
    resource = Resource.create(
        {"service.name": config.service_name, "service.version": __version__, "specray.role": role}
    )
    # The sender of a trace decides on sampling; the Ingress decides for requests without one, the Router
    # never.
    sampler = ParentBased(TraceIdRatioBased(config.sampling_ratio))
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(config)))
    return Tracing(provider)


def _exporter(config: TelemetryConfig) -> SpanExporter:
    if config.traces == "console":
        import sys

        return ConsoleSpanExporter(out=sys.stderr, formatter=lambda span: span.to_json(indent=None) + "\n")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "telemetry.traces: otlp needs the package opentelemetry-exporter-otlp-proto-http, which is not "
            "installed; allowed: pip install 'specray[otlp]', or traces: console or none"
        ) from None
    exporter: SpanExporter = OTLPSpanExporter(endpoint=config.endpoint)
    return exporter


def _context(traceparent: str) -> Context:
    """Parses a trace context; a malformed one counts as none."""
    return _PROPAGATOR.extract({"traceparent": traceparent} if traceparent else {}, context=Context())


def _traceparent(span: Span) -> str:
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=trace.set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def _add(
    tracer: trace.Tracer,
    name: str,
    parent: Span,
    start_ns: int,
    end_ns: int,
    attributes: Attributes | None = None,
) -> None:
    context = trace.set_span_in_context(parent, Context())
    span = tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
    span.end(max(start_ns, end_ns))


def _life(life: RequestLife) -> Attributes:
    return {
        "specray.request_id": life.request_id,
        "specray.finish_reason": life.finish_reason.value,
        "specray.num_prompt_tokens": life.num_prompt_tokens,
        "specray.num_output_tokens": life.num_output_tokens,
    }


def _prompt(life: RequestLife) -> Attributes:
    return {"specray.num_cached_tokens": life.num_cached_tokens}


def _rounds(life: RequestLife) -> Attributes:
    return {
        "specray.num_rounds": life.num_rounds,
        "specray.num_spec_steps": life.stats.num_spec_steps,
        "specray.num_draft_tokens": life.stats.num_draft_tokens,
        "specray.num_accepted_tokens": life.stats.num_accepted_draft_tokens,
        "specray.acceptance_histogram": life.stats.acceptance_histogram,
        "specray.num_preemptions": life.num_preemptions,
    }
