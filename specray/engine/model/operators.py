"""The parts of the decoder on one device: linear layers, norms and attention.

On CPU these are kernels of our own, compiled by numba, where numba is installed; elsewhere torch's operators.
Nothing of numba is imported where it is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from specray.engine.activation import Activation, Joint
from specray.engine.attention.base import Attention
from specray.engine.attention.paged import AttendPaged, PagedAttention, StoreRows
from specray.engine.model.decoder import Norm, RowGate
from specray.engine.model.layers.delta import DeltaInputs, Mixer
from specray.engine.model.layers.experts.layer import ExpertLayer, ExpertMlp
from specray.engine.model.layers.experts.routing import Router
from specray.engine.model.layers.latent.projections import HeadProduct, LatentQueries
from specray.engine.model.layers.mixer_lowering import PlainMixer
from specray.engine.model.layers.normed import Rows
from specray.engine.model.linear import Gate, Linear
from specray.engine.model.operators_torch import TorchOperators, by_layer
from specray.engine.step import HeadShape
from specray.engine.weights.stored_weight import Weight
from specray.errors import ConfigError

if TYPE_CHECKING:
    from specray.engine.cpu.thread_pool import ThreadPool
    from specray.engine.model.rotary import RotaryTables

_log = logging.getLogger(__name__)


class Operators(Protocol):
    """Makes the parts of a decoder. The caller drops its own reference to a weight: parts may be copies.

    What a file stores comes as it is: operators without kernels for it compute with its values in the model's
    data type.
    """

    def linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """``[out_features, in_features]``, and ``[out_features]``; a stored weight's bias may be float32."""
        ...

    def gate(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: torch.Tensor | None,
        up_bias: torch.Tensor | None,
        joint: Joint = Activation.SILU,
    ) -> Gate:
        """Makes a gated pair: both weights are stored, or both are tensors."""
        ...

    def router(
        self, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes the layer whose numbers choose experts: it is not quantised."""
        ...

    def experts(self, router: Router, experts: Sequence[ExpertMlp]) -> ExpertLayer:
        """Makes a layer of experts from a router and MLPs of one shape, whose layers it has made."""
        ...

    def row_gate(self, linear: Linear, size: int, width: int = 1) -> RowGate:
        """Makes a gate of what is attended to, of a layer that it has made, with ``size`` outputs.

        Each is of ``width`` numbers of what is attended to.
        """
        ...

    def mixer(self, mixer: PlainMixer) -> Mixer:
        """Makes what computes a recurrent layer as this one does."""
        ...

    def squared(self, linear: Linear) -> Gate:
        """Makes ``max(linear(x), 0)^2``, an MLP's first part without a gate, of a layer that it has made."""
        ...

    def head_product(self, weight: torch.Tensor) -> HeadProduct:
        """Makes a linear layer of each head, ``[num_heads, in_features, out_features]``."""
        ...

    def inputs(self, made: LatentQueries | DeltaInputs) -> Rows:
        """Makes what computes a layer's inputs in steps as this does, of parts that it has made."""
        ...

    def norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """A norm with this weight, which is float32 or in the model's data type."""
        ...

    def attention(self, tables: RotaryTables, shape: HeadShape) -> Attention: ...


class PagedOperators:
    """Implements :class:`Operators`: as others do, but for attention from tensors that describe the step.

    Args:
        others: make everything else.
        dtype: of the model.
        attend: attention over the block cache.
        store: what is done with its rows before.
    """

    def __init__(self, others: Operators, dtype: torch.dtype, attend: AttendPaged, store: StoreRows) -> None:
        self.linear, self.gate, self.norm = others.linear, others.gate, others.norm
        self.router, self.experts = others.router, others.experts
        self.row_gate, self.mixer, self.squared = others.row_gate, others.mixer, others.squared
        self.head_product, self.inputs = others.head_product, others.inputs
        self._dtype = dtype
        self._attend = attend
        self._store = store

    def attention(self, tables: RotaryTables, shape: HeadShape) -> Attention:
        return by_layer(
            tables,
            self._dtype,
            lambda rotary: PagedAttention(rotary, shape, self._attend, self._store),
        )


def cpu_operators(dtype: torch.dtype, num_threads: int, thread_pool: ThreadPool | None = None) -> Operators:
    """Our kernels, or torch's operators where numba is missing.

    Args:
        thread_pool: of a model next to which this one runs; None: one of its own.
    """
    try:
        from specray.engine.model.operators_cpu import KernelOperators
    except ImportError as error:
        _log.warning(
            "numba cannot be imported (%s): layers run with torch's operators instead of compiled kernels; "
            "forwards take longer, those of small models several times as long",
            error,
        )
        return TorchOperators(dtype)
    return KernelOperators(dtype, num_threads, thread_pool)


def cuda_operators(dtype: torch.dtype, device: torch.device, *, is_fixed: bool = False) -> Operators:
    """Torch's operators; with Triton, where it works, for what lies between the matrix products.

    Args:
        is_fixed: Triton's for products and norms, too: a row's bits depend on nothing but the row.

    Raises:
        ConfigError: ``is_fixed``, and these do not work here.
    """
    if is_fixed:
        return _fixed_operators(dtype, device)
    try:
        from specray.engine.model.operators_triton import TritonOperators, check_gate

        check_gate(device, dtype)
    # Whatever a compiler or a driver raises: there is another way.
    except Exception as error:
        _log.info("activations run with torch's operators: %s: %s", type(error).__name__, error)
        return TorchOperators(dtype)
    return TritonOperators(dtype)


def _fixed_operators(dtype: torch.dtype, device: torch.device) -> Operators:
    try:
        from specray.engine.model.operators_fixed import FixedOperators, check_rows

        check_rows(device, dtype)
    # Whatever a compiler or a driver raises.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"target.deterministic is 'on', whose products do not work here: {reason}; allowed here: 'off'"
        ) from error
    return FixedOperators(dtype)
