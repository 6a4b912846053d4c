"""Latent attention over the block cache as a Triton kernel. Importing it needs triton.

All query heads share one key, whose first numbers are its value: 512 and 64 are two products, since 576 would
be padded to 1024, and the latents are loaded once for scores and values. One program takes as many heads as
fill a tile, of one row or of several of one sequence, through a part of what they see. Parts are of one
length and tiles of one shape in every step, and parts are joined in their order, so a row's bits depend on
its own path alone. A row of a tree has a program of its own, which sees its path in the order of positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specray.engine.attention.triton import LOG2_E, on_path, weigh
from specray.engine.step import PagedBatch

_TILE = 32
"""Rows times heads of a program: as many as its sums have registers for."""
_PLACES = 32
"""KV indices that a program sees at once."""
_MOST_PART_BYTES = 64 << 20
"""Memory of parts; of what does not fit, some rows are computed after the others."""


@triton.jit
def _member(
    tile, first_row, HEAD_TILES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Row and head of each member of a sequence's tile."""
    member = tl.arange(0, TILE)
    row = first_row + tile // HEAD_TILES * ROWS + member // HEADS
    return row, tile % HEAD_TILES * HEADS + member % HEADS, member < ROWS * HEADS


@triton.jit(do_not_specialize=["table_stride", "first_tile"])
def _attend(
    query, layer, parts, sums, tables, first_rows, positions, prefix_lens, first_indices, ancestors,
    query_stride, slot_stride, table_stride, first_tile, scale,
    HAS_MASKS: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_TILES: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, LATENT: tl.constexpr, ROTATED: tl.constexpr, PADDED_LATENT: tl.constexpr,
    PADDED_ROTATED: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, PLACES: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    sequence, local, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    last_row = tl.load(first_rows + sequence + 1)
    row, head, is_member = _member(
        first_tile + local, tl.load(first_rows + sequence), HEAD_TILES, HEADS, ROWS, TILE
    )
    is_row = is_member & (row < last_row) & (head < NUM_HEADS)
    position = tl.load(positions + row, mask=is_row, other=-1)
    low = split * PART
    high = tl.minimum(low + PART, tl.max(position, 0) + 1)
    if low < high:
        latent, rotated = tl.arange(0, PADDED_LATENT), tl.arange(0, PADDED_ROTATED)
        is_latent, is_rotated = latent < LATENT, rotated < ROTATED
        at = query + row.to(tl.int64) * query_stride + head * (LATENT + ROTATED)
        plain = tl.load(at[:, None] + latent[None, :], mask=is_row[:, None] & is_latent[None, :], other=0.0)
        turned = tl.load(
            at[:, None] + LATENT + rotated[None, :], mask=is_row[:, None] & is_rotated[None, :], other=0.0
        )
        if HAS_MASKS:
            # All members that count are of one row.
            first = tl.min(row, 0)
            prefix_len, first_index = tl.load(prefix_lens + first), tl.load(first_indices + first)
            bits = tl.load(ancestors + first)
        highest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        mixed = tl.zeros([TILE, PADDED_LATENT], tl.float32)
        table = tables + sequence.to(tl.int64) * table_stride
        for begin in range(low, high, PLACES):
            key = begin + tl.arange(0, PLACES)
            is_key = key < high
            place = key
            if HAS_MASKS:
                place = on_path(key, prefix_len, first_index, bits)
            block = tl.load(table + place // BLOCK_SIZE, mask=is_key, other=0)
            slot = layer + (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * slot_stride
            values = tl.load(
                slot[:, None] + latent[None, :], mask=is_key[:, None] & is_latent[None, :], other=0.0
            )
            keys = tl.load(
                slot[None, :] + LATENT + rotated[:, None],
                mask=is_key[None, :] & is_rotated[:, None],
                other=0.0,
            )
            scores = tl.dot(plain, tl.trans(values), input_precision="ieee")
            scores = (scores + tl.dot(turned, keys, input_precision="ieee")) * scale
            is_visible = (key[None, :] <= position[:, None]) & is_key[None, :]
            scores = tl.where(is_visible, scores, float("-inf"))
            highest, total, mixed = weigh(scores, values, highest, total, mixed)
        divisor = tl.where(total == 0.0, 1.0, total)
        cell = (split * tl.num_programs(0) + sequence).to(tl.int64) * tl.num_programs(1) + local
        place_out = cell * TILE + tl.arange(0, TILE)
        tl.store(
            parts + place_out[:, None] * LATENT + latent[None, :],
            mixed / divisor[:, None],
            mask=is_row[:, None] & is_latent[None, :],
        )
        # The logarithm of a part's sum of weights: minus infinity where it saw nothing.
        tl.store(sums + place_out, highest + tl.log2(divisor), mask=is_row)


@triton.jit(do_not_specialize=["first_tile"])
def _join(
    parts, sums, out, first_rows, positions, first_tile,
    NUM_HEADS: tl.constexpr, HEAD_TILES: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    LATENT: tl.constexpr, PADDED_LATENT: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Adds up the parts that a row sees, one after the other, for one head."""
    sequence, local, member = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tile = first_tile + local
    row = tl.load(first_rows + sequence) + tile // HEAD_TILES * ROWS + member // HEADS
    head = tile % HEAD_TILES * HEADS + member % HEADS
    if (member < ROWS * HEADS) & (head < NUM_HEADS) & (row < tl.load(first_rows + sequence + 1)):
        latent = tl.arange(0, PADDED_LATENT)
        num_parts = tl.load(positions + row) // PART + 1
        step = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * TILE
        first = (sequence.to(tl.int64) * tl.num_programs(1) + local) * TILE + member
        highest = tl.load(sums + first)
        for split in range(1, num_parts):
            highest = tl.maximum(highest, tl.load(sums + first + split * step))
        joined = tl.zeros([PADDED_LATENT], tl.float32)
        total = 0.0
        for split in range(num_parts):
            weight = tl.exp2(tl.load(sums + first + split * step) - highest)
            place = parts + (first + split * step) * LATENT + latent
            joined = joined + weight * tl.load(place, mask=latent < LATENT, other=0.0)
            total = total + weight
        where = (row.to(tl.int64) * NUM_HEADS + head) * LATENT + latent
        tl.store(out + where, (joined / total).to(out.dtype.element_ty), mask=latent < LATENT)


@dataclass(frozen=True, slots=True)
class LatentAttend:
    """Implements ``paged.AttendPaged``.

    Args:
        part: KV indices of a part, a multiple of 32.
    """

    latent_dim: int
    part: int
    most_part_bytes: int = _MOST_PART_BYTES

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
        assert window is None and sinks is None, "latent attention has neither"
        num_rows, num_heads, head_dim = query.shape
        heads, rotated_dim = min(num_heads, _TILE), head_dim - self.latent_dim
        rows, head_tiles = (1 if batch.has_masks else _TILE // heads), triton.cdiv(num_heads, heads)
        num_tiles = head_tiles * triton.cdiv(batch.max_rows, rows)
        num_sequences = batch.lengths.shape[0]
        num_splits = triton.cdiv(batch.block_tables.shape[1] * block_size, self.part)
        tile_bytes = 4 * num_splits * num_sequences * _TILE * (self.latent_dim + 1)
        at_once = min(num_tiles, max(1, self.most_part_bytes // tile_bytes))
        sums = torch.empty(num_splits, num_sequences, at_once, _TILE, device=query.device)
        parts = torch.empty(*sums.shape, self.latent_dim, device=query.device)
        out = torch.empty(num_rows, num_heads * self.latent_dim, dtype=query.dtype, device=query.device)
        sizes = {
            "NUM_HEADS": num_heads,
            "HEAD_TILES": head_tiles,
            "HEADS": heads,
            "ROWS": rows,
            "LATENT": self.latent_dim,
            "PADDED_LATENT": max(16, triton.next_power_of_2(self.latent_dim)),
            "TILE": _TILE,
            "PART": self.part,
        }
        for first in range(0, num_tiles, at_once):
            count = min(at_once, num_tiles - first)
            _attend[(num_sequences, count, num_splits)](
                query, layer, parts, sums, batch.block_tables, batch.first_rows, batch.positions,
                batch.prefix_lens, batch.first_indices, batch.ancestors, query.stride(0), layer.stride(0),
                batch.block_tables.stride(0), first, scale * LOG2_E, HAS_MASKS=batch.has_masks,
                ROTATED=rotated_dim, PADDED_ROTATED=max(16, triton.next_power_of_2(rotated_dim)),
                BLOCK_SIZE=block_size, PLACES=_PLACES, **sizes, num_warps=8,
            )  # fmt: skip
            _join[(num_sequences, count, _TILE)](
                parts, sums, out, batch.first_rows, batch.positions, first, **sizes, num_warps=1
            )
        return out
