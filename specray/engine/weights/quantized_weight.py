"""Quantised weights: integer codes in groups along the input features, each with a scale of its own.

A group of 32 input features of one output feature is ``scale * code`` (int8, codes -128..127) or ``scale *
code + minimum`` (int4, codes 0..15), with scales and minimums in float16. So the grids of GGUF's Q8_0, Q4_0
(minimum -8 * scale) and Q4_1 are held exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specray.engine.weights.quantization import GROUP, Quantization
from specray.errors import ConfigError

_DTYPE = torch.float16
"""Type of scales and minimums."""
_MAX_INT8, _MAX_INT4 = 127, 15
WEIGHTS_AT_ONCE = 1 << 20
"""Weights that are quantised at once, so that what lies between takes some MiB, whatever the layer's size."""
NUM_REFITS = 3
"""Least-squares fits of a group's scale and minimum to its codes, each with new codes after it."""
_SMALLEST = 2.0**-24
"""The smallest scale of float16; a group of smaller steps is a constant."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``[out_features, in_features]`` as codes and what they stand for."""

    codes: torch.Tensor  # int8 [out_features, in_features]
    scales: torch.Tensor  # [out_features, in_features / 32]
    minimums: torch.Tensor | None  # the same shape; None: int8

    @property
    def format(self) -> Quantization:
        return Quantization.INT8 if self.minimums is None else Quantization.INT4

    def dequantized(self) -> torch.Tensor:
        """The weight in float32."""
        groups = self.codes.view(len(self.codes), -1, GROUP).float() * self.scales.float()[..., None]
        if self.minimums is not None:
            groups += self.minimums.float()[..., None]
        return groups.view(self.codes.shape)


def quantize(weight: torch.Tensor, format: Quantization) -> QuantizedWeight:
    """Quantises a weight ``[out_features, in_features]`` to the nearest codes, some rows at a time.

    Scales and minimums are float16; codes are the nearest for these as they are rounded.

    Raises:
        ConfigError: groups do not divide the input features, or a group's numbers exceed float16.
    """
    out_features, in_features = weight.shape
    if in_features % GROUP:
        raise ConfigError(
            f"quantization is {format.value!r}; a layer has {in_features} input features on a rank, which "
            f"must be a multiple of {GROUP}; allowed: 'none'"
        )
    is_int4, shape = format is Quantization.INT4, (out_features, in_features // GROUP)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(shape, dtype=_DTYPE, device=weight.device)
    minimums = torch.empty(shape, dtype=_DTYPE, device=weight.device) if is_int4 else None
    for rows in _runs(out_features, max(1, WEIGHTS_AT_ONCE // in_features)):
        groups = weight[rows].float().view(-1, shape[1], GROUP)
        if minimums is None:
            found, scales[rows] = _int8(groups)
        else:
            found, scales[rows], minimums[rows] = _int4(groups)
        codes[rows] = found.view(-1, in_features)
    if not bool(scales.isfinite().all()) or (minimums is not None and not bool(minimums.isfinite().all())):
        limit = torch.finfo(_DTYPE).max
        raise ConfigError(
            f"quantization is {format.value!r}; a weight is {float(weight.abs().max()):g}, and numbers of "
            f"groups are held up to {limit:g}; allowed: 'none'"
        )
    return QuantizedWeight(codes, scales, minimums)


def _runs(count: int, step: int) -> Iterator[slice]:
    for first in range(0, count, step):
        yield slice(first, first + step)


def _int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (groups.abs().amax(-1) / _MAX_INT8).to(_DTYPE)
    codes = (groups * _inverse(scales)).round_().clamp_(-_MAX_INT8, _MAX_INT8)
    return codes, scales


def _int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The whole range of each group first, then better fits to its codes, while they are better."""
    low, high = torch.aminmax(groups, dim=-1)
    scales, minimums = ((high - low) / _MAX_INT4).to(_DTYPE), low.to(_DTYPE)
    codes, errors = _int4_codes(groups, scales, minimums)
    mean = groups.mean(-1, keepdim=True)
    for _ in range(NUM_REFITS):
        code_mean = codes.mean(-1, keepdim=True)
        centred = codes - code_mean
        steps = (centred * (groups - mean)).sum(-1) / centred.square().sum(-1).clamp_min_(1e-9)
        fitted = steps.to(_DTYPE), (mean[..., 0] - steps * code_mean[..., 0]).to(_DTYPE)
        new_codes, new_errors = _int4_codes(groups, *fitted)
        is_better = new_errors < errors
        codes = torch.where(is_better[..., None], new_codes, codes)
        errors = torch.where(is_better, new_errors, errors)
        scales = torch.where(is_better, fitted[0], scales)
        minimums = torch.where(is_better, fitted[1], minimums)
    return codes, scales, minimums


def _int4_codes(
    groups: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest codes, and the sum of squared errors of each group."""
    offsets = minimums.float()[..., None]
    codes = ((groups - offsets) * _inverse(scales)).round_().clamp_(0, _MAX_INT4)
    errors = (codes * scales.float()[..., None]).add_(offsets).sub_(groups).square_().sum(-1)
    return codes, errors


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale with a dimension more; 0 where the scale is rounded to 0."""
    numbers = scales.float()
    return torch.where(numbers >= _SMALLEST, 1 / numbers, 0.0)[..., None]
