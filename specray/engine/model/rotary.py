"""Rotary frequencies and the tables of cosines and sines that the decoder rotates with.

The order of operations is that of transformers, so that the tables are equal to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specray.engine.model.decoder_config import (
    DecoderConfig,
    FactorScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeFormula,
)

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``[max_model_len, head_dim]`` in float32; the halves of ``head_dim`` are equal."""


@dataclass(frozen=True, slots=True)
class RotaryTables:
    """The tables of all layers."""

    kinds: tuple[Tables, ...]
    of_layers: tuple[int, ...]
    """Index of each layer's tables."""


def tables_of_layers(config: DecoderConfig, max_model_len: int, device: torch.device) -> RotaryTables:
    """The tables of a model, each once."""
    ropes = [config.ropes[layer] for layer in config.attention_layers]
    kinds = list(dict.fromkeys(ropes))
    made = (_tables(rope, config, max_model_len, device) for rope in kinds)
    return RotaryTables(tuple(made), tuple(kinds.index(rope) for rope in ropes))


def cos_sin(config: DecoderConfig, max_model_len: int, device: torch.device) -> Tables:
    return _tables(config.rope, config, max_model_len, device)


def rotated_first(config: DecoderConfig) -> torch.Tensor | None:
    """Permutation of a head's numbers that puts pairs rotated together half a head apart.

    A model that rotates the first numbers of a head has pairs half of these apart, or neighbours. The dot
    product does not depend on the order. None: they lie so already.
    """
    size, rotated = config.head_dim, config.rotary_dim or config.head_dim
    if rotated == size and not config.has_neighbour_pairs:
        return None
    half, others = rotated // 2, torch.arange(rotated, size)
    middle = size // 2 - half
    step, second = (2, 1) if config.has_neighbour_pairs else (1, half)
    firsts = step * torch.arange(half)
    return torch.cat((firsts, others[:middle], firsts + second, others[middle:]))


def _tables(rope: Rope | None, config: DecoderConfig, max_model_len: int, device: torch.device) -> Tables:
    size, rotated = config.head_dim, config.rotary_dim or config.head_dim
    if rope is None:
        # Rotated by nothing.
        ones = torch.ones(max_model_len, size, device=device)
        return ones, torch.zeros_like(ones)
    factor = 1.0 if isinstance(rope, RopeFormula) else rope.attention_factor
    positions = torch.arange(max_model_len, device=device)
    angles = positions[:, None].float() * inverse_frequencies(rope, rotated).to(device)
    factors = torch.full((rotated // 2,), factor, device=device)
    if rotated < size:
        still = (0, (size - rotated) // 2)
        angles, factors = F.pad(angles, still), F.pad(factors, still, value=1.0)
    both, factors = torch.cat((angles, angles), dim=-1), torch.cat((factors, factors))
    return both.cos() * factors, both.sin() * factors


def inverse_frequencies(rope: Rope, rotary_dim: int) -> torch.Tensor:
    """Radians per token, ``[rotary_dim / 2]``, float32."""
    if not isinstance(rope, RopeFormula):
        return torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    if isinstance(rope.scaling, FactorScaling):
        return 1.0 / (torch.tensor(rope.scaling.factors) * rope.theta**exponents)
    inverse = 1.0 / (rope.theta**exponents)
    if isinstance(rope.scaling, LinearScaling):
        return inverse / rope.scaling.factor
    return inverse if rope.scaling is None else _blended(inverse, rope.scaling)


def _blended(inverse: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    context, factor = scaling.original_max_position_embeddings, scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / inverse
    scaled = torch.where(wavelengths > context / low, inverse / factor, inverse)
    # How much of a frequency between both limits stays as it is.
    share = (context / wavelengths - low) / (high - low)
    blended = (1 - share) * scaled / factor + share * scaled
    is_between = ~(wavelengths < context / high) * ~(wavelengths > context / low)
    return torch.where(is_between, blended, scaled)
