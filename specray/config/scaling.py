"""Configuration of autoscaling: numbers of draft and router replicas, and delays."""

from __future__ import annotations

from pydantic import Field, model_validator

from specray.config.section import Section


class ScalingConfig(Section):
    """Number of replicas of a deployment, by their measured load."""

    min_replicas: int = Field(1, ge=1, le=1024)
    max_replicas: int = Field(ge=1, le=1024)
    upscale_delay_s: float = Field(
        10.0, ge=0, description="Seconds of higher demand before replicas are added."
    )
    downscale_delay_s: float = Field(
        300.0, ge=0, description="Seconds of lower demand before replicas are removed."
    )
    look_back_s: float = Field(
        30.0, gt=10, le=3600, description="Seconds that load is averaged over; replicas measure every 10 s."
    )

    @model_validator(mode="after")
    def _check_range(self) -> ScalingConfig:
        if self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas is {self.max_replicas}; allowed: min_replicas = {self.min_replicas} or more"
            )
        return self


class DraftScalingConfig(ScalingConfig):
    """Number of draft replicas, by their busy share."""

    min_replicas: int = Field(
        1,
        ge=0,
        le=1024,
        description="0: no replica while no request speculates; plain decoding until one has started.",
    )
    target_busy_share: float = Field(
        0.6, gt=0, le=1, description="Busy share of a draft above which more drafts are started."
    )


class RouterScalingConfig(ScalingConfig):
    """Number of router replicas, each with a target, by waiting prompt tokens."""

    target_queued_tokens: int = Field(
        8192, ge=1, description="Waiting prompt tokens that justify one more replica."
    )
