"""Which keys of the configuration change while a service serves, and the refusal of the others.

A replica starts with a whole configuration and gets *live values* later: the same sections with live keys
only. Serve brings them as ``user_config``, ``specray reload`` without Serve's controller.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from specray.config.service import DEFAULTS_OF_MODELS, Config, parse_config
from specray.errors import ConfigError

Values = dict[str, Any]
"""Nested dictionaries of a configuration or a part of it."""

LIVE_KEYS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "speculation": (
            "num_speculative_tokens",
            "verification",
            "overlap",
            "tree",
            "fallback",
            "lookahead",
            "past_output_tokens",
        ),
        "router": (
            "max_queued_requests",
            "max_queued_tokens",
            "prefill_chunk_tokens",
            "max_prefill_slowdown",
            "stream_interval_ms",
            "slo",
        ),
        "ingress": ("excess_max_tokens",),
        "auth": ("keys", "open_paths"),
        "http": ("max_body_bytes", "unknown_fields", "images", "first_token_grace_s"),
        "chat": ("allow_special_tokens",),
        "logging": ("format", "level", "requests"),
    }
)
"""Names of the keys that change while serving, by section; of several models, those in sections of theirs."""

STATIC_REASONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "served_model_name": "clients and metrics know the model by it",
        "target": "the target is loaded and placed by it",
        "draft": "drafts are loaded and placed by it, see user_config of Draft for another draft model",
        "speculation.max_num_draft_probs": "drafts are loaded with it",
        "router.num_replicas": "Serve holds the number of replicas",
        "router.routing": "Serve holds who chooses a Router",
        "router.autoscaling": "Serve holds the number of replicas",
        "router.round_timeout_s": "drafts judge by it whether they hang",
        "router.verify_timeout_s": "the ranks of a target wait for each other by it",
        "router.request_timeout_s": "Serve's proxy ends requests by it",
        "router.start_timeout_s": "only a start needs it",
        "router.drain_timeout_s": "Serve ends replicas by it",
        "router.trace_events": "the trace is allocated at the start",
        "rpc": "streams between the engines are opened with it",
        "ingress.num_replicas": "Serve holds the number of replicas",
        "ingress.max_ongoing_requests": "Serve's own limit of calls is the same number",
        "ingress.max_queued_requests": "Serve's proxy holds the calls that wait",
        "ingress.sampling_defaults": "the model's file is read at the start",
        "ingress.ray_actor_options": "Ray places the replica by it",
        "http.host": "the server listens there",
        "http.port": "the server listens there",
        "http.max_connections": "the server is started with it",
        "http.allowed_hosts": "the application is built with it",
        "http.cors_origins": "the application is built with it",
        "http.trust_gateway": "the application is built with it",
        "http.gateway_objectives": "the application is built with it",
        "http.openapi": "the application is built with it",
        "http.lab": "the application is built with it",
        "http.server": "the server is chosen at the start",
        "grpc": "the gRPC server is started with it",
        "logging.terminal": "Ray is started with it",
        "metrics": "the application is built with it",
        "models": "each model is an application of its own",
        "drafts": "each draft is an application of its own",
        "default_model": "each Ingress is started with it",
        "loading": "the owner of models is started with it",
        "telemetry": "the exporter of spans is started with it",
    }
)
"""Why a key, or a whole section, changes only with a new start."""


@dataclass(frozen=True, slots=True)
class KeyChange:
    """A key whose value differs between two configurations."""

    key: str
    """Dotted name: ``router.max_queued_requests``."""
    old: object
    new: object
    model: str = ""
    """Name of the one of several models that has the key; empty: the service."""

    @property
    def is_live(self) -> bool:
        section, _, name = self.key.partition(".")
        return name.partition(".")[0] in LIVE_KEYS.get(section, ())

    def __str__(self) -> str:
        owner = f"models.{self.model}." if self.model else ""
        return f"{owner}{self.key}: {shown(self.key, self.old)} -> {shown(self.key, self.new)}"


def shown(key: str, value: object) -> str:
    """A value for people. Of API keys only the names, and enough digits that a rotation shows."""
    if key == "auth.keys" and isinstance(value, Sequence):
        return ", ".join(f"{entry['name']} ({entry['sha256'][:8]})" for entry in value) or "none"
    return json.dumps(value, ensure_ascii=False)


def split(config: Config) -> tuple[Values, Values]:
    """The configuration as static values and live values; together they are all of it."""
    static: Values = config.model_dump(mode="json")
    live = _pop_live(static, LIVE_KEYS)
    if config.models:
        live["models"] = {each["name"]: _pop_live(each, DEFAULTS_OF_MODELS) for each in static["models"]}
    return static, live


def _pop_live(values: Values, sections: Iterable[str]) -> Values:
    return {section: {name: values[section].pop(name) for name in LIVE_KEYS[section]} for section in sections}


def with_live(config: Config, values: Mapping[str, Any]) -> Config:
    """The configuration with some live values changed.

    Raises:
        ConfigError: a key is unknown or not live, or a value is not allowed.
    """
    merged: Values = config.model_dump(mode="json")
    of_service = dict(values)
    models = {each["name"]: each for each in merged["models"]}
    given_models = of_service.pop("models", {}) if models else {}
    _lay_over(merged, of_service, LIVE_KEYS)
    if not isinstance(given_models, Mapping) or not given_models.keys() <= models.keys():
        raise ConfigError(f"models is {given_models!r}; allowed: a mapping of {', '.join(models)}")
    for name, given in given_models.items():
        _lay_over(models[name], given, DEFAULTS_OF_MODELS)
    return parse_config(merged)


def _lay_over(values: Values, live: Mapping[str, Any], sections: Collection[str]) -> None:
    for section, given in live.items():
        if section not in sections:
            raise _not_live(section, given)
        if not isinstance(given, Mapping):
            raise ConfigError(f"{section} is {given!r}; allowed: a mapping of keys that change while serving")
        for name, value in given.items():
            if name not in LIVE_KEYS[section]:
                raise _not_live(f"{section}.{name}", value)
        values[section] = {**values[section], **given}


def changes(old: Config, new: Config) -> list[KeyChange]:
    before, after = old.model_dump(mode="json"), new.model_dump(mode="json")
    found = list[KeyChange]()
    if [each.names for each in old.models] == [each.names for each in new.models]:
        for model, now in zip(before.pop("models"), after.pop("models"), strict=True):
            found += [replace(each, model=model["name"]) for each in _differences(model, now, "")]
    return [*_differences(before, after, ""), *found]


def check_live(found: Sequence[KeyChange]) -> None:
    """Raises ConfigError, on one line, if a change is not live: all fields with both values, and why."""
    refused = [change for change in found if not change.is_live]
    if refused:
        told = "; ".join(f"{change} ({_reason(change.key)})" for change in refused)
        is_one = len(refused) == 1
        raise ConfigError(
            f"{told}; {'this changes' if is_one else 'these change'} only with a new start of the service"
        )


def digest(values: Mapping[str, Any]) -> str:
    """Fingerprint of live values, by which a replica confirms them without showing any."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Served:
    """What a service says of its configuration."""

    values: Values
    """The whole configuration in force."""
    store: str | None
    """Key of the live values that are kept for replicas that start; None: Serve alone brings them."""
    deployments: tuple[str, ...]


