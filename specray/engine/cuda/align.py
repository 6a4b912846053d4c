"""Aligns the choices of a router to row tiles, so that one product of a fixed shape computes all experts.

A row and one of its experts are a *pair*, number ``row * num_chosen + place``. The pairs of an expert fill
tiles of ``tile_rows``; the last of them is padded. A grouped product has a program for each tile and some
output features; it reads the tile's expert and its pairs, and ends where the tile is not used. Nothing here
waits for the device, and no shape depends on what was chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which pairs and which expert each tile computes."""

    pairs: torch.Tensor
    """int32 ``[num_tiles * tile_rows]``: pairs by tile, rising; ``num_pairs`` where there is none."""
    experts: torch.Tensor
    """int32 ``[num_tiles]``: the expert of each tile, in rising order; undefined from ``num_used`` on."""
    num_used: torch.Tensor
    """int32 ``[1]``: tiles that have pairs, the first ones."""
    tile_rows: int

    @property
    def num_tiles(self) -> int:
        return self.experts.shape[0]


Align = Callable[[torch.Tensor, int, int], Alignment]
"""``(chosen, num_experts, tile_rows)``: aligns int32 or int64 ``[num_rows, num_chosen]``."""


def max_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """Tiles of the worst routing: every expert that is hit leaves all but one row of its last tile."""
    num_hit = min(num_experts, num_pairs)
    return -(-(num_pairs + num_hit * (tile_rows - 1)) // tile_rows)


def align(chosen: torch.Tensor, num_experts: int, tile_rows: int) -> Alignment:
    """An :data:`Align` of torch's operators: for many pairs, and where there is no Triton."""
    num_pairs, device = chosen.numel(), chosen.device
    num_tiles = max_tiles(num_pairs, num_experts, tile_rows)
    experts, order = chosen.reshape(-1).int().sort(stable=True)
    numbers = torch.arange(num_experts, dtype=torch.int32, device=device)
    ends = torch.searchsorted(experts, numbers, right=True)
    counts = ends.diff(prepend=ends.new_zeros(1))
    last_tiles = (-(-counts // tile_rows)).cumsum(0)
    shift = (last_tiles * tile_rows).roll(1)
    shift[:1] = 0
    places = torch.arange(num_pairs, device=device) + (shift - (ends - counts))[experts.long()]
    pairs = torch.full((num_tiles * tile_rows,), num_pairs, dtype=torch.int32, device=device)
    pairs[places] = order.int()
    tiles = torch.arange(num_tiles, device=device)
    tile_experts = torch.searchsorted(last_tiles, tiles, right=True, out_int32=True)
    return Alignment(pairs, tile_experts, last_tiles[-1:].int(), tile_rows)


def align_apart(chosen: torch.Tensor, tile_rows: int) -> Alignment:
    """A tile for each pair, which needs no sorting: for few pairs, of which hardly any share an expert."""
    pairs, num_used = _apart(chosen.numel(), tile_rows, chosen.device)
    return Alignment(pairs, chosen.reshape(-1).int(), num_used, tile_rows)


@functools.lru_cache(maxsize=256)
def _apart(num_pairs: int, tile_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What does not depend on the routing, kept: a captured forward reads it again and again."""
    pairs = torch.full((num_pairs, tile_rows), num_pairs, dtype=torch.int32, device=device)
    pairs[:, 0] = torch.arange(num_pairs, dtype=torch.int32, device=device)
    return pairs.view(-1), torch.full((1,), num_pairs, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=256)
def align_heads(num_rows: int, num_heads: int, tile_rows: int, device: torch.device) -> Alignment:
    """Tiles of heads that each multiply every row: pair ``row * num_heads + head``."""
    tiles_each = -(-num_rows // tile_rows)
    rows = torch.arange(tiles_each * tile_rows, dtype=torch.int32, device=device)
    heads = torch.arange(num_heads, dtype=torch.int32, device=device)
    pairs = rows * num_heads + heads[:, None]
    pairs[:, num_rows:] = num_rows * num_heads
    num_used = torch.full((1,), num_heads * tiles_each, dtype=torch.int32, device=device)
    return Alignment(pairs.flatten(), heads.repeat_interleave(tiles_each), num_used, tile_rows)
