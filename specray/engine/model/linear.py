"""Linear layers of the decoder: weights in the layout that streams fastest, epilogues fused.

A decoder at one to eight rows is bound by reading weights. On CPU ``torch.nn.functional.linear`` reads them
at a third to a half of the speed that memory has. Where the processor multiplies bfloat16 our own kernel
reaches it (``kernels.linear``, chosen in ``kernels.operators``); elsewhere oneDNN comes near it with weights
reordered once to its own layout, and its post-ops (activation, product or sum with another tensor) cost next
to nothing.

oneDNN compiles a kernel of its own for every number of rows that a layer meets and keeps the last thousand of
them, with the room of outputs of every size between: close to 1 MiB for each number of rows and layer shape
(layers of 166 MiB held 977 after 20 000 steps of mixed widths, and 265 at the same speed with the padding
below). So rows are padded to one of few widths.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from specray.engine.activation import Activation

_reorder = torch.ops.mkldnn._reorder_linear_weight
pointwise = torch.ops.mkldnn._linear_pointwise.default
pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary
_POST_OPS: dict[Activation, tuple[str, list[float], str]] = {
    Activation.SILU: ("swish", [], ""),
    Activation.GELU_TANH: ("gelu", [], "tanh"),
}
"""What oneDNN calls the activations."""

_EXACT_ROWS = 8
"""Rows up to which none is padded: a step of one sequence, where a further row costs most."""


def padded_width(num_rows: int) -> int:
    """Padded number of rows: at most a quarter more, and four widths per doubling."""
    if num_rows <= _EXACT_ROWS:
        return num_rows
    step = 1 << ((num_rows - 1).bit_length() - 3)
    return -(-num_rows // step) * step


def _padded(rows: torch.Tensor, width: int) -> torch.Tensor:
    # With zeros: what memory happens to hold may be numbers that processors are slow at.
    return rows if len(rows) == width else F.pad(rows, (0, 0, 0, width - len(rows)))


def _first(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    return rows if len(rows) == num_rows else rows[:num_rows]


@runtime_checkable
class Weights(Protocol):
    """Some weights of one layer, all of which every call reads."""

    @property
    def num_weights(self) -> int: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights as they are held."""
        ...

    @property
    def in_features(self) -> int: ...

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_features]`` to ``[num_rows, out_features]``."""
        ...


class Linear(Weights, Protocol):
    """``x -> x @ weight.T + bias``, and what may follow it."""

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        """The same in float32."""
        ...

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """``linear(rows) + summand``, whose contents may be lost."""
        ...


class Gate(Weights, Protocol):
    """``x -> activation(gate(x)) * up(x)`` of two linear layers; both have a bias, or none has."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The weight as it is: on CUDA, and where oneDNN lacks the data type."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None

    @property
    def num_weights(self) -> int:
        return self.weight.numel()

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.itemsize

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias).float()

    def into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Writes what a call gives to ``out``, which is of the same type."""
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=out)

    def precise_into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Writes what ``precise`` gives to ``out``."""
        if self.weight.dtype == out.dtype:
            self.into(rows, out)
        else:
            out.copy_(self(rows))

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return summand.addmm_(rows, self.weight.t())
        return F.linear(rows, self.weight, self.bias).add_(summand)


@dataclass(frozen=True, slots=True)
class WideLinear(PlainLinear):
    """A weight of 16 bits whose products can be left in the float32 that they are summed in."""

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        assert self.bias is None, "only products are wide"
        return torch.mm(rows, self.weight.t(), out_dtype=torch.float32)

    def precise_into(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        assert self.bias is None, "only products are wide"
        torch.mm(rows, self.weight.t(), out_dtype=torch.float32, out=out)


@dataclass(frozen=True, slots=True)
class PlainGate:
    """Both weights in one: on CUDA, and where oneDNN lacks the data type."""

    weight: torch.Tensor  # [2 * out_features, in_features]
    bias: torch.Tensor | None
    activation: Activation = Activation.SILU

    @property
    def num_weights(self) -> int:
        return self.weight.numel()

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.itemsize

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(rows, self.weight, self.bias).chunk(2, -1)
        return activated(gate, self.activation).mul_(up)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weight in oneDNN's own layout (opaque: only these operators can read it)."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_weights(self) -> int:
        return self.weight.numel()

    @property
    def num_bytes(self) -> int:
        return self.weight.numel() * self.weight.itemsize

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        padded = _padded(rows, padded_width(len(rows)))
        out: torch.Tensor = pointwise(padded, self.weight, self.bias, "none", [], "")
        return _first(out, len(rows))

    def precise(self, rows: torch.Tensor) -> torch.Tensor:
        return self(rows).float()

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        width = padded_width(len(rows))
        padded, summands = _padded(rows, width), _padded(summand, width)
        out: torch.Tensor = pointwise_binary(padded, summands, self.weight, self.bias, "add")
        return _first(out, len(rows))


@dataclass(frozen=True, slots=True)
class PackedGate:
    """Both weights in oneDNN's own layout, one after the other."""

    gate: torch.Tensor
    up: torch.Tensor
    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    activation: Activation = Activation.SILU

    @property
    def num_weights(self) -> int:
        return 2 * self.gate.numel()

    @property
    def num_bytes(self) -> int:
        return 2 * self.gate.numel() * self.gate.itemsize

    @property
    def in_features(self) -> int:
        return self.gate.shape[1]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        padded = _padded(rows, padded_width(len(rows)))
        gated = pointwise(padded, self.gate, self.gate_bias, *_POST_OPS[self.activation])
        out: torch.Tensor = pointwise_binary(padded, gated, self.up, self.up_bias, "mul")
        return _first(out, len(rows))


def activated(gate: torch.Tensor, activation: Activation) -> torch.Tensor:
    return F.silu(gate) if activation is Activation.SILU else F.gelu(gate, approximate="tanh")


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest of torch's forms of a linear layer for the weight's device and data type.

    The caller should drop its own reference to ``weight``: the packed form is a copy.
    """
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(_reorder(weight.contiguous()), bias)
    kind = WideLinear if bias is None and has_wide_products(weight.device, weight.dtype) else PlainLinear
    return kind(weight.contiguous(), bias)


@functools.cache
def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch leaves products of 16-bit numbers in float32 on this device: it is tried."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    # The sum needs more than 16 bits.
    rows, weight = (
        torch.ones(1, 16, dtype=dtype, device=device),
        torch.ones(8, 16, dtype=dtype, device=device),
    )
    rows[0, 0] = 2.0**-12
    linear, written = WideLinear(weight, None), torch.zeros(1, 8, device=device)
    try:
        products = linear.precise(rows)
        linear.precise_into(rows, written)
    except (RuntimeError, TypeError):
        return False
    return all(
        each.dtype == torch.float32 and bool((each == 15.0 + 2.0**-12).all()) for each in (products, written)
    )


def make_gate(
    gate: torch.Tensor,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: Activation = Activation.SILU,
) -> Gate:
    """The fastest of torch's forms of a gated pair; as :func:`make_linear`."""
    if can_pack(gate.device, gate.dtype):
        packed = _reorder(gate.contiguous()), _reorder(up.contiguous())
        return PackedGate(*packed, gate_bias, up_bias, activation)
    bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
    return PlainGate(torch.cat((gate, up)), bias, activation)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has prepacked kernels for this data type on this machine."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
