"""A layer of experts on CUDA, in Triton's products of all experts at once. Importing it needs triton.

The first product has gate, up and activation in one; the second writes each pair's output, and a last kernel
weighs and adds them up in the order of choice. No sum is split and no place is written twice. How many input
features are multiplied at once depends on the layer alone. Experts whose weights lie otherwise have a product
of their own, which leaves out the tiles of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from specray.engine.activation import Joint
from specray.engine.cuda.align import Alignment
from specray.engine.cuda.align_triton import align_pairs, count_hits
from specray.engine.cuda.epilogue import Epilogue, PlainWeight
from specray.engine.cuda.linear import Multiplied, ProductGate, ProductLinear, multiply_any, stack
from specray.engine.cuda.tiles import FREE, TileRule
from specray.engine.model.layers.experts.layer import ExpertMlp
from specray.engine.model.linear import JoinedGate, PlainLinear, joined


@triton.jit
def _add_up(outputs, weights, out, SIZE: tl.constexpr, NUM_CHOSEN: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < SIZE
    total = tl.zeros([COLUMNS], tl.float32)
    for place in range(NUM_CHOSEN):
        pair = row * NUM_CHOSEN + place
        numbers = tl.load(outputs + pair * SIZE + column, mask=is_column, other=0.0).to(tl.float32)
        total += numbers * tl.load(weights + pair)
    tl.store(out + row * SIZE + column, total.to(out.dtype.element_ty), mask=is_column)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Some output features of the experts whose weights of these lie alike."""

    weight: Multiplied
    """Weights of these experts, which are the first dimension of its tensors."""
    bias: torch.Tensor | None
    """``[num_alike, size]``."""
    places: torch.Tensor | None
    """int32 ``[num_experts + 1]``: the place of each expert in ``weight``, or -1; None: all are there."""

    def of(self, tiles: Alignment) -> Alignment:
        """The tiles, those of other experts with the number -1."""
        if self.places is None:
            return tiles
        return replace(tiles, experts=self.places[tiles.experts.long()])


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """One linear layer, or a gated pair, of every expert."""

    parts: tuple[tuple[_Alike, ...], ...]
    """Parts of the output features, side by side; where there are several, torch joins gate and up."""
    joint: Joint | None
    """How gate and up are joined; None: a linear layer."""

    @classmethod
    def of(cls, layers: Sequence[object]) -> GroupedProduct | None:
        """The layers of all experts as one; None: some are of kinds that are not known here."""
        found = [_weights_of(layer) for layer in layers]
        if not all(found):
            return None
        joint = _joint_of(layers[0])
        if len({len(weights) for weights in found}) > 1:
            found = [_halves(weights) for weights in found]
        return cls(
            tuple(
                _of_all([weights[place] for weights in found], layers, sum(w.size for w in found[0][:place]))
                for place in range(len(found[0]))
            ),
            joint,
        )

    def __call__(self, rows: torch.Tensor, tiles: Alignment, num_pairs: int) -> torch.Tensor:
        """Multiplies the row of each pair by its expert.

        Args:
            rows: ``[num_rows, in_features]``; pair ``i`` has row ``i // (num_pairs / num_rows)``.

        Returns:
            ``[num_pairs, size]``, by pair.
        """
        is_one = len(self.parts) == 1
        own_joint = self.joint if is_one else None
        size = sum(part[0].weight.size for part in self.parts) // (1 if own_joint is None else 2)
        out = torch.empty(num_pairs, size, dtype=rows.dtype, device=rows.device)
        first = 0
        for part in self.parts:
            columns = out if is_one else out[:, first : first + part[0].weight.size]
            for some in part:
                epilogue = Epilogue(some.bias, joint=own_joint)
                multiply_any(rows, some.weight, columns, epilogue, tiles=some.of(tiles))
            first += part[0].weight.size
        return out if is_one or self.joint is None else joined(out, self.joint)


