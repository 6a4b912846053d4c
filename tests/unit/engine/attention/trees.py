"""Random trees of rows behind a prefix, and their attention in float64 from a dense mask.

The reference walks from node to parent; it knows nothing of masks, blocks or kernels.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specray.engine.step import AttentionStep, HeadShape, KVCache, SequenceRows
from specray.engine.visibility import Visibility, branch_visibility, tree_visibility

MAX_LEN = 192
"""Tokens of a sequence, at most."""


@dataclass(frozen=True)
class Tree:
    """A tree behind a prefix, with one more sequence of a single row beside it."""

    prefix_len: int
    parents: tuple[int, ...]
    window: int | None = None
    num_told: int = 0
    """Last rows of the prefix that are computed together with the nodes."""

    @property
    def name(self) -> str:
        told = f", {self.num_told} of these with them" if self.num_told else ""
        return f"{len(self.parents)} nodes behind {self.prefix_len}{told}, window {self.window}"

    @property
    def depths(self) -> list[int]:
        return [len(self.path(node)) - 1 for node in range(len(self.parents))]

    @property
    def positions(self) -> list[int]:
        """Of the prefix and the nodes."""
        return [*range(self.prefix_len), *(self.prefix_len + depth for depth in self.depths)]

    def path(self, node: int) -> list[int]:
        """The node and its ancestors, the root first."""
        nodes: list[int] = []
        while node >= 0:
            nodes.insert(0, node)
            node = self.parents[node]
        return nodes

    def seen(self, node: int) -> list[int]:
        """KV indices, in the order of their positions."""
        indices = [*range(self.prefix_len), *(self.prefix_len + each for each in self.path(node))]
        return indices if self.window is None else indices[-self.window :]

    @property
    def first(self) -> int:
        """KV index of the first row that is computed with the nodes."""
        return self.prefix_len - self.num_told

    def visibility(self) -> list[Visibility]:
        told = [branch_visibility(index, index, 1) for index in range(self.first, self.prefix_len)]
        return [*told, *tree_visibility(self.prefix_len, self.parents)]


def random_tree(num_nodes: int, seed: int) -> tuple[int, ...]:
    """Parents: of nodes in a row, of bushes, or of anything, by the seed."""
    source = random.Random(seed)
    depth = (0.9, 0.5, 0.0)[seed % 3]
    parents = [-1]
    for node in range(1, num_nodes):
        parents.append(node - 1 if source.random() < depth else source.randrange(-1, node))
    return tuple(parents)


TREES = [
    Tree(5, (-1,)),
    Tree(9, (-1,) * 64),
    Tree(70, tuple(range(-1, 63))),
    Tree(0, random_tree(20, 1)),
    *(Tree(prefix_len, random_tree(64, seed)) for seed, prefix_len in enumerate((3, 64, 100, 17))),
    *(Tree(61, random_tree(size, size)) for size in (2, 7, 33, 50)),
    *(
        Tree(30, random_tree(64, seed), window)
        for seed, window in ((0, 3), (3, 12), (2, 1), (1, 40), (6, 80))
    ),
    Tree(9, random_tree(12, 4), num_told=1),
    Tree(70, random_tree(64, 5), num_told=67),
    Tree(40, random_tree(30, 7), 12, num_told=20),
    Tree(6, random_tree(9, 8), num_told=6),
]
"""Of up to 64 nodes: one, siblings alone, a chain, roots without a prefix, windows inside and outside."""


def rotate(heads: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    angle = angles(heads.shape[-1]).double()[list(positions), None]
    low, high = heads.chunk(2, -1)
    return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)


def angles(head_dim: int) -> torch.Tensor:
    """``[MAX_LEN, head_dim / 2]``."""
    return torch.outer(torch.arange(MAX_LEN), 100.0 ** -(torch.arange(head_dim // 2) / (head_dim / 2)))


def random_rows(tree: Tree, shape: HeadShape, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Queries, keys and values of prefix and nodes: ``[rows, all heads, head_dim]``."""
    generator = torch.Generator().manual_seed(tree.prefix_len)
    size = (len(tree.positions), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    return torch.randn(*size, generator=generator).to(dtype)


def expected(
    tree: Tree, qkv: torch.Tensor, shape: HeadShape, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of told rows and nodes, ``[rows, num_heads * head_dim]``, float64.

    Args:
        sinks: of each query head, a score more, without a value; None: there are none.
    """
    num_heads, num_kv_heads = shape.num_heads, shape.num_kv_heads
    heads, group_size = qkv.double(), num_heads // num_kv_heads
    rotated = rotate(heads[:, : num_heads + num_kv_heads], tree.positions)
    keys = rotated[:, num_heads:].repeat_interleave(group_size, 1)
    values = heads[:, num_heads + num_kv_heads :].repeat_interleave(group_size, 1)
    scores = torch.einsum("qhd,khd->hqk", rotated[tree.first :, :num_heads], keys) * shape.scale
    mask = torch.full(scores.shape[1:], float("-inf"), dtype=torch.float64)
    for row in range(tree.num_told):
        index = tree.first + row
        mask[row, max(0, index + 1 - (tree.window or index + 1)) : index + 1] = 0.0
    for node in range(len(tree.parents)):
        mask[tree.num_told + node, tree.seen(node)] = 0.0
    scores = scores + mask
    if sinks is not None:
        own = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, own), -1)
    weights = scores.softmax(-1)[..., : len(values)]
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def tree_steps(tree: Tree, cache: KVCache) -> list[tuple[AttentionStep, list[int], slice]]:
    """The prefix as a chain, then the tree beside another sequence's row.

    Returns:
        Each step, its rows' positions, and the rows of ``random_rows`` that it takes; the other sequence's
        row comes behind them in the last step, with the first row's numbers.
    """
    num_blocks = -(-len(tree.positions) // cache.block_size)
    blocks = list(range(num_blocks))
    random.Random(num_blocks).shuffle(blocks)
    steps = []
    if tree.first:
        rows = SequenceRows(0, tree.first, 0, blocks)
        prefix = slice(0, tree.first)
        steps.append((AttentionStep((rows,), cache), list(range(tree.first)), prefix))
    count = tree.num_told + len(tree.parents)
    nodes = SequenceRows(0, count, tree.first, blocks, tree.visibility())
    other = SequenceRows(count, 1, 0, [num_blocks])
    positions = [*tree.positions[tree.first :], 0]
    steps.append((AttentionStep((nodes, other), cache), positions, slice(tree.first, len(tree.positions))))
    return steps


def chains_and_branches() -> list[Visibility]:
    """Rows of one step as a draft has them: two rows of a branch, then one each of two more."""
    rows = ((5, 9, 1), (5, 9, 2), (7, 12, 1), (9, 13, 1))
    return [branch_visibility(*row) for row in rows]
