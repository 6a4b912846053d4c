"""Whether a target's bits depend on what else is in a step, and the refusal of targets that must not."""

from __future__ import annotations

from specray.config import EngineConfig, TargetConfig
from specray.engine.attention.select import Backend
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.linear import PlainGate, PlainLinear
from specray.engine.model.loader import LoadedModel
from specray.engine.step import Forward
from specray.errors import ConfigError


def instruction_set(loaded: LoadedModel) -> str:
    """Name of the instruction set of this process's matrix products; empty: they are not ours."""
    if loaded.device.type != "cpu":
        return ""
    try:
        from specray.engine.cpu.isa import fastest_isa
    except ImportError:
        return ""
    found = fastest_isa()
    return "" if found is None else str(found)


def why_not(
    config: EngineConfig, loaded: LoadedModel, forward: Forward, backend: Backend | None
) -> str | None:
    """Why a row's bits may depend on the other rows of its step; None: they do not."""
    if not isinstance(forward, DecoderForward):
        return f"forward is {forward.name!r}"
    if forward.cache_shape.state_bytes:
        return "the model has recurrent layers"
    if loaded.device.type != "cpu":
        return f"device is {loaded.device.type!r}"
    if not instruction_set(loaded):
        return "this processor has none of the instruction sets of our kernels, or numba is missing"
    for linear in forward.linears():
        if isinstance(linear, (PlainLinear, PlainGate)):
            return f"a layer of {linear.in_features} inputs runs with torch's operators"
    if backend is not None:
        return f"attention is {config.attention!r}, which runs with torch's operators on CPU"
    return None


def check(config: EngineConfig, loaded: LoadedModel, reason: str | None) -> None:
    """Raises ConfigError where the target must be deterministic and is not for ``reason``."""
    if isinstance(config, TargetConfig) and config.deterministic == "on" and reason is not None:
        raise ConfigError(
            f"target.deterministic is 'on' for model {loaded.name!r}, but {reason}; allowed here: 'off'"
        )
