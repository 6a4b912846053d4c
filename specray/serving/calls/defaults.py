"""Sampling defaults that come with a model, in its generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specray.config import Config
from specray.errors import ConfigError
from specray.serving.validation import RANGES, GenerationOptions
from specray.tokenization.loading import read_generation_config

_FILE: Final = "generation_config.json"
_NAMES: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Names of options that are read, the same as vLLM reads; ``max_new_tokens`` beside them."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of options that a call leaves out."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    """Values by the names of options."""
    max_tokens: int | None = None
    """Output tokens of a call whose API has no default of its own; None: all that is left."""

    def apply(self, options: GenerationOptions) -> GenerationOptions:
        """Returns the options with what they leave out."""
        missing: dict[str, Any] = {
            name: value for name, value in self.sampling.items() if getattr(options, name) is None
        }
        if options.max_tokens is None and options.default_max_tokens is None:
            missing["default_max_tokens"] = self.max_tokens
        return replace(options, **missing) if missing else options


def load_defaults(config: Config) -> SamplingDefaults:
    """Returns the served model's defaults, or none where the configuration does not ask for them.

    Raises:
        ConfigError: a value is no number, or out of the range of requests.
    """
    if config.ingress.sampling_defaults != "model":
        return SamplingDefaults()
    values = read_generation_config(config.target.model)
    sampling = {name: _checked(name, values[name]) for name in _NAMES if values.get(name) is not None}
    max_tokens = values.get("max_new_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ConfigError(f"{_FILE}: max_new_tokens is {max_tokens!r}; allowed: 1 or more")
    return SamplingDefaults(sampling, max_tokens)


def _checked(name: str, value: object) -> float:
    allowed = RANGES[name]
    kinds = (int,) if name == "top_k" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not allowed.contains(value):
        raise ConfigError(f"{_FILE}: {name} is {value!r}; allowed: {allowed}")
    return value
