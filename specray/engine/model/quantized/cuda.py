"""The decoder's linear layers on CUDA with quantised weights: torch's own weight-only products.

int8 has one scale per output feature, as torch's product takes it; int4 has groups of 32 input features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.engine.activation import Activation
from specray.engine.model.linear import activated
from specray.engine.weights.quantization import GROUP, Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight, quantize
from specray.engine.weights.stored_weight import Weight, join, numbers_of
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.engine.attention.base import Attention
    from specray.engine.model.decoder import Norm
    from specray.engine.model.layers.experts import LayerGroup
    from specray.engine.model.linear import Gate, Linear, Weights
    from specray.engine.model.operators import Operators
    from specray.engine.model.rotary import RotaryTables
    from specray.engine.step import HeadShape

_INNER_TILES = 2
"""Tiles of 16 input features that torch's int4 product takes at a time: a group."""
_OUT_STEP = 8
"""Divisor of the output features of torch's int4 product."""
_MAX_INT8 = 127
_TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True)
class Int8Product:
    """``x @ weight.T`` with int8 weights and one bfloat16 scale per output feature."""

    codes: torch.Tensor  # int8 [out_features, in_features]
    scales: torch.Tensor  # [out_features]

    @classmethod
    def of(cls, weight: torch.Tensor) -> Int8Product:
        scales = (weight.float().abs().amax(1) / _MAX_INT8).to(torch.bfloat16)
        inverse = 1 / scales.float().clamp_min(torch.finfo(torch.float32).tiny)
        codes = (weight.float() * inverse[:, None]).round_().clamp_(-_MAX_INT8, _MAX_INT8)
        return cls(codes.to(torch.int8), scales)

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def dequantized(self) -> torch.Tensor:
        """The weight in float32."""
        return self.codes.float() * self.scales.float()[:, None]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(rows, self.codes, self.scales)


@dataclass(frozen=True, slots=True)
class Int4Product:
    """``x @ weight.T`` with int4 weights and a bfloat16 scale and zero per group."""

    packed: torch.Tensor
    scales_zeros: torch.Tensor  # [in_features / 32, out_features, 2]
    weight: QuantizedWeight | None = None
    """The weight, where a check wants to see it."""

    @classmethod
    def of(cls, weight: torch.Tensor, *, is_kept: bool = False) -> Int4Product:
        if weight.shape[0] % _OUT_STEP:
            raise ConfigError(
                f"quantization is 'int4'; a layer has {weight.shape[0]} output features on a rank, which "
                f"must be a multiple of {_OUT_STEP} on CUDA; allowed: 'int8' or 'none'"
            )
        quantized = quantize(weight, Quantization.INT4, dtype=torch.bfloat16)
        packed = torch.ops.aten._convert_weight_to_int4pack(nibbles(quantized.codes), _INNER_TILES)
        return cls(packed, scales_and_zeros(quantized), quantized if is_kept else None)

    @property
    def num_bytes(self) -> int:
        return self.packed.nbytes + self.scales_zeros.nbytes

    def dequantized(self) -> torch.Tensor:
        """The weight in float32, as the product reads it."""
        assert self.weight is not None, "kept for a check"
        scales, zeros = (self.scales_zeros[..., index].T.float()[..., None] for index in (0, 1))
        codes = self.weight.codes.view(len(self.weight.codes), -1, GROUP).float()
        return ((codes - 8) * scales + zeros).view(self.weight.codes.shape)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm(rows, self.packed, GROUP, self.scales_zeros)


def nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 ``[out_features, in_features / 2]``: two codes each, of even input features in the upper half."""
    unsigned = codes.to(torch.uint8)
    return (unsigned[:, ::2] << 4 | unsigned[:, 1::2]).contiguous()


def scales_and_zeros(weight: QuantizedWeight) -> torch.Tensor:
    """bfloat16 ``[groups, out_features, 2]``; torch's zero is what code 8 stands for."""
    assert weight.minimums is not None, "int4 has minimums"
    zeros = (weight.minimums.float() + 8 * weight.scales.float()).to(torch.bfloat16)
    return torch.stack((weight.scales.to(torch.bfloat16), zeros), -1).transpose(0, 1).contiguous()


Product = Int8Product | Int4Product


@dataclass(frozen=True, slots=True)
class CudaLinear:
    """Implements ``linear.Linear``."""

    product: Product
    bias: torch.Tensor | None
    num_weights: int
    in_features: int

    @property
    def num_bytes(self) -> int:
        return self.product.num_bytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out = self.product(rows)
        return out if self.bias is None else out.add_(self.bias)

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).float()

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(summand)


@dataclass(frozen=True, slots=True)
class CudaGate:
    """Implements ``linear.Gate``: both layers in one product."""

    both: CudaLinear
    activation: Activation = Activation.SILU

    @property
    def num_weights(self) -> int:
        return self.both.num_weights

    @property
    def num_bytes(self) -> int:
        return self.both.num_bytes

    @property
    def in_features(self) -> int:
        return self.both.in_features

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(rows).chunk(2, -1)
        return activated(gate, self.activation).mul_(up)


class QuantizedCudaOperators:
    """Implements ``operators.Operators``: quantises each weight as it comes.

    Args:
        others: make everything else.

    Raises:
        ConfigError: torch has no product of this format here, or it computes something else.
    """

    def __init__(
        self, others: Operators, dtype: torch.dtype, device: torch.device, format: Quantization
    ) -> None:
        if dtype != torch.bfloat16:
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"quantization is {format.value!r} with dtype {name!r}; allowed on CUDA: dtype 'bfloat16'"
            )
        self._format = format
        self._others = others
        _check_product(format, device)

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        numbers = numbers_of(weight, torch.bfloat16)
        product: Product = (
            Int8Product.of(numbers) if self._format is Quantization.INT8 else Int4Product.of(numbers)
        )
        return CudaLinear(product, bias, numbers.numel(), numbers.shape[1])

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        activation: Activation = Activation.SILU,
    ) -> Gate:
        bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
        linear = self.linear(join((gate, up)), bias)
        assert isinstance(linear, CudaLinear), "made above"
        return CudaGate(linear, activation)

    def router(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._others.router(weight, bias)

    def group(self, layers: Sequence[Weights]) -> LayerGroup | None:
        return None

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return self._others.norm(weight, eps)

    def attention(self, tables: RotaryTables, shape: HeadShape) -> Attention:
        return self._others.attention(tables, shape)


def _check_product(format: Quantization, device: torch.device) -> None:
    """Raises ConfigError where torch's product is not there, or is wrong."""
    numbers = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=numbers).to(device, torch.bfloat16)
    try:
        product: Product = (
            Int8Product.of(weight) if format is Quantization.INT8 else Int4Product.of(weight, is_kept=True)
        )
        for num_rows in (1, 6):
            rows = torch.randn(num_rows, 128, generator=numbers).to(device, torch.bfloat16)
            expected = rows.float() @ product.dequantized().T
            error = float((product(rows).float() - expected).abs().max() / expected.abs().max())
            if not error < _TOLERANCE:
                raise ConfigError(f"torch's product is wrong by {error:.3g} of the largest number")
    # Whatever torch or a driver raises where an operator is not there.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"quantization is {format.value!r}, which torch {torch.__version__} does not compute on "
            f"{device.type}: {reason[0]}; allowed: 'none'"
        ) from None
