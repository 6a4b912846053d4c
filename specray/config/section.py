"""Base class of configuration sections: checked, frozen values, without unknown keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration file: unknown keys are errors, values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
