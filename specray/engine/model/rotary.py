"""Rotary frequencies and the tables of cosines and sines that the decoder rotates with.

The order of operations is that of transformers, so that the tables are equal to the last bit.
"""

from __future__ import annotations

import math

import torch

from specray.engine.model.decoder_config import DecoderConfig, LinearScaling, Llama3Scaling, RopeFormula


def cos_sin(
    config: DecoderConfig, max_model_len: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[max_model_len, head_dim]`` in float32; the halves of ``head_dim`` are equal."""
    rope = config.rope
    factor = 1.0 if isinstance(rope, RopeFormula) else rope.attention_factor
    positions = torch.arange(max_model_len, device=device)
    angles = positions[:, None].float() * inverse_frequencies(config).to(device)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos() * factor, both.sin() * factor


def inverse_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Radians per token, ``[head_dim / 2]``, float32."""
    rope = config.rope
    if not isinstance(rope, RopeFormula):
        return torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
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
