"""Configuration of the whole service, one YAML file for command line, ``serve deploy`` and helm chart.

Unknown keys are errors. Everything has a default; an empty file serves the embedded pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import Field, ValidationError, model_validator

from specray.config.access import AuthConfig, RpcConfig
from specray.config.endpoints import (
    ChatConfig,
    GrpcConfig,
    HttpConfig,
    IngressConfig,
    LoggingConfig,
    MetricsConfig,
    TelemetryConfig,
)
from specray.config.engine import (
    EMBEDDED,
    MTP,
    NO_CHECKPOINTS,
    REMOTE_FEATURES,
    DraftConfig,
    TargetConfig,
)
from specray.config.models import LoadingConfig, ModelConfig, PoolConfig
from specray.config.router import RouterConfig
from specray.config.section import Section
from specray.config.speculation import SpeculationConfig
from specray.errors import ConfigError
from specray.types import DraftKind

_REPLACED: Final = ("served_model_name", "target", "draft")
"""Sections of a service of one model, for which each of several has its own."""
DEFAULTS_OF_MODELS: Final = ("speculation", "router", "chat")
"""Sections of the service that are defaults for those of each model."""


class Config(Section):
    """Configuration of the whole service."""

    served_model_name: str | None = Field(
        None, min_length=1, description="Name in the API; default: the target's directory or hub name."
    )
    target: TargetConfig = Field(default_factory=TargetConfig)
    draft: DraftConfig = Field(default_factory=DraftConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    rpc: RpcConfig = Field(default_factory=RpcConfig)
    ingress: IngressConfig = Field(default_factory=IngressConfig)
    auth: AuthConfig = Field(default_factory=AuthConfig)
    http: HttpConfig = Field(default_factory=HttpConfig)
    chat: ChatConfig = Field(default_factory=ChatConfig)
    grpc: GrpcConfig = Field(default_factory=GrpcConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    models: tuple[ModelConfig, ...] = Field(
        (),
        description="Several models, in place of served_model_name, target and draft; speculation, router "
        "and chat beside it are defaults for each.",
    )
    drafts: tuple[PoolConfig, ...] = Field((), description="Drafts that several of `models` share.")
    default_model: str | None = Field(
        None, description="One of `models`, for requests that name none; default: the only one."
    )
    loading: LoadingConfig = Field(default_factory=LoadingConfig)

    @model_validator(mode="after")
    def _check_models(self) -> Config:
        if not self.models:
            for name in ("drafts", "default_model"):
                if getattr(self, name):
                    raise ValueError(f"{name} is set without models; allowed: together with models")
            return self
        for name in _REPLACED:
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} is set together with models; allowed: one of them")
        _check_unique("models", [name for each in self.models for name in each.names])
        _check_unique("drafts", [each.name for each in self.drafts])
        pools = [each.name for each in self.drafts]
        for model in self.models:
            if model.draft.pool is not None and model.draft.pool not in pools:
                raise ValueError(
                    f"models: draft.pool of {model.name!r} is {model.draft.pool!r}; "
                    f"allowed: {', '.join(pools) or 'none, since there are no drafts'}"
                )
            _check_drafter(model.target, model.draft)
        names = [name for each in self.models for name in each.names]
        if self.default_model is not None and self.default_model not in names:
            raise ValueError(f"default_model is {self.default_model!r}; allowed: {', '.join(names)}")
        own_names = [each.name for each in self.models]
        for key in self.auth.keys:
            for field, given in (("models", key.models or ()), ("model_quotas", key.model_quotas)):
                if unknown := [name for name in given if name not in own_names]:
                    raise ValueError(
                        f"auth.keys: {field} of {key.name!r} has {unknown[0]!r}; "
                        f"allowed: {', '.join(own_names)}"
                    )
        return self

    def of_model(self, name: str) -> Config:
        """The configuration of one of ``models`` as that of a service of it alone.

        Raises:
            KeyError: no model has this name; aliases are none.
        """
        model = {each.name: each for each in self.models}[name]
        draft: DraftConfig = model.draft
        if model.draft.pool is not None:
            draft = {each.name: each for each in self.drafts}[model.draft.pool]
        values = {key: value for key, value in draft if key in DraftConfig.model_fields}
        own = {
            "served_model_name": name,
            "target": model.target,
            "draft": DraftConfig.model_construct(**values),
            **{section: getattr(model, section) for section in DEFAULTS_OF_MODELS},
            "models": (),
            "drafts": (),
            "default_model": None,
        }
        return self.model_copy(update=own)

    def of_pool(self, name: str) -> Config:
        """The configuration of one of ``drafts``, as that of a service whose Draft it is. Raises KeyError."""
        pool = {each.name: each for each in self.drafts}[name]
        values = {key: value for key, value in pool if key in DraftConfig.model_fields}
        users = [each.target for each in self.models if each.draft.pool == name]
        own = {
            "target": users[0] if users else self.target,
            "draft": DraftConfig.model_construct(**values),
            "models": (),
            "drafts": (),
            "default_model": None,
        }
        return self.model_copy(update=own)

    @model_validator(mode="after")
    def _check_drafter(self) -> Config:
        _check_drafter(self.target, self.draft)
        return self

    @property
    def model_name(self) -> str:
        """Name that clients send as ``model``."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "specray-embedded" if self.target.model == EMBEDDED else Path(self.target.model).name


