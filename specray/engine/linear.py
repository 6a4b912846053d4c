"""Linear layers as the lowered decoder wants them: weights in the layout that streams fastest, ends fused.

A decoder at one to eight rows is bound by reading weights. On CPU ``torch.nn.functional.linear`` reads them
at a third to a half of the speed that oneDNN reaches with weights reordered once to its own layout; its
post-ops (activation, product or sum with another tensor) then cost next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

_reorder = torch.ops.mkldnn._reorder_linear_weight
_pointwise = torch.ops.mkldnn._linear_pointwise.default
_pointwise_binary = torch.ops.mkldnn._linear_pointwise.binary


class Linear(Protocol):
    """``x -> x @ weight.T + bias`` for rows ``[num_rows, in_features]``, and what may follow it."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[num_rows, out_features]``."""
        ...

    def silu(self, rows: torch.Tensor) -> torch.Tensor:
        """``silu(linear(rows))``."""
        ...

    def times(self, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """``linear(rows) * factor``, elementwise."""
        ...

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        """``linear(rows) + summand``."""
        ...


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """The weight as it is: on CUDA, and where oneDNN lacks the data type."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias)

    def silu(self, rows: torch.Tensor) -> torch.Tensor:
        return F.silu(F.linear(rows, self.weight, self.bias))

    def times(self, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias).mul_(factor)

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, self.weight, self.bias).add_(summand)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weight in oneDNN's own layout (opaque: only these operators can read it)."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _pointwise(rows, self.weight, self.bias, "none", [], "")
        return out

    def silu(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _pointwise(rows, self.weight, self.bias, "swish", [], "")
        return out

    def times(self, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _pointwise_binary(rows, factor, self.weight, self.bias, "mul")
        return out

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _pointwise_binary(rows, summand, self.weight, self.bias, "add")
        return out


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest form of a linear layer for the weight's device and data type.

    The caller should drop its own reference to ``weight``: the packed form is a copy.
    """
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(_reorder(weight.contiguous()), bias)
    return PlainLinear(weight.contiguous(), bias)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN has prepacked kernels for this data type on this machine."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
