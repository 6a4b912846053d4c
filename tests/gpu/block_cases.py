"""Steps of several kinds over a small block cache, for attention that must agree on all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specray.engine.cache.blocks import BlockCache
from specray.engine.step import AttentionStep, CacheShape, HeadShape, SequenceRows
from specray.engine.visibility import branch_visibility
from tests.unit.engine.attention.trees import Tree, random_tree

NUM_BLOCKS = 26
BRANCHES = (
    *(branch_visibility(5, 9, count) for count in (1, 2, 3)),
    branch_visibility(7, 12, 1),
    branch_visibility(9, 13, 1),
)
"""Three rows of one branch, one of another, and one that continues the whole sequence."""


@dataclass(frozen=True)
class Case:
    name: str
    rows: tuple[tuple[int, int], ...]
    """(start, number of rows) of each sequence."""
    block_size: int
    shape: HeadShape
    window: int | None = None
    with_branches: bool = False
    has_sinks: bool = False


GQA = HeadShape(6, 2, 32)
CASES = [
    Case("one token of one sequence", ((9, 1),), 4, GQA),
    Case("the first token", ((0, 1),), 4, GQA),
    Case("single tokens of several", ((9, 1), (0, 1), (17, 1)), 4, GQA),
    Case("a whole prompt", ((0, 19),), 4, GQA),
    Case("rows of different widths", ((3, 4), (11, 1), (0, 7)), 4, GQA),
    Case("a sliding window", ((13, 5), (2, 2)), 4, GQA, window=6),
    Case("a head per kv head", ((5, 3), (8, 2)), 4, HeadShape(2, 2, 16)),
    Case("odd group and head size", ((5, 3), (8, 2)), 3, HeadShape(5, 1, 24)),
    Case("branches beside a sequence", ((6, 2),), 4, GQA, with_branches=True),
    Case("long sequences in several parts", ((150, 3), (90, 1)), 16, GQA),
    Case("a window over parts", ((150, 3), (90, 1)), 16, GQA, window=70),
    Case("branches in a window", ((6, 2),), 4, GQA, window=4, with_branches=True),
    Case("branches longer than the window", ((6, 2),), 4, GQA, window=2, with_branches=True),
]
LATENT_CASES = [
    Case("latents", ((9, 1), (3, 4), (0, 7)), 4, HeadShape(6, 1, 24, None, 16)),
    Case("latents of many heads in several parts", ((150, 2), (90, 1)), 16, HeadShape(33, 1, 20, None, 12)),
    Case("latents and branches", ((6, 2),), 4, HeadShape(6, 1, 24, None, 16), with_branches=True),
]

EDGES = [
    *(Case(f"group of {size}", ((16, 2), (3, 1)), 16, HeadShape(2 * size, 2, 16)) for size in range(1, 9)),
    *(
        Case(f"rows from {start} on", ((start, 2), (0, 1)), 16, HeadShape(2, 1, 16))
        for start in (14, 15, 16, 30, 31, 32, 62, 63, 64, 65, 95, 127, 128)
    ),
    *(
        Case(f"{count} rows of a group of 4", ((40, count), (1, 1)), 16, HeadShape(4, 1, 16))
        for count in (15, 16, 17, 33)
    ),
    *(
        Case(f"window {window}", ((70, 3), (2, 1)), 16, HeadShape(2, 1, 16), window=window)
        for window in (1, 2, 31, 32, 33, 72, 73, 74)
    ),
    Case("parts without anything to see", ((330, 1), (0, 1), (33, 4)), 16, HeadShape(4, 1, 16)),
    Case("sinks", ((16, 2), (3, 1)), 16, HeadShape(6, 2, 16), has_sinks=True),
    Case("sinks over parts", ((150, 3), (0, 1)), 16, HeadShape(4, 2, 16), has_sinks=True),
    Case("sinks over parts of a window", ((150, 3), (0, 1)), 16, HeadShape(4, 2, 16), 70, has_sinks=True),
    Case("parts without anything in a window", ((330, 2), (0, 1)), 16, HeadShape(4, 1, 16), window=40),
]
"""Around the sizes of blocks, tiles and parts; all heads of a group in one program."""

SOME_TREES = (Tree(9, random_tree(20, 1)), Tree(3, random_tree(64, 2), 5))
"""Trees for an interpreter, which takes seconds for each: one whole, one in a window."""


def block_cache(case: Case, dtype: torch.dtype = torch.float32) -> BlockCache:
    """A cache full of numbers, in one more block than is used, as captured forwards want it."""
    torch.manual_seed(1)
    cache = BlockCache(
        CacheShape.of_layers([case.shape.of_layer]),
        num_blocks=NUM_BLOCKS + 1,
        block_size=case.block_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    cache.layers[0].normal_()
    return cache


def sequence_rows(case: Case) -> tuple[SequenceRows, ...]:
    """The rows, in blocks that do not follow each other."""
    free = list(range(NUM_BLOCKS))[::-1]
    free = free[::2] + free[1::2]
    rows, first = [], 0
    for start, count in case.rows:
        blocks = [free.pop() for _ in range(-(-(start + count) // case.block_size))]
        rows.append(SequenceRows(first, count, start, blocks))
        first += count
    if case.with_branches:
        blocks = [free.pop() for _ in range(-(-(BRANCHES[-1].kv_index + 1) // case.block_size))]
        lowest = min(row.position for row in BRANCHES)
        rows.append(SequenceRows(first, len(BRANCHES), lowest, blocks, BRANCHES))
    return tuple(rows)


def row_positions(rows: tuple[SequenceRows, ...]) -> torch.Tensor:
    return torch.tensor([position for item in rows for position in item.positions])


def attention_step(case: Case, cache: BlockCache) -> AttentionStep:
    return AttentionStep(sequence_rows(case), cache)
