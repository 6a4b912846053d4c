"""Sections of the configuration about what a service tells of itself. ``specray.config`` has the others."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Section(BaseModel):
    """A part of the configuration file: unknown keys are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


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
