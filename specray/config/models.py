"""Configuration of several models behind one address, and of the drafts that they share."""

from __future__ import annotations

import hashlib
import re
from typing import Annotated, Literal

from pydantic import Field, model_validator

from specray.config.endpoints import ChatConfig
from specray.config.engine import DraftConfig, TargetConfig
from specray.config.router import RouterConfig
from specray.config.section import Section
from specray.config.speculation import SpeculationConfig

NAME_PATTERN = r"^[A-Za-z0-9._/-]{1,96}$"
ModelName = Annotated[str, Field(pattern=NAME_PATTERN)]


class ModelDraftConfig(DraftConfig):
    """The draft of one of several models: its own, or a pool that others use, too."""

    pool: str | None = Field(
        None, pattern=NAME_PATTERN, description="Name of the draft in `drafts` that it shares; alone, then."
    )

    @model_validator(mode="after")
    def _check_pool(self) -> ModelDraftConfig:
        others = sorted(name for name in self.model_fields_set - {"pool"} if not self._is_default(name))
        if self.pool is not None and others:
            raise ValueError(f"draft.pool is {self.pool!r} with {others[0]}; allowed: pool alone")
        return self

    def _is_default(self, name: str) -> bool:
        return bool(
            getattr(self, name) == type(self).model_fields[name].get_default(call_default_factory=True)
        )


class PoolConfig(DraftConfig):
    """A draft that several models share, in an application of its own."""

    name: ModelName

    @model_validator(mode="after")
    def _check_adapters(self) -> PoolConfig:
        if self.adapters:
            raise ValueError(
                f"adapters is {self.adapters!r} for the draft {self.name!r} that models share, whose "
                "adapters of one name differ; allowed: in the draft of one model"
            )
        return self


class ModelConfig(Section):
    """One of several models: a pair with Routers of its own, in an application of its own."""

    name: ModelName = Field(description="Name in the API.")
    aliases: tuple[ModelName, ...] = Field((), description="Further names of it.")
    target: TargetConfig = Field(default_factory=TargetConfig)
    draft: ModelDraftConfig = Field(default_factory=ModelDraftConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    chat: ChatConfig = Field(default_factory=ChatConfig)
    load: Literal["start", "demand"] = Field(
        "start", description="start: with the service; demand: by the first request, or by a call."
    )
    keep_alive_s: float | None = Field(
        None, ge=0, description="Seconds without a request after which it is unloaded; default: it stays."
    )
    pinned: bool = Field(False, description="Whether it stays loaded where another needs its memory.")
    priority: int = Field(
        0,
        ge=-1_000_000,
        le=1_000_000,
        description="Urgency among models; lower is loaded earlier, and leaves later for another.",
    )
    required: bool | None = Field(
        None, description="Whether /ready waits for it; default: where it is loaded at the start."
    )
    memory_gib: float | None = Field(
        None, gt=0, description="GiB that it needs; default: by its files and caches, then as measured."
    )

    @property
    def is_required(self) -> bool:
        return self.load == "start" if self.required is None else self.required

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may ask for it, its own first."""
        return (self.name, *self.aliases)


class LoadingConfig(Section):
    """Loading of models while the service serves."""

    max_waiting: int = Field(
        64,
        ge=0,
        description="Maximum requests per Ingress that wait for a model to load; more are refused (503).",
    )
    max_wait_s: float = Field(300.0, gt=0, description="Maximum seconds that a request waits for a load.")
    memory_gib: float | Literal["auto"] = Field(
        "auto",
        description="GiB for all loaded models on CPUs; where a load needs more, the model that was used "
        "least recently is unloaded. auto: what the machine has; on GPUs Ray's resources decide.",
    )


def slug(name: str) -> str:
    """A model's name as a part of an application's: without marks, and unlike any other's."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return plain if plain == name else f"{plain[:40]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
