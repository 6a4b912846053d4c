"""The HTTP and gRPC endpoints, and the logs and traces that a service writes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specray.config.section import Section


class HttpConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    server: Literal["auto", "ingress", "proxy"] = Field(
        "auto",
        description="Who listens: proxy: Serve's, on every node where it runs; ingress: each Ingress itself, "
        "at a fraction of the processor time; auto: ingress for `specray serve` with a Ray of its own, else "
        "proxy.",
    )


class GrpcConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(9000, ge=0, le=65535, description="0: no gRPC endpoint.")
    max_message_bytes: int = Field(4 * 1024 * 1024, ge=1024)


class IngressConfig(Section):
    num_replicas: int = Field(1, ge=1, le=64)
    max_ongoing_requests: int = Field(
        1024, ge=1, description="Calls in hand, for each replica; more are refused (429)."
    )
    max_queued_requests: int = Field(
        64, ge=-1, description="Calls that Serve's proxy holds beside those; more are refused; -1: never."
    )
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)


class LoggingConfig(Section):
    """What specray's own processes write to stderr, which Ray keeps in files."""

    format: Literal["text", "json"] = Field("text", description="json: one object a line.")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = Field(
        None, description="Default: what SPECRAY_LOG_LEVEL says, else INFO."
    )
    requests: bool = Field(
        True, description="One line for each request when it ends, at level INFO; never what was said in it."
    )
    terminal: bool = Field(
        False, description="`specray serve` shows what all processes write, behind a prefix by Ray."
    )


class TelemetryConfig(Section):
    """OpenTelemetry spans of a request's life."""

    traces: Literal["none", "otlp", "console"] = Field(
        "none",
        description="otlp: to a collector, over HTTP (needs specray[otlp]); console: to stderr, as JSON.",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Of the collector, with its path; default: what OpenTelemetry's variables say, else "
        "http://localhost:4318/v1/traces.",
    )
    sampling_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of the requests that come without a trace and get one."
    )
    service_name: str = Field("specray", min_length=1, max_length=128)
