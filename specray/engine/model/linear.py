"""Linear layers of the decoder, as torch computes them: on CUDA, and on processors without kernels of ours.

A decoder at one to eight rows is bound by reading weights. On CPU ``torch.nn.functional.linear`` reads them
at a third to a half of the speed that memory has, and what it computes of a row depends on the number of
rows: where the processor has an instruction set for it, ``cpu.gemm.linear`` is taken in its place.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from specray.engine.activation import Activation, Clamp, Joint


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
        """The layer's output in float32."""
        ...

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """``linear(rows) + summand``, whose contents may be lost."""
        ...


class Gate(Weights, Protocol):
    """``x -> activation(gate(x)) * up(x)`` of two linear layers; both have a bias, or none has."""


class AroundLinear:
    """What a part has in common that is made around one linear layer: that layer's weights."""

    __slots__ = ()
    linear: Weights

    @property
    def num_weights(self) -> int:
        return self.linear.num_weights

    @property
    def num_bytes(self) -> int:
        return self.linear.num_bytes

    @property
    def in_features(self) -> int:
        return self.linear.in_features


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The weight as it is: on CUDA, and on processors without kernels of ours."""

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
class JoinedGate(AroundLinear):
    """Both layers as one, joined by torch's operators."""

    linear: Linear
    """The gate's outputs before those of up."""
    joint: Joint = Activation.SILU

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.joined(self.products(rows))

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``adapters.layers.SplitGate``, as the next."""
        return self.linear(rows)

    def joined(self, both: torch.Tensor) -> torch.Tensor:
        return joined(both, self.joint)


@dataclass(frozen=True, slots=True)
class SquaredLinear(AroundLinear):
    """Implements :class:`Gate` where there is no gate: the square of what is above zero of a linear layer."""

    linear: Linear

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows).relu_().square_()


def joined(both: torch.Tensor, joint: Joint) -> torch.Tensor:
    """The outputs of gate and up, ``[num_rows, 2 * size]``, as ``[num_rows, size]``."""
    gate, up = both.chunk(2, -1)
    if isinstance(joint, Clamp):
        gate, up = gate.clamp(max=joint.limit), up.clamp(-joint.limit, joint.limit)
        return gate * torch.sigmoid(gate * joint.gain) * (up + 1.0)
    activated = F.silu(gate) if joint is Activation.SILU else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The better of torch's forms of a linear layer for the weight's device and data type."""
    kind = WideLinear if bias is None and has_wide_products(weight.device, weight.dtype) else PlainLinear
    # On CPU it may be a view of a file, which may be replaced while the model serves.
    return kind(weight.clone() if weight.device.type == "cpu" else weight.contiguous(), bias)


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
    joint: Joint = Activation.SILU,
) -> Gate:
    """Torch's form of a gated pair, a copy: the caller should drop its own references to the weights."""
    bias = None if gate_bias is None or up_bias is None else torch.cat((gate_bias, up_bias))
    return JoinedGate(PlainLinear(torch.cat((gate, up)), bias), joint)
