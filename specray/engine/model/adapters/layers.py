"""Linear layers with what adapters add to them; the layers themselves stay as they are.

A decoder with adapters is a second forward over the same weights: steps in which no row has an adapter run
the first, as if there were none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import torch

from specray.engine.model.adapters.rows import AdapterRows, RowPlan
from specray.engine.model.decoder import RowGate
from specray.engine.model.layers.latent.projections import LatentOutput
from specray.engine.model.layers.normed import NormedProjection, NormedQueries
from specray.engine.model.layers.projections import ReducedLinear
from specray.engine.model.linear import Linear

if TYPE_CHECKING:
    from specray.engine.cpu.low_rank_layer import KernelLowRank
    from specray.engine.cpu.thread_pool import ThreadPool


Packed = tuple[torch.Tensor, ...]
"""What an adapter adds to a layer, as the layer's kernels read it."""


class LowRank(Protocol):
    """What each slot's adapter adds to one layer."""

    def pack(self, down: torch.Tensor, ups: Sequence[torch.Tensor]) -> Packed:
        """``[rank, in_features]``, and ``[out_features, rank]``, two of a pair; for any thread."""
        ...

    def put(self, slot: int, packed: Packed) -> None:
        """Gives a slot an adapter."""
        ...

    def clear(self, slot: int) -> None:
        """The slot has nothing to add here."""
        ...


@runtime_checkable
class Changeable(Protocol):
    """A linear layer or a gated pair whose kernel adds to its sums, before all else."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def thread_pool(self) -> ThreadPool: ...

    @property
    def changed(self) -> Callable[..., torch.Tensor]:
        """Takes rows, what is added to their sums, and of a linear layer maybe a summand."""
        ...


class SplitGate(Protocol):
    """A gated pair in two steps."""

    def products(self, rows: torch.Tensor) -> torch.Tensor:
        """``[num_rows, 2 * out_features]``, the gate's first."""
        ...

    def joined(self, both: torch.Tensor) -> torch.Tensor:
        """``[num_rows, out_features]``."""
        ...


class AddedLowRank(LowRank, Protocol):
    """What adapters add to outputs that are there."""

    def add(self, out: torch.Tensor, rows: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """Adds to ``[num_rows, out_features]`` in place; rows without adapters keep their bits."""
        ...


@dataclass(frozen=True, slots=True)
class KernelLayer:
    """A linear layer, or a gated pair, as kernels of the CPU."""

    base: Changeable
    low_rank: KernelLowRank
    rows: AdapterRows

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.base.changed(rows, self._delta(rows))

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self.base.changed(rows, self._delta(rows), summand)

    def _delta(self, rows: torch.Tensor) -> torch.Tensor:
        plan = self.rows.of(len(rows))
        return self.low_rank(rows, plan.segments, plan.order)


@dataclass(frozen=True, slots=True)
class AddedLinear:
    """A linear layer whose outputs, as they are stored, adapters add to."""

    base: Linear
    low_rank: AddedLowRank
    rows: AdapterRows

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.low_rank.add(self.base(rows), rows, self.rows.of(len(rows)))

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return self.low_rank.add(self.base.plus(rows, summand), rows, self.rows.of(len(rows)))


@dataclass(frozen=True, slots=True)
class AddedGate:
    """A gated pair, with what adapters add before both halves are joined."""

    base: SplitGate
    low_rank: AddedLowRank
    rows: AdapterRows

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        both = self.low_rank.add(self.base.products(rows), rows, self.rows.of(len(rows)))
        return self.base.joined(both)


@dataclass(frozen=True, slots=True)
class TorchLowRank:
    """Implements :class:`AddedLowRank` with torch's operators, adapter by adapter.

    Args:
        device, dtype: of the matrices.
    """

    device: torch.device
    dtype: torch.dtype
    own: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Tensors by slot."""

    def pack(self, down: torch.Tensor, ups: Sequence[torch.Tensor]) -> Packed:
        return tuple(each.to(self.dtype) for each in (down, torch.cat(tuple(ups))))

    def put(self, slot: int, packed: Packed) -> None:
        down, up = packed
        self.own[slot] = down.to(self.device), up.to(self.device)

    def clear(self, slot: int) -> None:
        self.own.pop(slot, None)

    def add(self, out: torch.Tensor, rows: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        for slot, index in plan.groups():
            if slot in self.own:
                down, up = (each.float() for each in self.own[slot])
                # Row by row: torch chooses a kernel, and with it the bits, by the number of rows.
                added = torch.stack([up @ (down @ row) for row in rows[index].float()])
                out[index] = (out[index].float() + added).to(out.dtype)
        return out


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One linear layer as adapters see it."""

    in_features: int
    sizes: tuple[int, ...]
    """Output features; of a gated pair those of the gate, and of up."""
    max_rank: int
    """Most ranks of an adapter, all modules that the layer is made of together."""
    max_own: int
    """Most ranks of one of these modules."""


MakeLowRank = Callable[[LayerShape], AddedLowRank]
"""Makes what adapters add to a layer's outputs."""


def adapted(
    layer: object, shape: LayerShape, rows: AdapterRows, num_slots: int, make: MakeLowRank
) -> tuple[Any, LowRank]:
    """A linear layer of the decoder, or what is around one, with adapters; and what these add to it.

    Args:
        make: for layers without kernels that begin with what is added.
    """
    if isinstance(layer, RowGate):
        linear, low_rank = adapted(layer.linear, shape, rows, num_slots, make)
        return layer.with_linear(linear), low_rank
    if isinstance(layer, NormedProjection | NormedQueries | LatentOutput):
        linear, low_rank = adapted(layer.linear, shape, rows, num_slots, make)
        return replace(layer, linear=linear), low_rank
    if isinstance(layer, ReducedLinear):
        local, low_rank = adapted(layer.local, shape, rows, num_slots, make)
        return replace(layer, local=local), low_rank
    if isinstance(layer, Changeable):
        from specray.engine.cpu.low_rank_layer import KernelLowRank

        kernels = KernelLowRank(
            shape.in_features,
            shape.sizes,
            num_slots=num_slots,
            max_rank=shape.max_rank,
            dtype=layer.dtype,
            thread_pool=layer.thread_pool,
        )
        return KernelLayer(layer, kernels, rows), kernels
    added = make(shape)
    kind = AddedLinear if len(shape.sizes) == 1 else AddedGate
    return kind(cast("Any", layer), added, rows), added
