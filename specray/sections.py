"""Sections of the configuration: who reaches a service and how, how its replicas are counted, what it tells.

``specray.config`` has the others.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of the configuration file: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ScalingConfig(Section):
    """How many replicas a deployment has, by what they measured of late."""

    min_replicas: int = Field(1, ge=1, le=1024)
    max_replicas: int = Field(ge=1, le=1024)
    upscale_delay_s: float = Field(10.0, ge=0, description="More are needed for so long: they are started.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Fewer do for so long: the others are ended.")
    look_back_s: float = Field(
        30.0, gt=10, le=3600, description="Averages of so long count; replicas measure every 10 s."
    )

    @model_validator(mode="after")
    def _check_range(self) -> ScalingConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; allowed: min_replicas = {self.min_replicas} or more"
            )
        return self


class DraftScalingConfig(ScalingConfig):
    """Draft replicas, by the share of the time that they compute."""

    min_replicas: int = Field(
        1,
        ge=0,
        le=1024,
        description="0: none while nobody speculates; until one has started, plain decoding.",
    )
    target_busy_share: float = Field(
        0.6, gt=0, le=1, description="Of a draft's time; more are started above, fewer do well below."
    )


class RouterScalingConfig(ScalingConfig):
    """Router replicas, each with a target, by the prompt tokens that wait."""

    target_queued_tokens: int = Field(
        8192, ge=1, description="So many waiting prompt tokens are the work of one more replica."
    )


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


class TlsConfig(Section):
    """Files in PEM, read again for every handshake. Both ends show a certificate that the CA has signed."""

    ca: str = Field(min_length=1, description="Certificates of the authorities that are trusted, no others.")
    cert: str = Field(min_length=1, description="This process's certificate, and what leads to the CA.")
    key: str = Field(min_length=1, description="The certificate's private key, not encrypted.")
    server_name: str | None = Field(
        None,
        min_length=1,
        description="Name that every worker's certificate carries; default: it carries the worker's address.",
    )


class RpcConfig(Section):
    """The streams between router, draft and target."""

    listen: Literal["loopback", "node"] = Field(
        "loopback", description="loopback: all on one machine; node: on the address of the worker's node."
    )
    tls: TlsConfig | None = Field(
        None, description="Mutual TLS on streams over TCP; unix sockets, within one machine, need none."
    )
    secret_file: str | None = Field(
        None,
        min_length=1,
        description="A file with a secret that workers ask for; for one machine, as it travels in the clear "
        "without tls.",
    )


class KeySpeculationConfig(Section):
    """What the requests of one key get of speculation, whatever they ask."""

    enabled: bool = Field(True, description="False: plain decoding.")
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=32,
        description="Most draft tokens per round, and what a request gets that asks for no number.",
    )


class KeyConfig(Section):
    """One API key. Of the key itself only a hash is here: `specray keys new` makes both."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="For people, and in refusals.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="Of the key, in hexadecimal.")
    tenant: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Takes the place of the tenant that a request names; default: the key's name.",
    )
    can_observe: bool = Field(
        False, description="May read /metrics and /debug/trace, which tell of all keys."
    )
    max_requests: int | None = Field(
        None,
        ge=1,
        description="At a time, at each Ingress and at each Router; each prompt and choice is one.",
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Prompt tokens of requests without an answer yet, for each Ingress replica and Router.",
    )
    min_priority: int = Field(
        0,
        ge=-1_000_000,
        le=1_000_000,
        description="The most urgent that its requests can be, whatever they ask; lower is served earlier.",
    )
    speculation: KeySpeculationConfig = Field(default_factory=KeySpeculationConfig)

    @property
    def tenant_name(self) -> str:
        return self.tenant or self.name


class AuthConfig(Section):
    """Who may call the HTTP and gRPC endpoints. Without keys, everybody who reaches them."""

    keys: tuple[KeyConfig, ...] = ()
    open_paths: tuple[Literal["/metrics", "/debug/trace", "/version"], ...] = Field(
        (), description="Answered without a key, as /health and /ready always are."
    )

    @model_validator(mode="after")
    def _check_unique(self) -> AuthConfig:
        for field in ("name", "sha256"):
            values = [getattr(key, field) for key in self.keys]
            repeated = {key.name for key in self.keys if values.count(getattr(key, field)) > 1}
            if repeated:
                raise ValueError(
                    f"keys have the same {field}: {', '.join(sorted(repeated))}; allowed: one key each"
                )
        return self


class IngressConfig(Section):
    num_replicas: int = Field(1, ge=1, le=64)
    max_ongoing_requests: int = Field(
        1024, ge=1, description="Calls in hand, for each replica; more are refused (429)."
    )
    max_queued_requests: int = Field(
        64, ge=-1, description="Calls that Serve's proxy holds beside those; more are refused; -1: never."
    )
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
