"""Codes of quantised weights: grids that are held exactly, the nearest codes, and what cannot be held."""

from __future__ import annotations

import pytest
import torch

from specray.engine.weights import quantized_weight
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight, quantize
from specray.errors import ConfigError


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grid(format: Quantization, *, minimum: float | None = None) -> QuantizedWeight:
    """A weight as GGUF files hold it, each group with its lowest and its highest code."""
    numbers = torch.Generator().manual_seed(1)
    low, high = (-127, 127) if format is Quantization.INT8 else (0, 15)
    codes = torch.randint(low, high + 1, (6, 4, 32), generator=numbers)
    codes[..., 3], codes[..., 17] = low, high
    scales = (0.01 + torch.rand(6, 4, generator=numbers)).half()
    minimums = None
    if format is Quantization.INT4:
        minimums = random(6, 4).half() if minimum is None else (minimum * scales.float()).half()
    return QuantizedWeight(codes.view(6, 128).to(torch.int8), scales, minimums)


@pytest.mark.parametrize(
    ("format", "minimum"),
    [(Quantization.INT8, None), (Quantization.INT4, None), (Quantization.INT4, -8.0)],
    ids=["Q8_0", "Q4_1", "Q4_0"],
)
def test_grids_of_gguf_are_found_again_exactly(format: Quantization, minimum: float | None) -> None:
    held = grid(format, minimum=minimum)
    found = quantize(held.dequantized(), format)
    assert torch.equal(found.codes, held.codes) and torch.equal(found.scales, held.scales)
    assert torch.equal(found.dequantized(), held.dequantized())
    assert found.format is format


def test_int8_codes_are_the_nearest() -> None:
    weight = random(5, 64)
    found = quantize(weight, Quantization.INT8)
    errors = (found.dequantized() - weight).view(5, 2, 32).abs()
    assert bool((errors.amax(-1) <= found.scales.float() * 0.5001).all())


def test_int4_is_better_than_the_whole_range_and_never_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(64, 256)
    weight[0, 0] = 8.0
    fitted = quantize(weight, Quantization.INT4).dequantized()
    monkeypatch.setattr(quantized_weight, "NUM_REFITS", 0)
    plain = quantize(weight, Quantization.INT4).dequantized()
    errors = [(one - weight).view(64, 8, 32).square().sum(-1) for one in (fitted, plain)]
    assert bool((errors[0] <= errors[1]).all())
    assert float(errors[0].sum()) < 0.9 * float(errors[1].sum())


@pytest.mark.parametrize("format", [Quantization.INT8, Quantization.INT4])
def test_groups_of_equal_or_tiny_numbers(format: Quantization) -> None:
    weight = torch.zeros(3, 32)
    weight[1], weight[2, 4] = 0.5, 1e-9
    found = quantize(weight, format).dequantized()
    assert float((found - weight).abs().max()) <= 2e-3 * 0.5
    assert torch.equal(found[0], torch.zeros(32))


def test_rows_are_quantised_alike_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(7, 64)
    whole = quantize(weight, Quantization.INT4)
    monkeypatch.setattr(quantized_weight, "WEIGHTS_AT_ONCE", 128)
    pieces = quantize(weight, Quantization.INT4)
    assert torch.equal(whole.codes, pieces.codes) and torch.equal(whole.dequantized(), pieces.dequantized())


def test_groups_that_do_not_divide_a_layer_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^quantization is 'int4'; a layer has 48 input features on a rank"
    ):
        quantize(torch.ones(4, 48), Quantization.INT4)


def test_numbers_beyond_float16_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"a weight is 1e\+08, and numbers of groups are held up to 65504"):
        quantize(torch.full((1, 32), 1e8), Quantization.INT8)
