"""Products of aligned pairs with 16- and 32-bit experts, as Triton kernels. Importing it needs triton.

The first product has gate, up and activation in one; the second writes each pair's output, and a last kernel
weighs and adds them up in the order of choice. No sum is split and no place is written twice. How many input
features are multiplied at once depends on the layer alone: a row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cuda.align import Alignment
from specray.engine.cuda.align_triton import align_pairs, count_hits

TILE_ROWS = 16
"""Rows of a tile: the fewest that the matrix unit takes. Most experts of a small step have one or two."""
_PROMPT_ROWS = 512
"""Rows up to which tiles are so small; longer steps are prompts, which products bind, not weights."""
_PROMPT_TILE_ROWS = 64


@triton.jit
def joined(
    gate, up, HAS_TANH: tl.constexpr, HAS_CLAMP: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr
):
    """``activation(gate) * up`` of float32 numbers, as ``activation.Activation`` and ``Clamp`` say."""
    factor = up
    exponent = gate
    if HAS_CLAMP:
        gate = tl.minimum(gate, LIMIT)
        factor = tl.minimum(tl.maximum(up, -LIMIT), LIMIT) + 1.0
        exponent = gate * GAIN
    if HAS_TANH:
        # As in ``cpu.gemm.epilogue``: twice the hyperbolic tangent's argument.
        exponent = gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate)
    return gate / (1.0 + tl.exp(-exponent)) * factor


@triton.jit
def _product(
    rows,
    weight,
    bias,
    out,
    pairs,
    experts,
    num_used,
    num_pairs,
    PAIRS_PER_ROW: tl.constexpr,
    SIZE: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_TANH: tl.constexpr,
    HAS_CLAMP: tl.constexpr,
    GAIN: tl.constexpr,
    LIMIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile < tl.load(num_used):
        expert = tl.load(experts + tile).to(tl.int64)
        pair = tl.load(pairs + tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
        is_pair = pair < num_pairs
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < SIZE
        depth = tl.arange(0, DEPTH)
        layers: tl.constexpr = 2 if IS_GATED else 1
        own_rows = rows + (pair // PAIRS_PER_ROW)[:, None] * IN_FEATURES + depth[None, :]
        own_weight = weight + expert * (layers * SIZE * IN_FEATURES)
        own_weight += column[None, :].to(tl.int64) * IN_FEATURES + depth[:, None]
        first = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
        second = tl.zeros([TILE_ROWS, COLUMNS], tl.float32)
        for start in range(0, IN_FEATURES, DEPTH):
            is_feature = start + depth < IN_FEATURES
            some = tl.load(own_rows + start, mask=is_pair[:, None] & is_feature[None, :], other=0.0)
            is_weight = is_column[None, :] & is_feature[:, None]
            numbers = tl.load(own_weight + start, mask=is_weight, other=0.0)
            first = tl.dot(some, numbers, first, input_precision=PRECISION)
            if IS_GATED:
                others = tl.load(own_weight + SIZE * IN_FEATURES + start, mask=is_weight, other=0.0)
                second = tl.dot(some, others, second, input_precision=PRECISION)
        if HAS_BIAS:
            own_bias = bias + expert * (layers * SIZE) + column
            first += tl.load(own_bias, mask=is_column, other=0.0).to(tl.float32)[None, :]
            if IS_GATED:
                second += tl.load(own_bias + SIZE, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if IS_GATED:
            first = joined(first, second, HAS_TANH, HAS_CLAMP, GAIN, LIMIT)
        place = out + pair[:, None] * SIZE + column[None, :]
        tl.store(place, first.to(out.dtype.element_ty), mask=is_pair[:, None] & is_column[None, :])


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
class GroupedProduct:
    """One linear layer, or a gated pair, of every expert.

    Args:
        weight: ``[num_experts, layers * size, in_features]``; the gate's output features before those of up.
        bias: ``[num_experts, layers * size]``, or None.
        joint: how gate and up are joined; None: a linear layer.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    joint: Joint | None

    def __call__(self, rows: torch.Tensor, alignment: Alignment, num_pairs: int) -> torch.Tensor:
        """Multiplies the row of each pair by its expert.

        Args:
            rows: ``[num_rows, in_features]``; pair ``i`` has row ``i // (num_pairs / num_rows)``.

        Returns:
            ``[num_pairs, size]``, by pair.
        """
        in_features, joint = self.weight.shape[2], self.joint
        size = self.weight.shape[1] // (1 if joint is None else 2)
        out = torch.empty(num_pairs, size, dtype=rows.dtype, device=rows.device)
        columns = 32 if alignment.tile_rows == TILE_ROWS else 64
        clamp = joint if isinstance(joint, Clamp) else None
        _product[(alignment.num_tiles, triton.cdiv(size, columns))](
            rows.contiguous(),
            self.weight,
            self.weight if self.bias is None else self.bias,
            out,
            alignment.pairs,
            alignment.experts,
            alignment.num_used,
            num_pairs,
            PAIRS_PER_ROW=num_pairs // len(rows),
            SIZE=size,
            IN_FEATURES=in_features,
            IS_GATED=joint is not None,
            HAS_BIAS=self.bias is not None,
            HAS_TANH=joint is Activation.GELU_TANH,
            HAS_CLAMP=clamp is not None,
            GAIN=0.0 if clamp is None else clamp.gain,
            LIMIT=0.0 if clamp is None else clamp.limit,
            TILE_ROWS=alignment.tile_rows,
            COLUMNS=columns,
            DEPTH=depth_of(in_features),
            # Products of float32 are whole ones, not those of its upper 19 bits.
            PRECISION="ieee",
            num_warps=4,
            num_stages=4,
        )
        return out


def depth_of(in_features: int) -> int:
    """Input features at once: of the layer alone, so that every row is summed in one order."""
    return min(128, max(16, 1 << (in_features - 1).bit_length()))


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

    gate: GroupedProduct
    down: GroupedProduct

    @property
    def can_be_captured(self) -> bool:
        return True

    def __call__(
        self,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        hits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if hits is not None:
            count_hits(chosen, len(self.gate.weight), hits)
        if len(rows) == 0:
            return torch.empty_like(rows)
        tile_rows = TILE_ROWS if len(rows) <= _PROMPT_ROWS else _PROMPT_TILE_ROWS
        alignment = align_pairs(chosen, len(self.gate.weight), tile_rows)
        num_pairs = chosen.numel()
        gated = self.gate(rows, alignment, num_pairs)
        return add_up(self.down(gated, alignment, num_pairs), weights)
