"""Whether a target's bits depend on what else is in a step, and the refusal of targets that must not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from specray.config import EngineConfig, TargetConfig
from specray.engine.attention.select import Backend, Model, choose_backend, fixed_backend
from specray.engine.group.parallel import ParallelContext
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.layers.experts.layer import ExpertLayer
from specray.engine.model.layers.experts.shared_mlp import WithSharedMlp
from specray.engine.model.linear import PlainLinear, Weights
from specray.engine.model.loader import DecoderSource, LoadedModel
from specray.engine.model.lowering import head_shape
from specray.engine.runner.memory import DrafterMemory
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
    if forward.is_recurrent:
        return "the model has recurrent layers"
    if loaded.device.type != "cpu":
        return _why_not_on_a_gpu(config, forward, backend)
    if not instruction_set(loaded):
        return "this processor has none of the instruction sets of our kernels, or numba is missing"
    for linear in _linears(forward):
        if isinstance(linear, PlainLinear):
            return _torch_reason(linear)
    if any(not each.experts.is_fixed for each in _mixtures(forward)):
        return "its experts run with torch's operators"
    if backend is not None:
        return f"attention is {config.attention!r}, which runs with torch's operators on CPU"
    return None


def is_wanted(config: EngineConfig) -> bool:
    return isinstance(config, TargetConfig) and config.deterministic == "on"


def is_fixed(config: EngineConfig, device: torch.device) -> bool:
    """Whether tiles, parts and orders of sums are the same in every step, since a device is slower so."""
    return device.type != "cpu" and is_wanted(config)


def chosen_backend(config: EngineConfig, model: Model) -> Backend:
    """How to attend. Raises ConfigError: what was asked for does not work here, or its bits would differ."""
    if not is_fixed(config, model.device):
        return choose_backend(config.attention, model, config.block_size)
    if config.attention not in ("auto", "triton"):
        raise ConfigError(
            f"attention is {config.attention!r} with target.deterministic 'on'; allowed with it on CUDA: "
            "'auto' or 'triton'"
        )
    return fixed_backend(model, config.block_size)


def with_parts(
    left: DrafterMemory,
    config: EngineConfig,
    loaded: LoadedModel,
    parallel: ParallelContext | None,
    backend: Backend | None,
) -> DrafterMemory:
    """What is to be left for others and for parts of attention, which a longer context has more of."""
    if backend is None or not isinstance(loaded.source, DecoderSource):
        return left
    heads = head_shape(loaded.source.config, parallel)
    parts = backend.part_bytes(heads, loaded.max_model_len, config.max_num_batched_tokens)
    return left._replace(step_bytes=left.step_bytes + parts)


def _why_not_on_a_gpu(config: EngineConfig, forward: DecoderForward, backend: Backend | None) -> str | None:
    """There what has the property is slower, and is taken where it is asked for."""
    if not is_wanted(config):
        return "target.deterministic is 'off'"
    if backend is None or not backend.fixed_part:
        return f"attention is {config.attention!r}, whose parts depend on the step"
    for linear in _linears(forward):
        rule = getattr(linear, "rule", None)
        if rule is None or not rule.is_fixed:
            return _torch_reason(linear)
    if any(not each.experts.is_fixed for each in _mixtures(forward)):
        return "its experts run with torch's operators"
    return None


def _mixtures(forward: DecoderForward) -> Iterator[ExpertLayer]:
    for layer in forward.layers:
        if layer.routed is not None:
            yield layer.routed


def _linears(forward: DecoderForward) -> Iterator[object]:
    """All linear layers but those of experts that are chosen, whatever is around them."""
    kinds: list[object] = [*forward.linears(), *(each.router for each in _mixtures(forward))]
    for each in _mixtures(forward):
        kinds += [] if each.latent is None else [each.latent.down, each.latent.up]
    for layer in forward.layers:
        if isinstance(layer.gate, WithSharedMlp):
            kinds += [layer.gate.shared.gate, layer.gate.shared.down, layer.gate.gate]
    for kind in kinds:
        # A router, and a gate that torch joins, have a layer.
        inner = getattr(kind, "linear", None)
        if kind is not None:
            yield inner if isinstance(inner, Weights) else kind


def _torch_reason(linear: object) -> str:
    return f"a layer of {getattr(linear, 'in_features', 0)} inputs runs with torch's operators"


def check(config: EngineConfig, loaded: LoadedModel, reason: str | None) -> None:
    """Raises ConfigError where the target must be deterministic and is not for ``reason``."""
    if is_wanted(config) and reason is not None:
        raise ConfigError(
            f"target.deterministic is 'on' for model {loaded.name!r}, but {reason}; allowed here: 'off'"
        )
