"""Observes the calls of an Ingress: one log line, counters and a span for each, without its texts."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from specray.config import LoggingConfig
from specray.requests import FinishReason, GenerateRequest
from specray.serving.generation import Delta
from specray.serving.metrics import Generation, IngressMetrics
from specray.serving.problems import problem_code, problem_status
from specray.telemetry.conventions import (
    Attributes,
    Value,
    request_attributes,
    response_attributes,
    status_attributes,
)

if TYPE_CHECKING:
    from specray.telemetry.tracing import RequestSpan, Tracing

logger = logging.getLogger(__name__)

_SERVER_ERROR: Final = 500
"""Least HTTP status that is an error of the service."""
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:/@+=-]{1,128}")


@dataclass(slots=True, eq=False)
class CallRecord:
    """Record of one call, from its first byte to its last."""

    protocol: str
    name: str
    """Name of the endpoint: ``POST /v1/completions``, ``Generate``."""
    started_s: float
    client_request_id: str | None
    """Id that the caller gave the request; not unique."""
    now: Callable[[], float]
    span: RequestSpan | None = None
    request_id: str = field(default_factory=lambda: f"call-{uuid.uuid4().hex}")
    """Id that this service gave the call: the id of its answer, and the prefix of its requests' ids."""
    operation: str = "text_completion"
    """What a generating call does, as OpenTelemetry's conventions name it: chat or text_completion."""
    tenant: str = ""
    model: str = ""
    """Name of the served model; empty: the call generates nothing."""
    is_stream: bool = False
    num_choices: int = 0
    num_prompt_tokens: int = 0
    num_input_tokens: int = 0
    """Prompt tokens, with every prompt counted once whatever the number of its choices."""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_s: float | None = None
    """Time of a stream's first tokens in seconds, on the clock ``now``."""
    router_ttft_s: float | None = None
    """Seconds to the first tokens as the router reports them, for answers that come as a whole."""
    finish_reasons: list[FinishReason] = field(default_factory=list)
    error: str | None = None
    is_server_error: bool = False
    """True: the error is the service's and not the caller's."""
    asked: Attributes = field(default_factory=dict)
    """Attributes of the span that say what a generating call asks for."""

    def describe(
        self,
        request_id: str,
        requests: Sequence[GenerateRequest],
        *,
        tenant: str,
        model: str,
        is_stream: bool,
        choices_per_prompt: int = 1,
    ) -> list[GenerateRequest]:
        """Records what a generating call asks for, and returns its requests with the call's trace."""
        self.request_id = request_id
        self.tenant = tenant
        self.model = model
        self.is_stream = is_stream
        self.num_choices = len(requests)
        self.num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self.num_input_tokens = self.num_prompt_tokens // choices_per_prompt
        traceparent = "" if self.span is None else self.span.traceparent
        if not traceparent:
            return list(requests)
        self.asked = request_attributes(model, requests, num_choices=choices_per_prompt, is_stream=is_stream)
        return [replace(request, traceparent=traceparent) for request in requests]

    def observe(self, delta: Delta) -> None:
        self.num_output_tokens += len(delta.token_ids)
        if self.is_stream and self.first_s is None:
            self.first_s = self.now()
            if self.span is not None:
                self.span.answered()
        if delta.finish_reason is None:
            return
        self.finish_reasons.append(delta.finish_reason)
        self.num_cached_tokens += delta.num_cached_tokens
        if delta.ttft_s is not None:
            self.router_ttft_s = min(delta.ttft_s, self.router_ttft_s or delta.ttft_s)
        if delta.stats is not None:
            self.num_spec_steps += delta.stats.num_spec_steps
            self.num_draft_tokens += delta.stats.num_draft_tokens
            self.num_accepted_tokens += delta.stats.num_accepted_draft_tokens

    def failed(self, error: Exception) -> None:
        self.error = problem_code(error)
        self.is_server_error = problem_status(error) >= _SERVER_ERROR

    @property
    def trace_id(self) -> str | None:
        traceparent = "" if self.span is None else self.span.traceparent
        return traceparent.split("-")[1] if traceparent else None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first tokens: of a stream since the call arrived, else as the router reports."""
        return self.router_ttft_s if self.first_s is None else self.first_s - self.started_s

    @property
    def finish_reason(self) -> str | None:
        if not self.num_choices:
            return None
        if self.error is not None:
            return FinishReason.ERROR.value
        if len(self.finish_reasons) < self.num_choices:
            return FinishReason.ABORT.value
        return "+".join(sorted({reason.value for reason in self.finish_reasons}))


class CallObserver:
    """Begins and ends the records of one Ingress's calls.

    Args:
        config: logging options; they say whether calls are logged.
        metrics: default: a fresh registry.
        tracing: makes the spans; None: there are none.
        now: clock in seconds.
    """

    def __init__(
        self,
        config: LoggingConfig,
        *,
        metrics: IngressMetrics | None = None,
        tracing: Tracing | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = metrics or IngressMetrics()
        self._logs_requests = config.requests
        self._tracing = tracing
        self._now = now

    def configure(self, config: LoggingConfig) -> None:
        self._logs_requests = config.requests

    def begin(
        self,
        protocol: str,
        name: str,
        *,
        client_request_id: str = "",
        traceparent: str = "",
        attributes: Attributes | None = None,
    ) -> CallRecord:
        """Begins the record of a call that arrived; ``end`` must follow.

        Args:
            attributes: attributes of its span; None: it has no span.
        """
        self.metrics.begin(protocol)
        record = CallRecord(
            protocol,
            name,
            self._now(),
            client_request_id if _CLIENT_ID.fullmatch(client_request_id) else None,
            self._now,
        )
        if self._tracing is not None and attributes is not None:
            record.span = self._tracing.start(name, traceparent, attributes)
        return record

    def end(self, record: CallRecord, code: str) -> None:
        """Ends the record with an HTTP status or a gRPC code."""
        seconds = self._now() - record.started_s
        first_s = None if record.first_s is None else record.first_s - record.started_s
        self.metrics.end(record.protocol, record.name, code, seconds, first_s)
        if record.num_choices:
            self.metrics.observe_generation(
                Generation(
                    record.operation,
                    record.model,
                    record.error,
                    seconds,
                    record.ttft_s,
                    record.num_output_tokens,
                )
            )
        level = logging.INFO if record.num_choices or record.error is not None else logging.DEBUG
        if self._logs_requests and logger.isEnabledFor(level):
            logger.log(level, "%s %s", record.name, code, extra=_fields(record, code, seconds))
        if record.span is not None:
            is_server_error = record.is_server_error or (
                record.protocol == "http" and int(code) >= _SERVER_ERROR
            )
            error = record.error or code if is_server_error else None
            record.span.end(_attributes(record, code, seconds, error), error=error)


def _attributes(record: CallRecord, code: str, seconds: float, error: str | None) -> Attributes:
    """Attributes of a span at its end; ``error`` is the service's own, if it has made one."""
    values: dict[str, Value] = {
        f"specray.{name}": value
        for name, value in _fields(record, code, seconds).items()
        if isinstance(value, str | int)
    }
    values |= {**record.asked, **status_attributes(record.protocol, code, error)}
    if record.num_choices:
        values |= response_attributes(
            record.model,
            record.request_id,
            [reason.value for reason in record.finish_reasons],
            num_input_tokens=record.num_input_tokens,
            num_cached_tokens=record.num_cached_tokens,
            num_output_tokens=record.num_output_tokens,
            first_chunk_s=None if record.first_s is None else record.first_s - record.started_s,
        )
    return values


def _fields(record: CallRecord, code: str, seconds: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "client_request_id": record.client_request_id,
        "trace_id": record.trace_id,
        "protocol": record.protocol,
        "code": code,
        "error": record.error,
        "duration_ms": round(1e3 * seconds, 3),
    }
    if not record.num_choices:
        return fields
    return fields | {
        "tenant": record.tenant or None,
        "finish_reason": record.finish_reason,
        "is_stream": record.is_stream,
        "num_choices": record.num_choices,
        "num_prompt_tokens": record.num_prompt_tokens,
        "num_cached_tokens": record.num_cached_tokens,
        "num_output_tokens": record.num_output_tokens,
        "num_draft_tokens": record.num_draft_tokens,
        "num_accepted_tokens": record.num_accepted_tokens,
        "ttft_ms": None if record.ttft_s is None else round(1e3 * record.ttft_s, 3),
        "acceptance_rate": (
            round(record.num_accepted_tokens / record.num_draft_tokens, 3)
            if record.num_draft_tokens
            else None
        ),
    }
