"""Who may reach the service and its workers: API keys, certificates, secrets."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from specray.config.section import Section


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
