"""Attention over the block cache as a Triton kernel. Importing it needs triton.

One program takes some rows of one sequence, with all query heads that share a kv head, through a part of what
they see; the parts are joined by a second kernel. So a step of few sequences keeps all multiprocessors busy,
and keys and values are read once for all rows of a verification (Dao et al.: *Flash-Decoding for long-context
inference*, 2023). What all rows of a program see needs no mask, and that is nearly everything: only after it
do windows, ancestors and the rows' own places decide. Sums are float32, and so are products of float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specray.engine.step import PagedBatch
from specray.engine.visibility import within_window

_MAX_SPLITS = 32
"""Most parts of one sequence, a power of two."""
MIN_SPLIT_PLACES = 128
"""KV indices per part, at least; a shorter part costs more to join than it saves."""
_MAX_TILE = 64
"""Rows times query heads of a program, at most; the matrix product needs at least 16."""
_FIXED_TILE = 32
"""Rows times query heads of a program, where every step has the same; more are other instructions."""
LOG2_E = 1.4426950408889634


@triton.jit
def _load_places(
    layer, table, key, is_key, slot_stride, kv_head, dim, is_dim, IS_WHOLE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys, transposed, and values of one kv head at some KV indices; zeros where there are none."""
    if IS_WHOLE:
        block = tl.load(table + key // BLOCK_SIZE)
    else:
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0)
    slot = (block.to(tl.int64) * BLOCK_SIZE + key % BLOCK_SIZE) * slot_stride + kv_head * HEAD_DIM
    key_at = layer + slot[None, :] + dim[:, None]
    value_at = layer + slot[:, None] + NUM_KV_HEADS * HEAD_DIM + dim[None, :]
    if IS_WHOLE:
        keys = tl.load(key_at, mask=is_dim[:, None], other=0.0)
        values = tl.load(value_at, mask=is_dim[None, :], other=0.0)
    else:
        keys = tl.load(key_at, mask=is_key[None, :] & is_dim[:, None], other=0.0)
        values = tl.load(value_at, mask=is_key[:, None] & is_dim[None, :], other=0.0)
    return keys, values


@triton.jit
def weigh(scores, values, highest, total, mixed):
    """The running softmax of more scores: highest score, sum of weights and weighted values of each row."""
    higher = tl.maximum(highest, tl.max(scores, 1))
    # Where nothing was seen yet: minus infinity less itself would be no number.
    anchor = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores - anchor[:, None])
    kept = tl.exp2(highest - anchor)
    total = total * kept + tl.sum(weights, 1)
    mixed = mixed * kept[:, None]
    mixed += tl.dot(weights.to(values.dtype), values, input_precision="ieee")
    return higher, total, mixed


@triton.jit
def on_path(key, prefix_len, first_index, bits):
    """KV indices of the tokens at some positions of one row's path: its prefix, then its ancestors."""
    depth = key - prefix_len
    bit = tl.arange(0, 64)
    is_set = ((bits >> bit.to(tl.int64)) & 1).to(tl.int32)
    rank = tl.cumsum(is_set, 0) - is_set
    is_ancestor = (rank[None, :] == depth[:, None]) & (is_set[None, :] != 0)
    ancestor = tl.sum(tl.where(is_ancestor, bit[None, :], 0), 1)
    return tl.where(depth < 0, key, first_index + ancestor)


