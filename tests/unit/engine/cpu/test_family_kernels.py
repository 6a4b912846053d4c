"""What some families ask of the kernels: GELU, norms with float32 weights that add, tables of each layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("numba")

from specray.engine.activation import Activation
from specray.engine.attention.base import HeadNorm
from specray.engine.cpu.gemm.linear import TiledGate, can_tile
from specray.engine.cpu.gemm.quantized.linear import QuantizedGate, has_kernels
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.model.decoder import RMSNorm as TorchNorm
from specray.engine.model.decoder import WideRMSNorm as WideTorchNorm
from specray.engine.step import AttentionStep, SequenceRows
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import quantize
from tests.unit.engine.cpu.test_kernels import ALONE, MAX_LEN, empty_cache, fused, random

pytestmark = pytest.mark.slow

needs_instruction = pytest.mark.skipif(
    not can_tile(torch.empty(64, 32, dtype=torch.bfloat16)), reason="no AVX-512 here"
)
BFLOAT16 = torch.bfloat16


@needs_instruction
def test_gelu_gate_equals_float64() -> None:
    """From far below zero, where it is zero, to far above, where it is its argument."""
    rows = torch.cat((random(5, 64, dtype=BFLOAT16), 40 * random(2, 64, dtype=BFLOAT16, seed=7)))
    gate, up = (random(70, 64, dtype=BFLOAT16, seed=seed) for seed in (1, 2))
    gate_exact, up_exact = rows.double() @ gate.double().T, rows.double() @ up.double().T
    expected = F.gelu(gate_exact, approximate="tanh") * up_exact
    output = TiledGate(gate, up, None, None, ALONE, Activation.GELU_TANH)(rows)
    torch.testing.assert_close(output.double(), expected, atol=2e-3, rtol=2**-7)
    assert float(gate_exact.min()) < -300 and float(gate_exact.max()) > 300


@pytest.mark.skipif(not has_kernels(), reason="no AVX2 here")
def test_quantized_gelu_gate_equals_float64() -> None:
    rows = random(3, 64)
    gate, up = (quantize(random(32, 64, seed=seed), Quantization.INT8) for seed in (1, 2))
    exact = [rows.double() @ weight.dequantized().double().T for weight in (gate, up)]
    output = QuantizedGate(gate, up, None, None, ALONE, torch.float32, Activation.GELU_TANH)(rows)
    expected = F.gelu(exact[0], approximate="tanh") * exact[1]
    torch.testing.assert_close(output.double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
@pytest.mark.parametrize("size", [6, 64])
def test_norm_with_a_float32_weight_adds_before_it_rounds(dtype: torch.dtype, size: int) -> None:
    rows, summand = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=2)
    # Not a bfloat16: rounded, it would be 1.
    weight = torch.full((size,), 1.0 + 2.0**-9)
    normed = rows.double() / (rows.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    rounding = 1e-6 if dtype == torch.float32 else 2**-8
    norm = FusedRMSNorm(weight, 1e-5, ALONE, dtype)
    torch.testing.assert_close(norm(rows).double(), normed, atol=1e-7, rtol=rounding)
    before = summand.clone()
    added = norm.plus(rows, summand)
    torch.testing.assert_close(added.double(), normed + summand.double(), atol=2e-6, rtol=rounding)
    assert torch.equal(summand, before) and added.dtype == dtype


def test_torch_norms_add_too() -> None:
    rows, summand, weight = random(3, 8), random(3, 8, seed=1), random(8, seed=2)
    expected = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + summand
    torch.testing.assert_close(TorchNorm(weight, 1e-5).plus(rows, summand.clone()), expected)
    wide = WideTorchNorm(weight, 1e-5).plus(rows.bfloat16(), summand.bfloat16())
    assert wide.dtype == BFLOAT16
    torch.testing.assert_close(wide.float(), expected, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float32])
def test_head_norm_with_a_float32_weight(dtype: torch.dtype) -> None:
    """The same numbers as the type of the rows and as float32 give the same bits."""
    qkv, weight = random(5, 4 * 32, dtype=dtype), random(3, 32, dtype=BFLOAT16, seed=1)
    outputs = []
    for stored in (weight.to(dtype), weight.float()):
        cache = empty_cache(1, MAX_LEN, 1, 32, dtype)
        step = AttentionStep((SequenceRows(0, 5, 0, [0]),), cache)
        attention = fused(2, 1, 32, dtype).prepare(step, slice(0, 0))
        outputs.append(attention.attend(0, qkv.clone(), HeadNorm(stored, 1e-6), None))
        outputs.append(cache.layers[0].clone())
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    with_ones = AttentionStep((SequenceRows(0, 5, 0, [0]),), empty_cache(1, MAX_LEN, 1, 32, dtype))
    attention = fused(2, 1, 32, dtype).prepare(with_ones, slice(0, 0))
    other = attention.attend(0, qkv.clone(), HeadNorm(torch.ones(3, 32), 1e-6), None)
    assert not torch.equal(outputs[0], other)


def test_each_layer_rotates_by_its_own_tables() -> None:
    qkv, plain = random(5, 4 * 32), fused(2, 1, 32, torch.float32)
    other = torch.ones_like(plain.cos), torch.zeros_like(plain.sin)
    by_layer = replace(plain, layer_tables=((plain.cos, plain.sin), other))
    still = replace(plain, cos=other[0], sin=other[1])

    def steps(attention: object, layers: tuple[int, ...]) -> list[torch.Tensor]:
        cache = empty_cache(1, MAX_LEN, 1, 32, torch.float32)
        cache.layers.append(torch.zeros_like(cache.layers[0]))
        step = AttentionStep((SequenceRows(0, 5, 0, [0]),), cache)
        prepared = attention.prepare(step, slice(0, 0))  # type: ignore[attr-defined]
        return [prepared.attend(layer, qkv.clone(), None, None) for layer in layers]

    first, second, again = steps(by_layer, (0, 1, 0))
    assert torch.equal(first, steps(plain, (0,))[0]) and torch.equal(again, first)
    assert torch.equal(second, steps(still, (0,))[0]) and not torch.equal(first, second)