_PATHS: Final = (("target", "model"), ("draft", "model"), ("target", "drafter"), ("target", "adapter"))
"""Keys of a pair that may be paths."""


def prefer_drafter(values: dict[str, Any]) -> None:
    """Lets the target's drafter draft for all requests where no draft is named."""
    target, draft = values.get("target"), values.get("draft")
    if not isinstance(target, dict) or target.get("drafter") is None:
        return
    if draft is None:
        draft = values["draft"] = {}
    if isinstance(draft, dict) and draft.get("enabled", True):
        draft.setdefault("model", DraftKind.FEATURES.value)


def pairs(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The nested dictionaries that have a target and a draft: each of several models', or all."""
    models = values.get("models")
    if not models:
        yield values
    elif isinstance(models, (list, tuple)):
        yield from (model for model in models if isinstance(model, dict))


def _merge_defaults(values: dict[str, Any]) -> None:
    """Puts the service's own values under those of each model."""
    for model in pairs(values):
        if model is values:
            return
        for section in DEFAULTS_OF_MODELS:
            above, own = values.get(section), model.get(section)
            if isinstance(above, dict) and (own is None or isinstance(own, dict)):
                model[section] = {**above, **(own or {})}


def _check_drafter(target: TargetConfig, draft: DraftConfig) -> None:
    if draft.enabled and draft.model in (DraftKind.FEATURES, REMOTE_FEATURES) and target.drafter is None:
        raise ValueError(
            f"draft.model is {draft.model!r} without target.drafter; allowed: both, or another model"
        )


def _check_unique(field: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{field} have the name {name!r} twice; allowed: a name once, aliases too")


def parse_config(values: dict[str, Any]) -> Config:
    """Validates a configuration given as nested dictionaries.

    Raises:
        ConfigError: names every wrong key, its value and what is allowed.
    """
    values = {name: dict(each) if isinstance(each, dict) else each for name, each in values.items()}
    if isinstance(models := values.get("models"), (list, tuple)):
        values["models"] = deepcopy(list(models))
    _merge_defaults(values)
    for pair in pairs(values):
        prefer_drafter(pair)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, problem['loc'])) or 'configuration'}: {problem['msg']}"
            + _shown_input(problem["type"], problem["loc"], problem["input"])
            for problem in error.errors()
        ]
        raise ConfigError("; ".join(lines)) from None


def _shown_input(kind: str, location: tuple[int | str, ...], value: object) -> str:
    # A user may have written a key in place of its hash; keys must not get into logs.
    is_secret = not location or (
        location[:1] == ("auth",)
        and (
            isinstance(value, (dict, list))
            or location[-1] in ("auth", "keys", "sha256")
            or location[-2:-1] == ("keys",)
        )
    )
    return "" if kind == "extra_forbidden" or is_secret else f" (got {value!r})"


def load_config(path: str | Path) -> Config:
    """Reads and validates a YAML file. Raises ConfigError for a missing or wrong file."""
    return parse_config(read_config_file(path))


def read_config_file(path: str | Path) -> dict[str, Any]:
    """Reads the file's nested dictionaries without validation, so that options can be merged over them.

    Raises:
        ConfigError: the file is missing or is not a YAML mapping.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path} is not YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path} must hold a mapping, not a {type(values).__name__}")
    sections = [(pair.get(role), key) for pair in pairs(values) for role, key in _PATHS]
    drafts = values.get("drafts")
    sections += [(draft, "model") for draft in (drafts if isinstance(drafts, list) else ())]
    for section, key in sections:
        _resolve_model(section, key, Path(path).parent)
    return values


def _resolve_model(section: object, key: str, folder: Path) -> None:
    """A relative path of a directory or a GGUF file that is not here may be of one next to the file."""
    if not isinstance(section, dict) or not isinstance(model := section.get(key), str):
        return
    if model in NO_CHECKPOINTS or (key == "drafter" and model == MTP):
        return
    beside = folder / model
    if not Path(model).exists() and (beside.is_dir() or (beside.is_file() and beside.suffix == ".gguf")):
        section[key] = str((folder / model).absolute())
