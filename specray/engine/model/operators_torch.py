"""What the lowered decoder is made of on one device: linear layers, norms and attention.

On CPU these are kernels of our own, compiled by numba, where numba is installed; elsewhere torch's operators.
Nothing of numba is imported where it is not used.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from specray.engine.attention.paged import BlockAttention
from specray.engine.model.decoder import PlainAttention, RMSNorm, Rotary
from specray.engine.model.linear import make_gate, make_linear

if TYPE_CHECKING:
    from specray.engine.attention.paged import AttendBlocks, StoreRows
    from specray.engine.model.decoder import Attention, Norm
    from specray.engine.model.linear import Gate, Linear

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        """Factor on the dot products."""
        return float(self.head_dim**-0.5)


class Operators(Protocol):
    """Makes the parts of a decoder. The caller drops its own reference to a weight: parts may be copies."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """``[out_features, in_features]``, and ``[out_features]``."""
        ...

    def gate(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> Gate: ...

    def norm(self, weight: torch.Tensor, eps: float) -> Norm: ...

    def attention(self, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape) -> Attention:
        """Over rotary tables ``[max_model_len, head_dim]``, float32, whose halves are equal."""
        ...


class TorchOperators:
    """Torch's own.

    Args:
        dtype: of the model.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return make_linear(weight, bias)

    def gate(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
    ) -> Gate:
        return make_gate(gate, up, gate_bias, up_bias)

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return RMSNorm(weight, eps)

    def attention(self, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape) -> Attention:
        tables = rotary_tables(cos, sin, self.dtype)
        return PlainAttention(tables, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.scale)


class BlockOperators:
    """Implements :class:`Operators`: as others do, but for attention from tensors that describe the step.

    Args:
        others: make everything else.
        dtype: of the model.
        attend: attention over the block cache.
        store: what is done with its rows before.
    """

    def __init__(self, others: Operators, dtype: torch.dtype, attend: AttendBlocks, store: StoreRows) -> None:
        self.linear, self.gate, self.norm = others.linear, others.gate, others.norm
        self._dtype = dtype
        self._attend = attend
        self._store = store

    def attention(self, cos: torch.Tensor, sin: torch.Tensor, shape: HeadShape) -> Attention:
        tables = rotary_tables(cos, sin, self._dtype)
        return BlockAttention(tables, shape, self._attend, self._store)


def rotary_tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> Rotary:
    """The tables in the form that torch's operators rotate with; rounded as the library rounds them."""
    first_half, second_half = sin.chunk(2, -1)
    signed_sin = torch.cat((-first_half, second_half), -1)
    return Rotary(cos.unsqueeze(1).to(dtype).contiguous(), signed_sin.unsqueeze(1).to(dtype))


def cpu_operators(dtype: torch.dtype, num_threads: int) -> Operators:
    """Our kernels, or torch's operators where numba is missing."""
    try:
        from specray.engine.model.operators_cpu import KernelOperators
    except ImportError as error:
        _log.warning(
            "numba cannot be imported (%s): layers run with torch's operators instead of compiled kernels; "
            "forwards take longer, those of small models several times as long",
            error,
        )
        return TorchOperators(dtype)
    return KernelOperators(dtype, num_threads)


def cuda_operators(dtype: torch.dtype, device: torch.device) -> Operators:
    """Torch's operators; with Triton, where it works, for what lies between the matrix products."""
    try:
        from specray.engine.model.operators_triton import TritonOperators, check_gate

        check_gate(device, dtype)
    # Whatever a compiler or a driver raises: there is another way.
    except Exception as error:
        _log.info("activations run with torch's operators: %s: %s", type(error).__name__, error)
        return TorchOperators(dtype)
    return TritonOperators(dtype)
