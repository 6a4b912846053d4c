"""Merges the options of the command line with a configuration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from specray.cli.models.checkpoints import choose_draft, choose_target, use_checkpoints
from specray.config import (
    EMBEDDED,
    MODEL_FREE_DRAFTS,
    REMOTE_FEATURES,
    Config,
    pairs,
    parse_config,
    prefer_drafter,
    read_config_file,
)
from specray.errors import ConfigError
from specray.models.catalogue import find_known, known_names

NO_DRAFT = "none"
_KEYS = {
    "target": ("target.model",),
    "draft": ("draft.model",),
    "drafter": ("target.drafter",),
    **{
        name: (f"target.{name}", f"draft.{name}")
        for name in ("dtype", "weights", "device", "max_model_len", "num_threads")
    },
    **{
        name: (f"speculation.{name}",)
        for name in ("num_speculative_tokens", "verification", "overlap", "tree")
    },
    "tensor_parallel_size": ("target.tensor_parallel_size",),
    "num_draft_replicas": ("draft.num_replicas",),
    "served_model_name": ("served_model_name",),
    "host": ("http.host", "grpc.host"),
    "port": ("http.port",),
    "grpc_port": ("grpc.port",),
}
"""Keys of the configuration that options of commands set, by the option's name."""


def build_config(
    path: Path | None,
    options: Mapping[str, object],
    assignments: Sequence[str] = (),
    *,
    chooses_target: bool = False,
) -> Config:
    """Reads the configuration file and applies options, then assignments.

    Known models and GGUF files become checkpoints, fetched and converted where need be.

    Args:
        path: the file; None starts from the defaults.
        options: values by dotted key; None leaves the key as it is.
        assignments: ``dotted.key=value`` with a YAML value, as ``--set`` takes them.
        chooses_target: a target that is not named is ``auto``, not the embedded one.

    Raises:
        ConfigError: a key or a value is wrong, or a model cannot be had; names each, and what is allowed.
    """
    values = {} if path is None else read_config_file(path)
    for key, value in options.items():
        if value is not None:
            _assign(values, key, value)
    _assign_all(values, assignments)
    if chooses_target and not values.get("models"):
        choose_target(values)
    chosen = list[tuple[dict[str, Any], bool]]()
    for pair in pairs(values):
        prefer_drafter(pair)
        chosen.append((pair, choose_draft(pair)))
        _check_pair(pair)
    # Whatever is wrong is said before anything is fetched.
    parse_config(values)
    for pair, has_chosen_draft in chosen:
        use_checkpoints(pair, has_chosen_draft=has_chosen_draft)
    for pool in values.get("drafts") or ():
        use_checkpoints({"name": "", "draft": pool}, has_chosen_draft=False)
    return parse_config(values)


def several_models(names: Sequence[str]) -> list[dict[str, Any]]:
    """The configuration's ``models`` for what a user calls them; each gets the name of its files."""
    models = list[dict[str, Any]]()
    for name in names:
        called = Path(name).stem if Path(name).suffix == ".gguf" else Path(name).name
        models.append({"name": called or name, "target": {"model": name}})
    return models


def changed_config(values: dict[str, Any], assignments: Sequence[str]) -> Config:
    """A whole configuration with assignments applied; ``values`` stays as it is. Raises ConfigError."""
    values = deepcopy(values)
    _assign_all(values, assignments)
    return parse_config(values)


def pair_options(**options: str | int | None) -> dict[str, object]:
    """Translates options of commands to dotted keys of the configuration, each by its name."""
    values: dict[str, object] = {key: options.get(name) for name, keys in _KEYS.items() for key in keys}
    values["draft.enabled"] = None
    if options.get("draft") == NO_DRAFT:
        values |= {"draft.model": None, "draft.enabled": False}
    count = options.get("num_speculative_tokens")
    if isinstance(count, str) and count.isdecimal():
        values["speculation.num_speculative_tokens"] = int(count)
    assert options.keys() <= _KEYS.keys(), options
    return values


def _parse_assignment(assignment: str) -> tuple[str, object]:
    key, separator, text = assignment.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set is {assignment!r}; allowed: dotted.key=value")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {key}: the value is not YAML: {error}") from None


def _assign_all(values: dict[str, Any], assignments: Sequence[str]) -> None:
    for assignment in assignments:
        key, value = _parse_assignment(assignment)
        _assign(values, key, value)


def _assign(values: dict[str, Any], key: str, value: object) -> None:
    given = key
    if key.startswith("models."):
        values, key = _model_named(values.get("models"), key.removeprefix("models."))
    *sections, name = key.split(".")
    for section in sections:
        inner = values.setdefault(section, {})
        if inner is None:
            inner = values[section] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{given}: {section} is {inner!r}; allowed: a mapping")
        values = inner
    values[name] = value


def _model_named(models: object, key: str) -> tuple[dict[str, Any], str]:
    """The entry whose name, which may have dots, begins the key, and the rest of the key."""
    entries = models if isinstance(models, list) else []
    named = {str(model.get("name")): model for model in entries if isinstance(model, dict)}
    name = max((name for name in named if key.startswith(f"{name}.")), key=len, default=None)
    if name is None:
        names = ", ".join(named) or "none"
        raise ConfigError(f"models.{key} names no model; allowed: models.NAME.KEY of {names}")
    return named[name], key.removeprefix(f"{name}.")


def _check_pair(values: Mapping[str, Any]) -> None:
    """Refuses a pair that cannot work, before anything is loaded: the embedded draft fits its target only."""
    target, draft = values.get("target") or {}, values.get("draft") or {}
    if not isinstance(target, dict) or not isinstance(draft, dict):
        return
    if draft.get("enabled", True):
        _check_draft_name(draft.get("model", EMBEDDED))
    is_own_target = target.get("model", EMBEDDED) != EMBEDDED
    has_draft = "model" in draft or draft.get("pool") is not None
    if is_own_target and draft.get("enabled", True) and not has_draft:
        raise ConfigError(
            f"draft.model is not set for the target {target['model']}; "
            "allowed: a model with the target's tokenizer (--draft PATH), or no draft (--draft none)"
        )


def _check_draft_name(name: object) -> None:
    """Refuses a single word that is neither a path nor a known name: hub ids have an owner."""
    if not isinstance(name, str) or "/" in name or Path(name).exists() or find_known(name) is not None:
        return
    known = (EMBEDDED, *MODEL_FREE_DRAFTS, REMOTE_FEATURES)
    if name not in known:
        raise ConfigError(
            f"draft.model is {name!r}, which is no directory; allowed: {', '.join(known)}, the path or hub id"
            f" (owner/name) of a model, a known one ({known_names()}), or no draft (--draft none)"
        )