class LiveConfig:
    """The configuration in force in one process. It is swapped as a whole, between two steps of its loop.

    What reads it when a request comes sees one configuration; others register with ``listen``.
    """

    def __init__(self, config: Config) -> None:
        self._start = config
        self._now = config
        self._listeners: list[Callable[[Config], None]] = []

    @classmethod
    def of(cls, config: Config | LiveConfig) -> LiveConfig:
        """The holder itself, or one of a configuration that does not change."""
        return config if isinstance(config, LiveConfig) else cls(config)

    @property
    def now(self) -> Config:
        return self._now

    @property
    def digest(self) -> str:
        return digest(split(self._now)[1])

    def listen(self, listener: Callable[[Config], None]) -> None:
        """``listener`` receives every later change, in the order of registration."""
        self._listeners.append(listener)

    def check(self, values: Mapping[str, Any]) -> Config:
        """The configuration that ``values`` would bring into force. Raises what ``with_live`` raises."""
        return with_live(self._start, values)

    def set(self, values: Mapping[str, Any]) -> list[KeyChange]:
        """Brings live values into force; returns the changes. ConfigError: one is wrong, all stay."""
        new = self.check(values)
        found = changes(self._now, new)
        if found:
            self._now = new
            for listener in self._listeners:
                listener(new)
        return found


def _not_live(key: str, value: object) -> ConfigError:
    section, _, name = key.partition(".")
    sections = Config.model_fields
    known = sections.get(section)
    kind = None if known is None else known.annotation
    if known is None or (name and name not in getattr(kind, "model_fields", {})):
        allowed = ", ".join(LIVE_KEYS.get(section, LIVE_KEYS))
        return ConfigError(f"{key} is no key of the configuration; allowed here: {allowed}")
    value_text = "" if section == "auth" else f" is {json.dumps(value, default=str)} and"
    return ConfigError(
        f"{key}{value_text} does not change while serving ({_reason(key)}); write it under args"
    )


def _reason(key: str) -> str:
    while key not in STATIC_REASONS and "." in key:
        key = key.rpartition(".")[0]
    return STATIC_REASONS.get(key, "it is a part of the start")


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str) -> Iterator[KeyChange]:
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _differences(before, after, f"{prefix}{name}.")
        else:
            yield KeyChange(prefix + name, before, after)
