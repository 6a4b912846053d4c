"""Configuration of access to the service and its workers: API keys, certificates, secrets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from specray.config.section import Section


class TlsConfig(Section):
    """PEM files, read again for every handshake. Both ends show a certificate signed by the CA."""

    ca: str = Field(min_length=1, description="Certificates of the only trusted authorities.")
    cert: str = Field(min_length=1, description="This process's certificate, with its chain to the CA.")
    key: str = Field(min_length=1, description="The certificate's private key, not encrypted.")
    server_name: str | None = Field(
        None,
        min_length=1,
        description="Name in every worker's certificate; default: the worker's address.",
    )


class RpcConfig(Section):
    """Streams between router, draft and target."""

    listen: Literal["loopback", "node"] = Field(
        "loopback", description="loopback: everything on one machine; node: the address of the worker's node."
    )
    tls: TlsConfig | None = Field(
        None, description="Mutual TLS on TCP streams; unix sockets, within one machine, need none."
    )
    secret_file: str | None = Field(
        None,
        min_length=1,
        description="File with a secret that workers require. Use it on one machine only unless tls is set, "
        "since it is sent in clear text.",
    )
    allow_insecure: bool = Field(
        False,
        description="True: listen: node needs neither tls nor secret_file; whoever reaches the nodes' ports "
        "can read prompts and outputs and use the engines.",
    )

    @model_validator(mode="after")
    def _check_protection(self) -> RpcConfig:
        if self.listen == "node" and not (self.tls or self.secret_file or self.allow_insecure):
            raise ValueError(
                "listen is 'node' without tls and secret_file: whoever reaches the nodes' ports can use the "
                "engines; allowed: with one of them, or with allow_insecure: true in a network of its own"
            )
        return self


class KeySpeculationConfig(Section):
    """Speculation settings that override those in requests of one key."""

    enabled: bool = Field(True, description="False: plain decoding.")
    num_speculative_tokens: int | None = Field(
        None,
        ge=0,
        le=32,
        description="Maximum draft tokens per round, and the number for requests that name none.",
    )


class ServiceLevelConfig(Section):
    """Times that requests of one key, or to one model, want kept."""

    ttft_ms: float | None = Field(None, gt=0, le=86_400_000, description="Milliseconds to the first token.")
    itl_ms: float | None = Field(
        None, gt=0, le=86_400_000, description="Milliseconds per output token after the first, on average."
    )


class ModelQuotaConfig(Section):
    """What one key may have in hand of one of several models."""

    max_requests: int | None = Field(
        None, ge=1, description="Maximum concurrent requests to the model, per Ingress and per Router."
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum prompt tokens of unanswered requests to the model, per Ingress and per Router.",
    )


class KeyConfig(Section):
    """One API key, stored as a hash; `specray keys new` makes both."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Name in messages to people.")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key, in hexadecimal.")
    tenant: str | None = Field(
        None,
        min_length=1,
        max_length=64,
        description="Tenant in place of the one that a request names; default: the key's name.",
    )
    can_observe: bool = Field(
        False, description="Whether it may read /metrics and /debug/trace, which cover all keys."
    )
    can_manage: bool = Field(
        False, description="Whether it may change what is served: load and unload models and adapters."
    )
    models: tuple[str, ...] | None = Field(
        None, min_length=1, description="Names of the only models that it may ask for; default: all."
    )
    max_requests: int | None = Field(
        None,
        ge=1,
        description="Maximum concurrent requests per Ingress and per Router; each prompt and choice counts.",
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="Maximum prompt tokens of unanswered requests, per Ingress replica and per Router.",
    )
    model_quotas: dict[str, ModelQuotaConfig] = Field(
        {}, description="Limits for single models by their names, beside those for all of them together."
    )
    min_priority: int = Field(
        0,
        ge=-1_000_000,
        le=1_000_000,
        description="Most urgent priority that its requests can get; lower is served earlier.",
    )
    speculation: KeySpeculationConfig = Field(default_factory=KeySpeculationConfig)
    slo: ServiceLevelConfig = Field(default_factory=ServiceLevelConfig)

    @property
    def tenant_name(self) -> str:
        return self.tenant or self.name


class AuthConfig(Section):
    """API keys of the HTTP and gRPC endpoints. Without keys, everyone who reaches them may call."""

    keys: tuple[KeyConfig, ...] = ()
    open_paths: tuple[Literal["/metrics", "/debug/trace", "/version", "/ping", "/lab"], ...] = Field(
        (), description="Paths answered without a key, as /health and /ready always are; /lab with its files."
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
