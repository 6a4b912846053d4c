"""How many replicas of drafts and routers run, and when that changes."""

from __future__ import annotations

from pydantic import Field, model_validator

from specray.config.section import Section


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
