"""Configuration of the HTTP and gRPC endpoints, and of logs and traces."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from specray.config.section import Section


class HttpConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    max_body_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="Fields of a request that this API does not have: refuse: 400, since one may be "
        "misspelt; ignore: as if they were not there.",
    )
    images: Literal["auto", "refuse", "placeholder"] = Field(
        "auto",
        description="Images and files in messages, of which models read none here: refuse: 400; placeholder: "
        "one line of text says that they were there; auto: that in results of tools, 400 elsewhere.",
    )
    first_token_grace_s: float = Field(
        0.2,
        ge=0,
        le=600,
        description="Longest wait for a stream's first tokens before its headers leave: an error within it "
        "has an HTTP status of its own, a later one is an event.",
    )
    max_connections: int = Field(
        2048,
        ge=1,
        le=1_000_000,
        description="Maximum connections per Ingress that listens itself; the longest idle one is "
        "closed for a new one.",
    )
    allowed_hosts: tuple[str, ...] | None = Field(
        None,
        description="Names in the Host header that are answered beside loopback's, without port; '*': all. "
        "Default: where http.host is an address of this machine alone and no key is asked for, names "
        "without a dot; else all.",
    )
    cors_origins: tuple[str, ...] = Field(
        (),
        description="Origins whose web pages may call the API, such as https://chat.example.com; '*': all.",
    )
    trust_gateway: bool = Field(
        False,
        description="Take tenant, priority and wanted times from headers of a gateway, which every client "
        "can write: only where nobody else reaches the service.",
    )
    gateway_objectives: dict[str, int] = Field(
        default_factory=dict, description="Priority of each objective that a gateway names."
    )
    openapi: bool = Field(
        False, description="Serve the OpenAPI document at /openapi.json, and as a page at /docs."
    )
    lab: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Page /lab, which shows what speculation does with a prompt: auto: where http.host is "
        "an address of this machine alone.",
    )
    server: Literal["auto", "ingress", "proxy"] = Field(
        "auto",
        description="HTTP server: proxy: Serve's, on every node where it runs; ingress: each Ingress itself, "
        "for a fraction of the processor time; auto: ingress for `specray serve` with its own Ray, else "
        "proxy.",
    )


class ChatConfig(Section):
    """Chats, which a template turns into prompts."""

    allow_special_tokens: bool = Field(
        False,
        description="Let messages spell control tokens; else such text stays text, and cannot forge a turn.",
    )


class GrpcConfig(Section):
    host: str = "127.0.0.1"
    port: int = Field(9000, ge=0, le=65535, description="0: no gRPC endpoint.")
    max_message_bytes: int = Field(4 * 1024 * 1024, ge=1024)
    reflection: bool = Field(
        False, description="Describe the service to clients such as grpcurl, which need no protos then."
    )


class IngressConfig(Section):
    num_replicas: int = Field(1, ge=1, le=64)
    max_ongoing_requests: int = Field(
        1024, ge=1, description="Maximum running calls per replica; more are refused (429)."
    )
    max_queued_requests: int = Field(
        64, ge=-1, description="Maximum calls waiting in Serve's proxy; more are refused; -1: no limit."
    )
    excess_max_tokens: Literal["cut", "refuse"] = Field(
        "cut",
        description="max_tokens above what the context has left: cut: taken as a bound, usage and finish "
        "reason tell; refuse: 400.",
    )
    sampling_defaults: Literal["none", "model"] = Field(
        "none",
        description="Options that a request leaves out: none: the API's defaults; model: those of the "
        "target's generation_config.json, as in vLLM.",
    )
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)


class LoggingConfig(Section):
    """Logs that specray's own processes write to stderr, which Ray keeps in files."""

    format: Literal["text", "json"] = Field("text", description="json: one object per line.")
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = Field(
        None, description="Log level; default: SPECRAY_LOG_LEVEL, else INFO."
    )
    requests: bool = Field(
        True, description="Log one line per ended request, at level INFO, without prompt or output."
    )
    terminal: bool = Field(
        False, description="Let `specray serve` show the logs of all processes, with a prefix by Ray."
    )


class MetricsConfig(Section):
    """What /metrics shows."""

    vllm_names: bool = Field(
        True, description="Repeat counters under vLLM's names, for gateways and benchmarks that read them."
    )


class TelemetryConfig(Section):
    """OpenTelemetry spans of a request's life."""

    traces: Literal["none", "otlp", "console"] = Field(
        "none",
        description="otlp: export to a collector over HTTP (needs specray[otlp]); console: JSON to stderr.",
    )
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="URL of the collector, with its path; default: from OpenTelemetry's variables, else "
        "http://localhost:4318/v1/traces.",
    )
    sampling_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests without a trace context that are traced."
    )
    service_name: str = Field("specray", min_length=1, max_length=128)
