"""The engine that a benchmark of a single model builds, from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specray.cli.options import EngineRole

if TYPE_CHECKING:
    from specray.config import EngineConfig


def engine_of(role: EngineRole, **values: object) -> EngineConfig:
    """The settings of the draft or the target, with these values. Raises ConfigError."""
    from specray.cli.settings import build_config

    other: dict[str, object] = {"draft.enabled": False} if role is EngineRole.TARGET else {}
    config = build_config(None, {f"{role}.{key}": value for key, value in values.items()} | other)
    return config.draft if role is EngineRole.DRAFT else config.target
