"""The engine that a benchmark of a single model builds, and its options."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from specray.cli import options

if TYPE_CHECKING:
    from specray.config import Config


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model, and how its engine computes."""

    model: options.Model = "embedded"
    dtype: options.Dtype = "bfloat16"
    device: options.Device = "auto"
    num_threads: options.NumThreads = None

    def config(self, role: options.EngineRole, **others: object) -> Config:
        """The configuration of the role's engine, with other keys of its section. Raises ConfigError."""
        from specray.cli.settings import build_config

        values = {f"{role}.{key}": value for key, value in {**asdict(self), **others}.items()}
        if role is options.EngineRole.TARGET:
            values["draft.enabled"] = False
        return build_config(None, values)

    def title(self, role: options.EngineRole) -> str:
        return f"{role} {self.model}, {self.dtype}"
