"""Kernels of quantised weights against float64, at the edges of tiles; a row is the same at any width."""

from __future__ import annotations

import functools

import pytest
import torch

pytest.importorskip("numba")
from specray.engine.cpu.gemm.quantized import linear as linear_module
from specray.engine.cpu.gemm.quantized.integer_rows import integer_rows
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, QuantizedLinear, has_kernels
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight, quantize
from tests.pairwise import pairs
from tests.unit.engine.cpu.test_kernels import random

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_kernels(), reason="no AVX2 here"),
]
ALONE = ThreadPool(1)
FORMATS = (Quantization.INT8, Quantization.INT4)
DTYPES = (torch.bfloat16, torch.float32)


@functools.cache
def weight_of(format: Quantization, size: int, in_features: int, seed: int = 1) -> QuantizedWeight:
    return quantize(random(size, in_features, seed=seed), format)


@pairs(
    dtype=DTYPES,
    format=FORMATS,
    num_rows=(*range(1, 8), 13, 191, 390),
    shape=((64, 32), (7, 96), (200, 1184)),
)
def test_quantized_layers_equal_float64(
    dtype: torch.dtype, format: Quantization, num_rows: int, shape: tuple[int, int]
) -> None:
    """Every tile of rows, more rows than are kept at once, a partial panel, more groups than are kept."""
    size, in_features = shape
    rows = random(num_rows, in_features, dtype=dtype)
    weight, other = (weight_of(format, size, in_features, seed) for seed in (1, 2))
    bias, other_bias = (random(size, dtype=dtype, seed=seed) for seed in (3, 4))
    summand = random(num_rows, size, dtype=dtype, seed=5)
    linear = torch.nn.functional.linear
    exact = linear(rows.double(), weight.dequantized().double(), bias.double())
    other_exact = linear(rows.double(), other.dequantized().double(), other_bias.double())
    # Sums of float32, and for bfloat16 what integer rows lose: 2^-16 of the largest of 32, each.
    error = 1e-6 * in_features if dtype == torch.float32 else 1e-3 * (in_features / 32) ** 0.5
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    layer = QuantizedLinear(weight, bias, ALONE, dtype)
    torch.testing.assert_close(layer.precise(rows).double(), exact, atol=error, rtol=1e-5)
    torch.testing.assert_close(layer(rows).double(), exact, atol=error, rtol=rounding)
    torch.testing.assert_close(
        layer.plus(rows, summand).double(), exact + summand.double(), atol=error, rtol=rounding
    )
    assert layer(rows).dtype == layer.plus(rows, summand).dtype == dtype
    gated = QuantizedGate(weight, other, bias, other_bias, ALONE, dtype)(rows)
    assert gated.dtype == dtype
    torch.testing.assert_close(
        gated.double(),
        torch.nn.functional.silu(exact) * other_exact,
        atol=30 * error,
        rtol=2 * rounding,
    )
    without = QuantizedLinear(weight, None, ALONE, dtype).precise(rows).double()
    torch.testing.assert_close(without, exact - bias.double(), atol=error, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_bit_for_bit_the_same_at_any_width(dtype: torch.dtype, format: Quantization) -> None:
    layer = QuantizedLinear(weight_of(format, 130, 1184), None, ALONE, dtype)
    gate = QuantizedGate(
        weight_of(format, 130, 1184), weight_of(format, 130, 1184, 2), None, None, ALONE, dtype
    )
    rows = random(400, 1184, dtype=dtype, seed=1)
    whole, gated = layer.precise(rows), gate(rows)
    for width in (1, 2, 3, 4, 5, 6, 7, 11, 13, 191, 257):
        pieces = [piece.contiguous() for piece in torch.split(rows, width)]
        assert torch.equal(whole, torch.cat([layer.precise(piece) for piece in pieces])), width
        assert torch.equal(gated, torch.cat([gate(piece) for piece in pieces])), width


@pytest.mark.parametrize("format", FORMATS)
def test_threads_change_no_bit(format: Quantization, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_module, "MIN_SHARED_WEIGHTS", 1)
    weight, rows = weight_of(format, 1000, 64), random(9, 64, dtype=torch.bfloat16)
    alone = QuantizedLinear(weight, None, ALONE).precise(rows)
    together = QuantizedLinear(weight, None, ThreadPool(4))
    assert all(torch.equal(together.precise(rows), alone) for _ in range(100))


@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_rows_hold_numbers_of_similar_size_exactly(dtype: torch.dtype) -> None:
    """From the largest of a block down to 1/128 of it, in float32 to 1/64; subnormals become 0."""
    magnitudes = 2.0 ** torch.linspace(0, -6.99 if dtype == torch.bfloat16 else -5.99, 31)
    rows = torch.zeros(4, 32, dtype=dtype)
    rows[0, :31] = magnitudes.to(dtype) * 1000
    rows[1, :31] = -magnitudes.to(dtype) * 1e-20
    rows[2] = 1e-40
    rows[3, 5] = -3.3e38
    converted = integer_rows(rows, ALONE)
    parts = converted.integers[0].double() * converted.factors[0, :, :1].double()
    values = parts.view(4, -1, 32).sum(1)
    assert torch.equal(values[[0, 1, 3]], rows[[0, 1, 3]].double())
    assert values[2].abs().max() == 0
    assert torch.equal(converted.factors[0, :, 1], parts.sum(-1).float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_nan_and_leaves_the_others(dtype: torch.dtype, number: float) -> None:
    layer = QuantizedLinear(weight_of(Quantization.INT4, 64, 64), None, ALONE, dtype)
    rows = random(3, 64, dtype=dtype)
    whole = layer(rows)
    rows[1, 40] = number
    found = layer(rows)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], whole[[0, 2]])


def test_no_rows_touch_nothing() -> None:
    weight = weight_of(Quantization.INT8, 64, 32)
    layer, gate = QuantizedLinear(weight, None, ALONE), QuantizedGate(weight, weight, None, None, ALONE)
    none = torch.empty(0, 32, dtype=torch.bfloat16)
    assert layer.plus(none, torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 64)
    assert gate(none).shape == layer.precise(none).shape == (0, 64)