def _weights_of(layer: object) -> tuple[Multiplied, ...]:
    """Weights of output features one beside the other; empty: the layer is of no kind that is known."""
    if isinstance(layer, JoinedGate):
        return _weights_of(layer.linear)
    if isinstance(layer, PlainLinear):
        return (PlainWeight(layer.weight),)
    if isinstance(layer, ProductLinear):
        return layer.parts
    return (layer.both,) if isinstance(layer, ProductGate) else ()


def _joint_of(layer: object) -> Joint | None:
    return layer.joint if isinstance(layer, JoinedGate | ProductGate) else None


def _bias_of(layer: object) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(
        layer.linear if isinstance(layer, JoinedGate) else layer, "bias", None
    )
    return bias


def _halves(weights: tuple[Multiplied, ...]) -> tuple[Multiplied, ...]:
    """Gate and up of an expert, one weight or two."""
    if len(weights) > 1:
        return weights
    size = weights[0].size // 2
    return weights[0].select(slice(0, size)), weights[0].select(slice(size, 2 * size))


def _of_all(weights: Sequence[Multiplied], layers: Sequence[object], first: int) -> tuple[_Alike, ...]:
    """The same output features of all experts, in as few weights as can be."""
    columns = slice(first, first + weights[0].size)
    biases = [None if (bias := _bias_of(layer)) is None else bias[columns] for layer in layers]
    kinds: list[list[int]] = []
    for expert, weight in enumerate(weights):
        own = next((kind for kind in kinds if weights[kind[0]].is_like(weight)), None)
        if own is None:
            kinds.append([expert])
        else:
            own.append(expert)
    made = []
    for kind in kinds:
        some = [bias for bias in (biases[expert] for expert in kind) if bias is not None]
        bias, places = torch.stack(some) if some else None, None
        if len(kinds) > 1:
            # One more for tiles that no expert has.
            places = torch.full((len(weights) + 1,), -1, dtype=torch.int32)
            places[kind] = torch.arange(len(kind), dtype=torch.int32)
            places = places.to(weights[0].device)
        made.append(_Alike(stack([weights[expert] for expert in kind]), bias, places))
    return tuple(made)


def add_up(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighs and adds up what a row's experts gave, in the order of choice, in float32.

    Args:
        outputs: ``[num_rows * num_chosen, size]``, by pair.
        weights: float32 ``[num_rows, num_chosen]``.

    Returns:
        ``[num_rows, size]``, of the outputs' type.
    """
    (num_rows, num_chosen), size = weights.shape, outputs.shape[1]
    out = torch.empty(num_rows, size, dtype=outputs.dtype, device=outputs.device)
    columns = min(1024, triton.next_power_of_2(size))
    _add_up[(num_rows, triton.cdiv(size, columns))](
        outputs, weights.contiguous(), out, SIZE=size, NUM_CHOSEN=num_chosen, COLUMNS=columns
    )
    return out


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """Implements ``layers.experts.ExpertMlps``: kernels whose shapes do not depend on the routing."""

    num_experts: int
    gate: GroupedProduct
    down: GroupedProduct
    rule: TileRule = FREE

    @classmethod
    def of(cls, experts: Sequence[ExpertMlp], rule: TileRule = FREE) -> TritonExperts | None:
        """The experts as one; None: some are of kinds that are not known here."""
        gate, down = (
            GroupedProduct.of([getattr(each, name) for each in experts]) for name in ("gate", "down")
        )
        return None if gate is None or down is None else cls(len(experts), gate, down, rule)

    @property
    def can_be_captured(self) -> bool:
        return True

    @property
    def is_fixed(self) -> bool:
        return self.rule.is_fixed

    def __call__(
        self,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        hits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if hits is not None:
            count_hits(chosen, self.num_experts, hits)
        tiles = align_pairs(chosen, self.num_experts, self.rule.grouped_rows(len(rows)))
        gated = self.gate(rows, tiles, chosen.numel())
        return add_up(self.down(gated, tiles, chosen.numel()), weights)