# Steps differ in these: they must not make another variant to compile.
@triton.jit(do_not_specialize=["table_stride", "num_rows", "num_splits"])
def _attend(
    query, layer, out, sums, tables, first_rows, positions, kv_indices, prefix_lens, first_indices, ancestors,
    sinks, query_stride, slot_stride, table_stride, num_rows, num_splits, scale, WINDOW: tl.constexpr,
    HAS_MASKS: tl.constexpr, HAS_SINKS: tl.constexpr, IS_SPLIT: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, PLACES: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Attends with parts and tiles that, with PART > 0, begin at the same positions for every row.

    A row with a mask then has a program of its own, which sees its path in the order of positions.
    """
    sequence = tl.program_id(0)
    HAS_PATHS: tl.constexpr = PART > 0 and HAS_MASKS
    ROWS: tl.constexpr = 1 if HAS_PATHS else TILE // GROUP_SIZE
    kv_head = tl.program_id(2) // num_splits
    split = tl.program_id(2) % num_splits
    first_row = tl.load(first_rows + sequence)
    last_row = tl.load(first_rows + sequence + 1)
    tile_row = first_row + tl.program_id(1) * ROWS
    if tile_row < last_row:
        member = tl.arange(0, TILE)
        row = tile_row + member // GROUP_SIZE
        head = kv_head * GROUP_SIZE + member % GROUP_SIZE
        is_row = (member < ROWS * GROUP_SIZE) & (row < last_row)
        position = tl.load(positions + row, mask=is_row, other=0)
        kv_index = tl.load(kv_indices + row, mask=is_row, other=0)
        # KV indices below it are seen by the row.
        seen = position + 1
        if HAS_MASKS:
            prefix_len = tl.load(prefix_lens + row, mask=is_row, other=0)
            first_index = tl.load(first_indices + row, mask=is_row, other=0)
            bits = tl.load(ancestors + row, mask=is_row, other=0)
            if not HAS_PATHS:
                seen = prefix_len
        dim = tl.arange(0, PADDED_DIM)
        is_dim = dim < HEAD_DIM
        rows = tl.load(
            query + row[:, None].to(tl.int64) * query_stride + head[:, None] * HEAD_DIM + dim[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )
        end = tl.max(tl.where(is_row, position if HAS_PATHS else kv_index, 0), 0) + 1
        begin = 0
        if WINDOW > 0:
            lowest = tl.min(tl.where(is_row, position, 2147483647), 0)
            begin = tl.maximum(lowest - WINDOW + 1, 0)
        if PART > 0:
            low = tl.maximum(split * PART, begin // PLACES * PLACES)
            high = tl.minimum(split * PART + PART, end)
        else:
            part = tl.cdiv(tl.cdiv(end - begin, num_splits), PLACES) * PLACES
            low = begin + split * part
            high = tl.minimum(low + part, end)
        highest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mixed = tl.zeros([TILE, PADDED_DIM], tl.float32)
        if HAS_SINKS:
            # The first part has seen the sink, which has no value.
            sink = tl.load(sinks + head, mask=is_row, other=0.0) * 1.4426950408889634
            highest = tl.where(split == 0, sink, highest)
            total = tl.where(split == 0, 1.0, total)
        table = tables + sequence.to(tl.int64) * table_stride
        masked_from = low
        if WINDOW == 0 and PART == 0:
            common = tl.minimum(tl.min(tl.where(is_row, seen, 2147483647), 0), high)
            masked_from = low + tl.maximum(common - low, 0) // PLACES * PLACES
            for at in range(low, masked_from, PLACES):
                key = at + tl.arange(0, PLACES)
                keys, values = _load_places(
                    layer, table, key, key >= 0, slot_stride, kv_head, dim, is_dim,
                    True, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
                )  # fmt: skip
                scores = tl.dot(rows, keys, input_precision="ieee") * scale
                highest, total, mixed = weigh(scores, values, highest, total, mixed)
        for at in range(masked_from, high, PLACES):
            key = at + tl.arange(0, PLACES)
            is_key = key < high
            place = key
            if HAS_PATHS:
                # All members of the tile are the one row.
                place = on_path(
                    key, tl.max(prefix_len, 0), tl.max(first_index, 0), tl.load(ancestors + tile_row)
                )
            keys, values = _load_places(
                layer, table, place, is_key, slot_stride, kv_head, dim, is_dim,
                False, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE,
            )  # fmt: skip
            scores = tl.dot(rows, keys, input_precision="ieee") * scale
            is_visible = key[None, :] < seen[:, None]
            if WINDOW > 0:
                is_visible = is_visible & (key[None, :] > position[:, None] - WINDOW)
            if HAS_MASKS and not HAS_PATHS:
                bit = key[None, :] - first_index[:, None]
                is_bit = (bit >= 0) & (bit < 64)
                shift = tl.where(is_bit, bit, 0).to(tl.int64)
                is_visible = is_visible | (is_bit & (((bits[:, None] >> shift) & 1) != 0))
            is_visible = is_visible & is_key[None, :]
            scores = tl.where(is_visible, scores, float("-inf"))
            highest, total, mixed = weigh(scores, values, highest, total, mixed)
        divisor = tl.where(total == 0.0, 1.0, total)
        place_out = (split * num_rows + row).to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + head
        tl.store(
            out + place_out[:, None] * HEAD_DIM + dim[None, :],
            (mixed / divisor[:, None]).to(out.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )
        if IS_SPLIT:
            # The logarithm of a part's sum of weights: minus infinity where it saw nothing.
            tl.store(sums + place_out, highest + tl.log2(divisor), mask=is_row)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _join(
    parts, sums, out, num_rows, num_splits, MAX_SPLITS: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.arange(0, MAX_SPLITS)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    place = (split * num_rows + row).to(tl.int64) * NUM_HEADS + head
    logs = tl.load(sums + place, mask=split < num_splits, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    numbers = tl.load(
        parts + place[:, None] * HEAD_DIM + dim[None, :],
        mask=(split < num_splits)[:, None] & is_dim[None, :],
        other=0.0,
    )
    joined = tl.sum(weights[:, None] * numbers, 0) / tl.sum(weights, 0)
    where = (row.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dim
    tl.store(out + where, joined.to(out.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _join_in_order(
    parts, sums, out, num_rows, num_splits,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Adds up parts one after the other: those behind a row's last one, of a longer neighbour, add zeros."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    first = row.to(tl.int64) * NUM_HEADS + head
    step = num_rows.to(tl.int64) * NUM_HEADS
    highest = tl.load(sums + first)
    for split in range(1, num_splits):
        highest = tl.maximum(highest, tl.load(sums + first + split * step))
    joined = tl.zeros([PADDED_DIM], tl.float32)
    total = 0.0
    for split in range(num_splits):
        weight = tl.exp2(tl.load(sums + first + split * step) - highest)
        place = parts + (first + split * step) * HEAD_DIM + dim
        joined = joined + weight * tl.load(place, mask=is_dim, other=0.0)
        total = total + weight
    tl.store(out + first * HEAD_DIM + dim, (joined / total).to(out.dtype.element_ty), mask=is_dim)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a step is shared out among programs."""

    tile: int
    """Rows times query heads of a program."""
    grid_rows: int
    """Programs for the rows of a sequence."""
    num_splits: int
    part: int
    """KV indices of a part; 0: as many as there are parts for."""


class TritonAttend:
    """Implements ``paged.AttendPaged``.

    Args:
        num_processors: of the device.
        programs_per_processor: programs that are wanted for each of them; what they see is split until there
            are so many.
        fixed_part: KV indices of a part, whatever is computed at once, so that the bits of a row depend on
            nothing but its own path; 0: parts and tiles as the step is shared out best.
    """

    def __init__(self, num_processors: int, programs_per_processor: int = 2, fixed_part: int = 0) -> None:
        self._num_processors = num_processors
        self._num_wanted = programs_per_processor * num_processors
        self._fixed_part = fixed_part

    def splitting(self, programs_per_processor: int) -> TritonAttend:
        return TritonAttend(self._num_processors, programs_per_processor)

    def __call__(
        self,
        query: torch.Tensor,
        layer: torch.Tensor,
        batch: PagedBatch,
        *,
        block_size: int,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        num_rows, num_heads, head_dim = query.shape
        num_kv_heads = layer.shape[1] // 2
        group_size = num_heads // num_kv_heads
        tiling = self._tiling(batch, group_size, num_kv_heads, block_size)
        num_splits = tiling.num_splits
        out = torch.empty(num_rows, num_heads * head_dim, dtype=query.dtype, device=query.device)
        parts, sums = out, out
        if num_splits > 1:
            sums = torch.empty(num_splits, num_rows, num_heads, dtype=torch.float32, device=query.device)
            parts = torch.empty(*sums.shape, head_dim, dtype=torch.float32, device=query.device)
        padded_dim = max(16, triton.next_power_of_2(head_dim))
        is_cut = batch.has_masks and not tiling.part
        _attend[(batch.lengths.shape[0], tiling.grid_rows, num_kv_heads * num_splits)](
            query, layer, parts, sums, batch.block_tables, batch.first_rows, batch.positions,
            batch.kv_indices, batch.prefix_lens, batch.first_indices,
            within_window(batch.ancestors, window) if is_cut else batch.ancestors,
            query if sinks is None else sinks, query.stride(0), layer.stride(0), batch.block_tables.stride(0),
            num_rows, num_splits, scale * LOG2_E, WINDOW=window or 0, HAS_MASKS=batch.has_masks,
            HAS_SINKS=sinks is not None, IS_SPLIT=num_splits > 1, NUM_KV_HEADS=num_kv_heads,
            GROUP_SIZE=group_size, HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size,
            TILE=tiling.tile, PLACES=32 if query.dtype == torch.float32 or padded_dim > 128 else 64,
            PART=tiling.part,
        )  # fmt: skip
        if num_splits > 1:
            sizes = {"NUM_HEADS": num_heads, "HEAD_DIM": head_dim, "PADDED_DIM": padded_dim}
            joined = (parts, sums, out, num_rows, num_splits)
            if tiling.part:
                _join_in_order[(num_rows, num_heads)](*joined, **sizes)
            else:
                _join[(num_rows, num_heads)](*joined, MAX_SPLITS=_MAX_SPLITS, **sizes)
        return out

    def _tiling(self, batch: PagedBatch, group_size: int, num_kv_heads: int, block_size: int) -> _Tiling:
        least = triton.next_power_of_2(group_size)
        max_places = batch.block_tables.shape[1] * block_size
        if self._fixed_part:
            tile = max(_FIXED_TILE, least)
            per_program = 1 if batch.has_masks else tile // group_size
            num_splits = max(1, triton.cdiv(max_places, self._fixed_part))
            return _Tiling(tile, triton.cdiv(batch.max_rows, per_program), num_splits, self._fixed_part)
        tile = max(16, min(_MAX_TILE, triton.next_power_of_2(batch.max_rows * group_size)))
        tile = max(tile, least)
        grid_rows = triton.cdiv(batch.max_rows, tile // group_size)
        num_programs = batch.lengths.shape[0] * grid_rows * num_kv_heads
        return _Tiling(tile, grid_rows, self._num_splits(num_programs, max_places), 0)

    def _num_splits(self, num_programs: int, max_places: int) -> int:
        useful = max(1, max_places // MIN_SPLIT_PLACES)
        return max(1, min(_MAX_SPLITS, useful, self._num_wanted // num_programs))
