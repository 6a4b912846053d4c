"""Low-rank products of rows with their adapters, as Triton kernels. Importing it needs triton.

Punica (Chen et al., 2023) calls them shrink and expand. Each program has one row, so a row's bits are the
same in any step, and rows without adapters return at once. Slots are tensors: a captured call goes on right
whatever adapters its rows have. Prompts, whose rows would each read the matrices anew, are torch's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl

from specray.engine.activation import Joint
from specray.engine.cuda.epilogue import joint_constants
from specray.engine.cuda.epilogue_triton import joined
from specray.engine.cuda.tiles import depth_of

_RANKS = 16
"""Ranks of a program, and at once."""
_COLUMNS = 64
"""Output features of a program."""
_MANY_ROWS = 64
"""Rows of a step beyond which products of all rows of an adapter are faster."""


@triton.jit
def _down(
    rows, down, ranks, slots, turned, row_stride, in_features, max_rank,
    RANKS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    first = tl.program_id(1) * RANKS
    if (slot >= 0) & (first < tl.load(ranks + tl.maximum(slot, 0))):
        rank, depth = first + tl.arange(0, RANKS), tl.arange(0, DEPTH)
        is_rank = rank < max_rank
        own = down + (slot * max_rank + rank)[:, None] * in_features + depth[None, :]
        total = tl.zeros([RANKS], tl.float32)
        for start in range(0, in_features, DEPTH):
            is_feature = start + depth < in_features
            numbers = tl.load(rows + row * row_stride + start + depth, mask=is_feature, other=0.0)
            weights = tl.load(own + start, mask=is_rank[:, None] & is_feature[None, :], other=0.0)
            total += tl.sum(weights.to(tl.float32) * numbers.to(tl.float32)[None, :], 1)
        tl.store(turned + row * max_rank + rank, total, mask=is_rank)


@triton.jit
def _up(
    turned, up, firsts, ranks, slots, out, out_stride, size, max_rank, max_own,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    most = tl.load(ranks + tl.maximum(slot, 0))
    if (slot >= 0) & (most > 0):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < size
        begin = tl.load(firsts + slot * size + column, mask=is_column, other=0)
        own = up + (slot * size + column)[:, None] * max_own
        total = tl.zeros([COLUMNS], tl.float32)
        for start in range(0, max_own, RANKS):
            rank = start + tl.arange(0, RANKS)
            source = begin[:, None] + rank[None, :]
            is_used = is_column[:, None] & (rank < max_own)[None, :] & (source < most)
            numbers = tl.load(turned + row * max_rank + source, mask=is_used, other=0.0)
            weights = tl.load(own + rank[None, :], mask=is_used, other=0.0)
            total += tl.sum(weights.to(tl.float32) * numbers, 1)
        place = out + row * out_stride + column
        total += tl.load(place, mask=is_column, other=0.0).to(tl.float32)
        tl.store(place, total.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _join(
    both, out, size, HAS_TANH: tl.constexpr, HAS_CLAMP: tl.constexpr, GAIN: tl.constexpr, LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    gate = tl.load(both + row * 2 * size + column, mask=is_column, other=0.0)
    up = tl.load(both + row * 2 * size + size + column, mask=is_column, other=0.0)
    product = joined(gate, up, HAS_TANH, HAS_CLAMP, GAIN, LIMIT)
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=is_column)


def join(both: torch.Tensor, joint: Joint, dtype: torch.dtype) -> torch.Tensor:
    """Joins float32 sums of a gated pair ``[num_rows, 2 * size]``, as the epilogue of one product does."""
    num_rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty(num_rows, size, dtype=dtype, device=both.device)
    if num_rows:
        _join[(num_rows, triton.cdiv(size, 1024))](both, out, size, COLUMNS=1024, **joint_constants(joint))
    return out


class Plan(Protocol):
    """See ``adapters.rows.RowPlan``."""

    slots: torch.Tensor

    def groups(self) -> list[tuple[int, torch.Tensor]]: ...


class TritonLowRank:
    """Implements ``adapters.layers.AddedLowRank``.

    Args:
        sizes: output features; of a gated pair those of the gate, and of up.
        max_rank: most ranks of an adapter here.
        max_own: most ranks of one of the modules that the layer is made of.
        is_fixed: whether a row's bits must not depend on the step, prompts included.
    """

    def __init__(
        self,
        in_features: int,
        sizes: tuple[int, ...],
        *,
        num_slots: int,
        max_rank: int,
        max_own: int,
        dtype: torch.dtype,
        device: torch.device,
        is_fixed: bool = False,
    ) -> None:
        size = sum(sizes)
        self._down = torch.zeros(num_slots, max_rank, in_features, dtype=dtype, device=device)
        self._up = torch.zeros(num_slots, size, max_own, dtype=dtype, device=device)
        self._firsts = torch.zeros(num_slots, size, dtype=torch.int64, device=device)
        """First of the ranks that an output feature has."""
        self._ranks = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._has_some = [False] * num_slots
        self._is_fixed = is_fixed

    def pack(self, down: torch.Tensor, ups: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        up, rank, max_own = torch.cat(tuple(ups)), down.shape[0], self._up.shape[2]
        is_used = up != 0
        firsts = is_used.int().argmax(1)
        places = firsts[:, None] + torch.arange(max_own)
        own = up.gather(1, places.clamp(max=rank - 1)).where(places < rank, torch.zeros(()))
        assert int((own != 0).sum()) == int(is_used.sum()), "a feature has the ranks of one module"
        return down.to(self._down.dtype), own.to(self._up.dtype), firsts

    def put(self, slot: int, packed: tuple[torch.Tensor, ...]) -> None:
        down, own, firsts = packed
        self._down[slot, : len(down)] = down.to(self._down.device)
        self._up[slot] = own.to(self._up.device)
        self._firsts[slot] = firsts.to(self._firsts.device)
        self._ranks[slot] = len(down)
        self._has_some[slot] = True

    def clear(self, slot: int) -> None:
        self._ranks[slot] = 0
        self._has_some[slot] = False

    def add(self, out: torch.Tensor, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Adds to ``[num_rows, out_features]`` in place."""
        num_rows, size = out.shape
        if num_rows == 0:
            return out
        is_captured = out.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if num_rows > _MANY_ROWS and not is_captured and not self._is_fixed:
            return self._add_groups(out, rows, plan)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        max_rank, in_features = self._down.shape[1:]
        turned = torch.empty(num_rows, max_rank, dtype=torch.float32, device=out.device)
        _down[(num_rows, triton.cdiv(max_rank, _RANKS))](
            rows, self._down, self._ranks, plan.slots, turned, rows.stride(0), in_features, max_rank,
            RANKS=_RANKS, DEPTH=depth_of(in_features, rows.itemsize), num_warps=4,
        )  # fmt: skip
        _up[(num_rows, triton.cdiv(size, _COLUMNS))](
            turned, self._up, self._firsts, self._ranks, plan.slots, out, out.stride(0), size, max_rank,
            self._up.shape[2], RANKS=_RANKS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
        return out

    def _add_groups(self, out: torch.Tensor, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
        (max_rank, _), max_own = self._down.shape[1:], self._up.shape[2]
        places = torch.arange(max_own, device=out.device)
        for slot, index in plan.groups():
            if not self._has_some[slot]:
                continue
            whole = self._up.new_zeros(out.shape[1], max_rank + max_own)
            whole.scatter_(1, self._firsts[slot][:, None] + places, self._up[slot])
            turned = rows[index] @ self._down[slot].t()
            out[index] += (turned @ whole[:, :max_rank].t()).to(out.dtype)
        return out


@torch.inference_mode()
def check_low_rank(device: torch.device, dtype: torch.dtype) -> None:
    """Compares a few products with torch's. Raises ArithmeticError where they differ."""
    generator = torch.Generator().manual_seed(0)
    made = TritonLowRank(72, (50, 30), num_slots=3, max_rank=40, max_own=20, dtype=dtype, device=device)
    down, first, second = (torch.randn(size, generator=generator) for size in ((33, 72), (50, 20), (30, 13)))
    ups = torch.zeros(50, 33), torch.zeros(30, 33)
    ups[0][:, :20], ups[1][:, 20:] = first, second
    made.put(1, made.pack(down, ups))

    class Slots:
        slots = torch.tensor([-1, 1, 2, 1], device=device)

        def groups(self) -> list[tuple[int, torch.Tensor]]:
            return []

    rows, out = (torch.randn(4, size, generator=generator).to(device, dtype) for size in (72, 80))
    expected = out.double().cpu()
    expected[[1, 3]] += rows[[1, 3]].double().cpu() @ (torch.cat(ups).double() @ down.double()).t()
    found = made.add(out, rows, Slots()).double().cpu()
    error = float((found - expected).abs().max() / expected.abs().max())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    if not error < tolerance:
        raise ArithmeticError(f"its numbers are off by {error:.2g}; allowed: {tolerance}")
