"""The router's queues, budgets and deadlines."""

from __future__ import annotations

from pydantic import Field

from specray.config.scaling import RouterScalingConfig
from specray.config.section import Section


class RouterConfig(Section):
    """Queues, budgets and deadlines."""

    num_replicas: int = Field(1, ge=1, le=1024, description="Each with a target of its own.")
    autoscaling: RouterScalingConfig | None = Field(
        None, description="In place of num_replicas: as many as the waiting prompt tokens ask for."
    )
    max_queued_requests: int = Field(256, ge=0, description="Waiting requests; more are refused (429).")
    max_queued_tokens: int = Field(262_144, ge=1, description="Prompt tokens of waiting requests.")
    prefill_chunk_tokens: int = Field(512, ge=16, description="Most prompt tokens of one Verify.")
    max_prefill_slowdown: float = Field(
        3.0,
        ge=1,
        description="A step that running sessions share with prompts takes at most so many times as long as "
        "without. But 16 prompt tokens always go along, and whole pieces while a quarter of all wait.",
    )
    round_timeout_s: float = Field(5.0, gt=0, description="A draft that is silent for so long is lost.")
    verify_timeout_s: float = Field(
        60.0, gt=0, description="A target that is silent for so long is lost: its ranks are started anew."
    )
    request_timeout_s: float = Field(600.0, gt=0, description="From arrival to the last token.")
    stream_interval_ms: float = Field(20.0, ge=0, description="At most one chunk of a stream per interval.")
    start_timeout_s: float = Field(600.0, gt=0, description="For loading models and connecting workers.")
    drain_timeout_s: float = Field(
        20.0,
        ge=0,
        description="What ends finishes its requests for so long: a Router, whose others go to the next one, "
        "and an Ingress, whose others have to be sent again.",
    )
    trace_events: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Decisions and messages kept for /debug/trace and `specray bench trace`, about five a "
        "round and request; 0: none.",
    )
