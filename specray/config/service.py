"""Configuration of the whole service, one YAML file for command line, ``serve deploy`` and helm chart.

Unknown keys are errors. Everything has a default; an empty file serves the embedded pair.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from specray.config.router import RouterConfig
from specray.config.section import Section
from specray.config.speculation import SpeculationConfig
from specray.errors import ConfigError
from specray.types import DraftKind


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

    @model_validator(mode="after")
    def _check_drafter(self) -> Config:
        draft, drafter = self.draft, self.target.drafter
        if draft.enabled and draft.model in (DraftKind.FEATURES, REMOTE_FEATURES) and drafter is None:
            raise ValueError(
                f"draft.model is {draft.model!r} without target.drafter; allowed: both, or another model"
            )
        return self

    @property
    def model_name(self) -> str:
        """Name that clients send as ``model``."""
        if self.served_model_name is not None:
            return self.served_model_name
        return "specray-embedded" if self.target.model == EMBEDDED else Path(self.target.model).name


def prefer_drafter(values: dict[str, Any]) -> None:
    """Lets the target's drafter draft for all requests where no draft is named."""
    target, draft = values.get("target"), values.get("draft")
    if not isinstance(target, dict) or target.get("drafter") is None:
        return
    if draft is None:
        draft = values["draft"] = {}
    if isinstance(draft, dict) and draft.get("enabled", True):
        draft.setdefault("model", DraftKind.FEATURES.value)


def parse_config(values: dict[str, Any]) -> Config:
    """Validates a configuration given as nested dictionaries.

    Raises:
        ConfigError: names every wrong key, its value and what is allowed.
    """
    values = {name: dict(each) if isinstance(each, dict) else each for name, each in values.items()}
    prefer_drafter(values)
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
    is_secret = location[:1] == ("auth",) and (
        isinstance(value, (dict, list))
        or location[-1] in ("auth", "keys", "sha256")
        or location[-2:-1] == ("keys",)
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
    for role, key in (
        ("target", "model"),
        ("draft", "model"),
        ("target", "drafter"),
        ("target", "adapter"),
    ):
        _resolve_model(values.get(role), key, Path(path).parent)
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
