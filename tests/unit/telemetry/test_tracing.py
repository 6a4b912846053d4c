"""Spans of a request as exported: names, times, parents, attributes."""

from __future__ import annotations

import builtins
import gzip
import http.server
import threading
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, StatusCode

from specray.config import TelemetryConfig
from specray.errors import ConfigError
from specray.requests import FinishReason, RequestLife, SpeculationStats
from specray.telemetry.tracing import Tracing, make_tracing

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = SAMPLED[:-1] + "0"
WALL_NS = 1_700_000_000_000_000_000
LIFE = RequestLife(
    request_id="cmpl-1",
    traceparent=SAMPLED,
    arrived_s=10.0,
    admitted_s=10.5,
    first_token_s=11.0,
    ended_s=13.0,
    finish_reason=FinishReason.LENGTH,
    num_prompt_tokens=7,
    num_cached_tokens=4,
    num_output_tokens=9,
    num_rounds=4,
    num_preemptions=1,
    stats=SpeculationStats(3, 9, 5, (0, 2, 0, 1)),
)


def fields(**over: Any) -> dict[str, Any]:
    return {name: getattr(LIFE, name) for name in LIFE.__dataclass_fields__} | over


class Recorder:
    """Tracing into memory, with a clock set by the test."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.now_ns = WALL_NS
        self._spans = InMemorySpanExporter()
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)))
        provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracing = Tracing(provider, wall_ns=lambda: self.now_ns)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        finished = self._spans.get_finished_spans()
        found = {span.name: span for span in finished}
        assert len(found) == len(finished), "a span stands twice"
        return found


def milliseconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None and span.end_time is not None
    return (span.start_time - WALL_NS) / 1e6, (span.end_time - WALL_NS) / 1e6


def test_a_life_becomes_queue_prefill_and_rounds_under_the_ingress_span() -> None:
    recorder = Recorder()
    # It is 13.2 on the router's clock: the request has ended 200 ms ago.
    recorder.tracing.request_ended(LIFE, now=13.2)
    spans = recorder.spans
    assert {name: milliseconds(span) for name, span in spans.items()} == {
        "generate": (-3200, -200),
        "queue": (-3200, -2700),
        "prefill": (-2700, -2200),
        "rounds": (-2200, -200),
    }
    generate = spans["generate"]
    assert f"{generate.context.trace_id:032x}" == SAMPLED.split("-")[1]
    assert generate.parent is not None and f"{generate.parent.span_id:016x}" == SAMPLED.split("-")[2]
    for name in ("queue", "prefill", "rounds"):
        parent = spans[name].parent
        assert parent is not None and parent.span_id == generate.context.span_id
    assert {name: dict(span.attributes or {}) for name, span in spans.items()} == {
        "generate": {
            "specray.request_id": "cmpl-1",
            "specray.finish_reason": "length",
            "specray.num_prompt_tokens": 7,
            "specray.num_output_tokens": 9,
        },
        "queue": {},
        "prefill": {"specray.num_cached_tokens": 4},
        "rounds": {
            "specray.num_rounds": 4,
            "specray.num_spec_steps": 3,
            "specray.num_draft_tokens": 9,
            "specray.num_accepted_tokens": 5,
            "specray.acceptance_histogram": (0, 2, 0, 1),
            "specray.num_preemptions": 1,
        },
    }
    assert {span.status.status_code for span in spans.values()} == {StatusCode.UNSET}


@pytest.mark.parametrize(
    ("over", "names"),
    [
        ({"admitted_s": None, "first_token_s": None}, ["queue", "generate"]),
        ({"first_token_s": None}, ["queue", "prefill", "generate"]),
    ],
    ids=["ended in the queue", "ended in the prefill"],
)
def test_a_life_that_ends_early_has_the_spans_that_it_reached(over: dict[str, Any], names: list[str]) -> None:
    recorder = Recorder()
    life = RequestLife(**fields(finish_reason=FinishReason.ERROR, **over))
    recorder.tracing.request_ended(life, now=13.0)
    assert list(recorder.spans) == names
    assert milliseconds(recorder.spans[names[-2]])[1] == 0
    assert recorder.spans["generate"].status.status_code is StatusCode.ERROR


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_callers_decision_to_sample_holds(ratio: float) -> None:
    recorder = Recorder(ratio)
    recorder.tracing.request_ended(RequestLife(**fields(traceparent=NOT_SAMPLED)), now=13.0)
    span = recorder.tracing.start("POST /v1/completions", NOT_SAMPLED, {})
    assert span.traceparent == ""
    span.end({})
    assert recorder.spans == {}

    recorder.tracing.request_ended(LIFE, now=13.0)
    span = recorder.tracing.start("POST /v1/completions", SAMPLED, {})
    assert span.traceparent.startswith(SAMPLED[:36]) and span.traceparent.endswith("-01")
    assert span.traceparent != SAMPLED
    span.end({})
    assert len(recorder.spans) == 5


@pytest.mark.parametrize("traceparent", ["", "nonsense", SAMPLED[:-3], "00-" + "0" * 32 + SAMPLED[35:]])
def test_without_a_usable_trace_a_request_begins_one_by_the_ratio(traceparent: str) -> None:
    for ratio, num_spans in ((1.0, 1), (0.0, 0)):
        recorder = Recorder(ratio)
        span = recorder.tracing.start("POST /v1/completions", traceparent, {})
        assert (span.traceparent != "") is bool(num_spans)
        span.end({})
        assert len(recorder.spans) == num_spans
        assert all(span.parent is None for span in recorder.spans.values())


def test_a_request_has_a_server_span_and_a_stream_from_the_first_event() -> None:
    recorder = Recorder()
    span = recorder.tracing.start("POST /v1/completions", SAMPLED, {"a": 1})
    for now, call in ((30, span.answered), (50, span.answered)):
        recorder.now_ns = WALL_NS + now * 1_000_000
        call()
    recorder.now_ns = WALL_NS + 80_000_000
    span.end({"b": 2}, error="the target was lost")
    request, stream = recorder.spans["POST /v1/completions"], recorder.spans["stream"]
    assert (milliseconds(request), milliseconds(stream)) == ((0, 80), (30, 80))
    assert request.kind is SpanKind.SERVER and dict(request.attributes or {}) == {"a": 1, "b": 2}
    assert (request.status.status_code, request.status.description) == (
        StatusCode.ERROR,
        "the target was lost",
    )
    assert stream.parent is not None and stream.parent.span_id == request.context.span_id


def test_a_missing_exporter_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without_exporter(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("opentelemetry.exporter.otlp"):
            raise ImportError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without_exporter)
    with pytest.raises(ConfigError, match=r"opentelemetry-exporter-otlp-proto-http.*pip install 'specray"):
        make_tracing(TelemetryConfig(traces="otlp"), role="router")


def test_console_spans_are_one_json_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    tracing = make_tracing(TelemetryConfig(traces="console", service_name="demo"), role="ingress")
    tracing.start("GET /x", "", {}).end({"specray.num_output_tokens": 3})
    tracing.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert '"GET /x"' in line and '"service.name": "demo"' in line and '"specray.role": "ingress"' in line


def test_spans_reach_a_collector_over_otlp() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_packed = self.headers.get("Content-Encoding") == "gzip"
            received.append((self.path, gzip.decompress(body) if is_packed else body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
        tracing = make_tracing(TelemetryConfig(traces="otlp", endpoint=endpoint), role="router")
        tracing.request_ended(LIFE, now=13.0)
        tracing.close()
        server.shutdown()
    ((path, body),) = received
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert {span.name for span in spans} == {"generate", "queue", "prefill", "rounds"}
    assert {span.trace_id.hex() for span in spans} == {SAMPLED.split("-")[1]}
