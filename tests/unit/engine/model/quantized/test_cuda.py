"""Quantised layers through torch's own products: what can be seen without a GPU."""

from __future__ import annotations

import pytest
import torch

from specray.engine.model.operators_torch import TorchOperators
from specray.engine.model.quantized.cuda import (
    CudaGate,
    CudaLinear,
    Int8Product,
    QuantizedCudaOperators,
    nibbles,
    scales_and_zeros,
)
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import quantize
from specray.errors import ConfigError

CPU = torch.device("cpu")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def test_int8_layers_compute_with_the_dequantised_weight() -> None:
    """torch has this product on CPU, too."""
    operators = QuantizedCudaOperators(TorchOperators(torch.bfloat16), torch.bfloat16, CPU, Quantization.INT8)
    weight, up, bias, rows, summand = (random(*shape, seed=i) for i, shape in enumerate(
        [(64, 96), (64, 96), (64,), (5, 96), (5, 64)]
    ))  # fmt: skip
    held, held_up = (Int8Product.of(one).dequantized() for one in (weight, up))
    assert float((held - weight.float()).abs().max()) < float(weight.float().abs().max()) / 120
    linear = operators.linear(weight, bias)
    assert isinstance(linear, CudaLinear)
    exact = rows.float() @ held.T + bias.float()
    torch.testing.assert_close(linear.precise(rows), exact, atol=0.1, rtol=2**-7)
    torch.testing.assert_close(
        linear.plus(rows, summand).float(), exact + summand.float(), atol=0.1, rtol=2**-7
    )
    assert (linear.num_weights, linear.num_bytes, linear.in_features) == (64 * 96, 64 * 96 + 128, 96)
    gate = operators.gate(weight, up, None, None)
    assert isinstance(gate, CudaGate)
    expected = torch.nn.functional.silu(rows.float() @ held.T) * (rows.float() @ held_up.T)
    torch.testing.assert_close(gate(rows).float(), expected, atol=0.5, rtol=2**-5)


def test_int4_numbers_in_the_order_of_torch() -> None:
    weight = quantize(random(8, 64), Quantization.INT4, dtype=torch.bfloat16)
    packed, numbers = nibbles(weight.codes), scales_and_zeros(weight)
    assert packed.shape == (8, 32) and numbers.shape == (2, 8, 2)
    even, odd = packed >> 4, packed & 15
    codes = torch.stack((even, odd), -1).view(8, 2, 32).float()
    scales, zeros = (numbers[..., index].T.float()[..., None] for index in (0, 1))
    found = ((codes - 8) * scales + zeros).view(8, 64)
    # The zero is rounded to bfloat16.
    assert float((found - weight.dequantized()).abs().max()) < float(numbers[..., 1].abs().max()) / 250


def test_what_torch_does_not_compute_here_is_refused() -> None:
    others = TorchOperators(torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"^quantization is 'int4', which torch .* does not compute on cpu: "
    ):
        QuantizedCudaOperators(others, torch.bfloat16, CPU, Quantization.INT4)
    with pytest.raises(ConfigError, match=r"^quantization is 'int8' with dtype 'float32'; allowed on CUDA"):
        QuantizedCudaOperators(others, torch.float32, CPU, Quantization.INT8)
