"""The alignment of few pairs as one Triton program. Importing it needs triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from specray.engine.cuda.align import Alignment, align, align_apart, max_tiles

MAX_PAIRS = 4096
"""Most pairs of the one program, which takes them one group after the other; a captured step has fewer."""
_PAIRS_AT_ONCE = 16
_APART = 4
"""Experts per pair from which on pairs are not sorted: hardly any two share one."""


@triton.jit
def _align(
    chosen, pairs, experts, num_used, num_pairs, NUM_EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr,
    NUM_TILES: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    numbers = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_pairs, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        own = tl.load(chosen + some, mask=some < num_pairs, other=EXPERTS).to(tl.int32)
        counts += tl.sum((own[:, None] == numbers[None, :]).to(tl.int32), 0)
    tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    last_tiles = tl.cumsum(tiles, 0)
    first_places = (last_tiles - tiles) * TILE_ROWS
    tl.store(num_used, tl.sum(tiles, 0))
    for first_tile in range(0, NUM_TILES, TILES):
        tile = first_tile + tl.arange(0, TILES)
        # The experts before a tile's own are those whose last tile is not after it.
        own = tl.sum((last_tiles[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(experts + tile, tl.minimum(own, NUM_EXPERTS - 1), mask=tile < NUM_TILES)
    # Padding: what follows an expert's pairs in its last tile.
    row = tl.arange(0, TILE_ROWS)
    place = (first_places + counts)[:, None] + row[None, :]
    is_padding = (counts[:, None] + row[None, :]) < (tiles * TILE_ROWS)[:, None]
    tl.store(pairs + place, tl.zeros([EXPERTS, TILE_ROWS], tl.int32) + num_pairs, mask=is_padding)
    for first in range(0, num_pairs, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        own = tl.load(chosen + some, mask=some < num_pairs, other=EXPERTS).to(tl.int32)
        is_own = (own[:, None] == numbers[None, :]).to(tl.int32)
        earlier = tl.cumsum(is_own, 0) - is_own
        place = tl.sum(is_own * (earlier + first_places[None, :]), 1)
        tl.store(pairs + place, some, mask=some < num_pairs)
        first_places += tl.sum(is_own, 0)


@triton.jit
def _count_hits(chosen, hits, num_pairs, EXPERTS: tl.constexpr, AT_ONCE: tl.constexpr):
    numbers = tl.arange(0, EXPERTS)
    is_hit = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, num_pairs, AT_ONCE):
        some = first + tl.arange(0, AT_ONCE)
        own = tl.load(chosen + some, mask=some < num_pairs, other=EXPERTS).to(tl.int32)
        is_hit = tl.maximum(is_hit, tl.max((own[:, None] == numbers[None, :]).to(tl.int32), 0))
    tl.store(hits, tl.sum(is_hit, 0))


def count_hits(chosen: torch.Tensor, num_experts: int, hits: torch.Tensor) -> None:
    """Writes how many distinct experts are chosen to ``hits``, int32 ``[1]``."""
    experts = triton.next_power_of_2(num_experts)
    _count_hits[(1,)](
        chosen.contiguous(), hits, chosen.numel(), EXPERTS=experts, AT_ONCE=_PAIRS_AT_ONCE, num_warps=4
    )


def align_pairs(chosen: torch.Tensor, num_experts: int, tile_rows: int) -> Alignment:
    """An ``align.Align``; places of tiles that are not used are undefined in ``pairs``, too."""
    num_pairs = chosen.numel()
    if _APART * num_pairs <= num_experts:
        return align_apart(chosen, tile_rows)
    if num_pairs > MAX_PAIRS:
        return align(chosen, num_experts, tile_rows)
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    pairs = torch.empty(num_tiles * tile_rows, dtype=torch.int32, device=chosen.device)
    experts = torch.empty(num_tiles, dtype=torch.int32, device=chosen.device)
    num_used = torch.empty(1, dtype=torch.int32, device=chosen.device)
    _align[(1,)](
        chosen.contiguous(), pairs, experts, num_used, num_pairs, NUM_EXPERTS=num_experts,
        TILE_ROWS=tile_rows, NUM_TILES=num_tiles, EXPERTS=triton.next_power_of_2(num_experts), TILES=16,
        AT_ONCE=_PAIRS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    return Alignment(pairs, experts, num_used, tile_rows)
