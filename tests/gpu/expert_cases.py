"""Routings to align, and what an alignment must hold; on CUDA and in the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specray.engine.cuda.align import Alignment, max_tiles


@dataclass(frozen=True, slots=True)
class Routing:
    """Rows of each expert; rows have ``num_chosen`` distinct ones."""

    name: str
    num_rows: int
    num_experts: int
    num_chosen: int
    kind: str = "spread"
    tile_rows: int = 4


CASES = (
    *(Routing(f"spread-{n}", n, 8, 2) for n in (1, 2, 3, 7, 31, 64)),
    Routing("one pair", 1, 3, 1),
    Routing("hardly any", 2, 64, 4),
    Routing("all of one", 9, 6, 1, "first"),
    Routing("all of the last", 9, 6, 1, "last"),
    Routing("none, M - 1, M, M + 1", 12, 5, 1, "borders"),
    Routing("all of all", 5, 3, 3),
    Routing("tiles of one row", 6, 4, 2, tile_rows=1),
    Routing("prompt", 700, 40, 6, tile_rows=16),
)


def routing(case: Routing) -> torch.Tensor:
    """int64 ``[num_rows, num_chosen]``."""
    if case.kind in ("first", "last"):
        return torch.full((case.num_rows, 1), 0 if case.kind == "first" else case.num_experts - 1)
    if case.kind == "borders":
        tile = case.tile_rows
        return torch.tensor([1] * (tile - 1) + [2] * tile + [4] * (tile + 1))[:, None]
    numbers = torch.randn(
        case.num_rows, case.num_experts, generator=torch.Generator().manual_seed(case.num_rows)
    )
    return numbers.argsort(-1)[:, : case.num_chosen]


def check_alignment(found: Alignment, chosen: torch.Tensor, case: Routing) -> None:
    """Every pair once, in a tile of its expert; pairs and experts rise."""
    num_pairs, tile_rows = chosen.numel(), case.tile_rows
    num_used, experts = int(found.num_used), chosen.reshape(-1).tolist()
    assert found.tile_rows == tile_rows
    assert found.num_tiles * tile_rows == len(found.pairs), case
    assert num_used <= found.num_tiles <= max_tiles(num_pairs, case.num_experts, tile_rows), case
    tiles = found.pairs.view(-1, tile_rows)[:num_used].tolist()
    for expert, tile in zip(found.experts[:num_used].tolist(), tiles, strict=True):
        own = [pair for pair in tile if pair != num_pairs]
        assert own, case
        assert own == sorted(own) == tile[: len(own)], case
        assert {experts[pair] for pair in own} == {expert}, case
    assert sorted(pair for tile in tiles for pair in tile if pair != num_pairs) == list(range(num_pairs)), (
        case
    )
