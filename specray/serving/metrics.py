"""Prometheus metrics of an Ingress: calls over HTTP and gRPC, as their callers see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specray.routing import Choice
from specray.telemetry.conventions import PROVIDER
from specray.telemetry.exposition import registry_text

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 2, 5, 10, 30, 60, 120, 300, 600)


_CHOICE_SECONDS: Final = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01)


# Boundaries that the conventions advise.
_DURATION_SECONDS: Final = tuple(0.01 * 2**power for power in range(14))
_FIRST_TOKEN_SECONDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_TOKEN_SECONDS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


@dataclass(frozen=True, slots=True)
class Generation:
    """A generating call that has ended.

    Attributes:
        operation: chat or text_completion.
        error: name of the error that ended it; None: it succeeded.
        seconds: from its arrival to its end.
        first_s: seconds to the first tokens; None: there were none, or they are not known.
        num_output_tokens: tokens of all choices.
    """

    operation: str
    model: str
    error: str | None
    seconds: float
    first_s: float | None
    num_output_tokens: int


class IngressMetrics:
    """Metrics of one Ingress replica.

    ``protocol`` is http or grpc; ``name`` is one of few paths or methods.
    """

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        labels = ["protocol", "name"]
        self._calls = counter(
            "specray_ingress_calls", "Calls answered, by HTTP status or gRPC code.", [*labels, "code"]
        )
        self._seconds = histogram(
            "specray_ingress_call_seconds",
            "Seconds from a call's arrival to the end of its answer.",
            labels,
            buckets=_SECONDS,
        )
        self._first_seconds = histogram(
            "specray_ingress_time_to_first_token_seconds",
            "Seconds from the arrival of a streaming call to its first tokens.",
            labels,
            buckets=_SECONDS,
        )
        self._in_progress = gauge("specray_ingress_calls_in_progress", "Calls being answered.", ["protocol"])
        self._choices = counter(
            "specray_routing", "Requests by what decided their Router: prefix, load, tie or full.", ["reason"]
        )
        self._expected_tokens = counter(
            "specray_routing_predicted_tokens",
            "Prompt tokens that the chosen Router was expected to find in its cache.",
            ["reason"],
        )
        self._missed_tokens = counter(
            "specray_routing_mispredicted_tokens", "Those of them that it did not find.", ["reason"]
        )
        self._choice_seconds = histogram(
            "specray_routing_choice_seconds",
            "Seconds that the choice of a Router took.",
            ["reason"],
            buckets=_CHOICE_SECONDS,
        )
        names = [
            f"gen_ai_{name}"
            for name in ("operation_name", "provider_name", "request_model", "response_model")
        ]
        self._request_duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "Seconds of a generating call; error_type: why it failed, empty if it did not.",
            [*names, "error_type"],
            buckets=_DURATION_SECONDS,
        )
        self._time_to_first_token = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Seconds from a generating call's arrival to its first tokens, of those that succeeded.",
            names,
            buckets=_FIRST_TOKEN_SECONDS,
        )
        self._time_per_output_token = histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Seconds per output token after the first, of calls that succeeded.",
            names,
            buckets=_TOKEN_SECONDS,
        )
        # Present from the start, so that a replica without calls shows up, too.
        for protocol in ("http", "grpc"):
            self._in_progress.labels(protocol)

    def text(self) -> str:
        return registry_text(self.registry)

    def begin(self, protocol: str) -> None:
        self._in_progress.labels(protocol).inc()

    def end(self, protocol: str, name: str, code: str, seconds: float, first_s: float | None) -> None:
        """Counts the end of a call. ``first_s``: seconds from its arrival to its first tokens."""
        self._in_progress.labels(protocol).dec()
        self._calls.labels(protocol, name, code).inc()
        self._seconds.labels(protocol, name).observe(seconds)
        if first_s is not None:
            self._first_seconds.labels(protocol, name).observe(first_s)

    def observe_generation(self, generation: Generation) -> None:
        """Counts a generating call under the names of OpenTelemetry's conventions."""
        labels = (generation.operation, PROVIDER, generation.model, generation.model)
        self._request_duration.labels(*labels, generation.error or "").observe(generation.seconds)
        if generation.first_s is None or generation.error is not None:
            return
        self._time_to_first_token.labels(*labels).observe(generation.first_s)
        if generation.num_output_tokens > 1:
            each_s = (generation.seconds - generation.first_s) / (generation.num_output_tokens - 1)
            self._time_per_output_token.labels(*labels).observe(max(0.0, each_s))

    def observe_choice(self, choice: Choice, num_found: int) -> None:
        """Counts the choice of a Router for a request that has ended, which found ``num_found`` tokens."""
        self._choices.labels(choice.reason).inc()
        self._expected_tokens.labels(choice.reason).inc(choice.num_expected_tokens)
        self._missed_tokens.labels(choice.reason).inc(max(0, choice.num_expected_tokens - num_found))
        self._choice_seconds.labels(choice.reason).observe(choice.seconds)

    def value(self, name: str, labels: Sequence[tuple[str, str]] = ()) -> float:
        return self.registry.get_sample_value(name, dict(labels)) or 0.0
