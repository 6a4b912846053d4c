"""Configuration of the router: queues, budgets and deadlines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specray.config.access import ServiceLevelConfig
from specray.config.scaling import RouterScalingConfig
from specray.config.section import Section

Routing = Literal["prefix", "load"]


class RouterConfig(Section):
    """Queues, budgets and deadlines of the router."""

    num_replicas: int = Field(1, ge=1, le=1024, description="Number of routers, each with its own target.")
    autoscaling: RouterScalingConfig | None = Field(
        None, description="Number of replicas by waiting prompt tokens, in place of num_replicas."
    )
    routing: Routing = Field(
        "prefix",
        description="Choice between several routers: `prefix` sends a request where it is answered soonest, "
        "by what caches hold and by load; `load` by running requests alone.",
    )
    max_queued_requests: int = Field(
        256, ge=0, description="Maximum waiting requests; more are refused (429)."
    )
    max_queued_tokens: int = Field(262_144, ge=1, description="Maximum prompt tokens of waiting requests.")
    prefill_chunk_tokens: int = Field(512, ge=16, description="Maximum prompt tokens of one Verify.")
    max_prefill_slowdown: float = Field(
        3.0,
        ge=1,
        description="Maximum factor by which prompts may lengthen a step of running sessions. At least 16 "
        "prompt tokens always join, and whole chunks while a quarter of all sessions wait.",
    )
    slo: ServiceLevelConfig = Field(
        default_factory=ServiceLevelConfig,
        description="Times for requests that name none, and whose key has none.",
    )
    round_timeout_s: float = Field(
        5.0, gt=0, description="Seconds after which a silent draft counts as lost."
    )
    verify_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Seconds after which a silent target counts as lost and its ranks are restarted.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Maximum seconds from arrival to the last token."
    )
    stream_interval_ms: float = Field(
        20.0, ge=0, description="Minimum milliseconds between chunks of a stream."
    )
    start_timeout_s: float = Field(
        600.0, gt=0, description="Maximum seconds to load models and connect workers."
    )
    drain_timeout_s: float = Field(
        20.0,
        ge=0,
        description="Seconds that a stopping Router or Ingress still finishes its requests. A Router's "
        "remaining ones continue in another Router, an Ingress's must be sent again.",
    )
    trace_events: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Maximum events kept for /debug/trace and `specray bench trace`, about five per round of "
        "a request; 0: none.",
    )
