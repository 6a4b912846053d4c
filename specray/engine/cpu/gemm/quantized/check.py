"""Checks the kernels of quantised weights on this machine, before the first model is built with them."""

from __future__ import annotations

import functools

import torch

from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear, has_kernels
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import quantize
from specray.engine.weights.stored_weight import Part, StoredWeight
from specray.errors import ConfigError

_SHAPE = (40, 96)
"""Output features, of a whole panel and a part, and input features, several groups."""
_MAX_COLUMNS = 512
"""Input features with which a layout is checked, unless a group has more."""
_WIDTHS = (1, 2, 3, 4, 5, 6, 11)
_TOLERANCE = 2e-2
"""Largest error of a product for numbers of about 10: rounding to bfloat16."""


@functools.cache
def check_kernels(format: Quantization, dtype: torch.dtype) -> None:
    """Raises ConfigError where there is no kernel, or it computes something else than torch in float64."""
    if not has_kernels():
        raise ConfigError(
            f"quantization is {format.value!r}; this processor lacks AVX2, FMA or F16C, which its kernels "
            "need; allowed: 'none'"
        )
    numbers = torch.Generator().manual_seed(0)
    weight, other = (quantize(torch.randn(*_SHAPE, generator=numbers), format) for _ in range(2))
    bias = torch.randn(_SHAPE[0], generator=numbers).to(dtype)
    thread_pool = ThreadPool(1)
    linear = QuantizedLinear(weight, bias, thread_pool, dtype)
    gate = QuantizedGate(weight, other, None, None, thread_pool, dtype)
    for num_rows in _WIDTHS:
        rows = torch.randn(num_rows, _SHAPE[1], generator=numbers).to(dtype)
        product, gated = (rows.double() @ one.dequantized().double().T for one in (weight, other))
        expected = torch.nn.functional.silu(product) * gated
        errors = [
            _error(linear.precise(rows), product + bias.double()),
            _error(linear.plus(rows, linear(rows)), 2 * (product + bias.double())),
            _error(gate(rows), expected),
        ]
        if not max(errors) < _TOLERANCE:
            raise ConfigError(
                f"quantization is {format.value!r}, whose kernel is wrong by {max(errors):.3g} on this "
                "machine; allowed: 'none'"
            )


def check_part(part: Part, dtype: torch.dtype) -> None:
    """Checks the kernel of a stored weight's layout with some rows and input features of it.

    Raises:
        ConfigError: it computes something else than the weight's values in float64.
    """
    unit = part.group if isinstance(part, GroupedWeight) else part.unit
    columns = min(part.shape[1], max(1, _MAX_COLUMNS // unit) * unit)
    piece = part.select(slice(0, _SHAPE[0])).columns(0, columns)
    linear = QuantizedLinear(StoredWeight((piece,)), None, ThreadPool(1), dtype)
    values, numbers = piece.values().double(), torch.Generator().manual_seed(0)
    for num_rows in _WIDTHS:
        rows = torch.randn(num_rows, columns, generator=numbers).to(dtype)
        expected = rows.double() @ values.T
        largest = expected.abs().max().clamp_min(1e-30)
        error = float(((linear.precise(rows).double() - expected) / largest).abs().max())
        if not error < _TOLERANCE:
            raise ConfigError(
                f"weights is 'auto'; the kernel of layout {linear.panels[0].layout.name} is wrong by "
                f"{error:.3g} on this machine; allowed: 'dtype'"
            )


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found.double() - expected) / expected.abs().clamp_min(1.0)).abs().max())
