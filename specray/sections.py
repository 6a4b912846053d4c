"""Sections of the configuration: what a service tells of itself, and how its replicas are counted.

``specray.config`` has the others.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of the configuration file: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ScalingConfig(Section):
    """How many replicas a deployment has, by measurements of the last half minute."""

    min_replicas: int = Field(1, ge=1, le=1024)
    max_replicas: int = Field(ge=1, le=1024)
    upscale_delay_s: float = Field(10.0, ge=0, description="More are needed for so long: they are started.")
    downscale_delay_s: float = Field(300.0, ge=0, description="Fewer do for so long: the others are ended.")

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

    traces: Literal["off", "otlp", "console"] = Field(
        "off",
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
