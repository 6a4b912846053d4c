"""An arm of a comparison: a name, and what it changes of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specray.config import Config, parse_config

Changes = Mapping[str, Mapping[str, Any]]
"""Values by section and key of a configuration."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One of several ways to do the same work."""

    name: str
    changes: Changes = field(default_factory=dict)
    is_plain: bool = False
    """Plain decoding, with which the others are compared."""

    def config(self, config: Config) -> Config:
        """The configuration of the arm. Raises ConfigError."""
        return changed(config, self.changes)


def changed(config: Config, changes: Changes) -> Config:
    """The configuration with some keys changed. Raises ConfigError."""
    values = config.model_dump(mode="json")
    for section, keys in changes.items():
        values[section] |= keys
    return parse_config(values)


def without_cache(config: Config) -> Config:
    """Turns the prefix caches off: passes repeat prompts, and a cached prompt would be no prefill."""
    return changed(config, {role: {"prefix_cache": False} for role in ("target", "draft")})
