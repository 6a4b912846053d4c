"""Draft tokens, a chain or a tree, the distributions that they were sampled from, and what a tree may have.

As ``types``, it crosses boundaries, is plain and frozen, and imports nothing from the rest of the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import Final

MAX_DRAFT_NODES: Final = 64
"""Most nodes of one tree of draft tokens: the ancestors of a node are one 64-bit mask."""


@dataclass(frozen=True, slots=True)
class SparseProbs:
    """One position's draft distribution over the truncated support from which the draft really sampled.

    Probabilities outside ``token_ids`` are exactly zero; ``probs`` sum to one up to rounding.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]

    def is_distribution(self, vocab_size: int) -> bool:
        """Distinct token ids of the vocabulary, with a finite probability each; not all of them zero."""
        ids, probs = self.token_ids, self.probs
        return (
            0 < len(ids) == len(probs) == len(set(ids))
            and 0 <= min(ids) <= max(ids) < vocab_size
            and min(probs) >= 0.0
            and 0.0 < sum(probs) < math.inf
        )


def walk(token_ids: Sequence[int], parents: Sequence[int], own: Callable[[int], int]) -> int:
    """The last node of the longest path on which every token is the target's own; -1: there is none.

    Equal siblings count as one node: the path goes through the one that has the right children.

    Args:
        token_ids, parents: of a tree, as ``DraftTokens`` has them.
        own: the target's own token after a node; -1: after the root. Asked of nodes on the path alone.
    """
    lengths, last = {-1: 0}, -1
    for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if parent in lengths and token_id == own(parent):
            lengths[node] = lengths[parent] + 1
            last = node if lengths[node] > lengths[last] else last
    return last


@dataclass(frozen=True, slots=True)
class DraftTokens:
    """A chain or a tree of draft tokens: the one form in which they go from a proposer to the verdict.

    Node ``i`` is the token ``token_ids[i]``; its parent comes before it. A chain has one form only: parents
    that say the same as none are dropped.

    Raises:
        ValueError: names the field, the value and what is allowed.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] | None = None
    """Index of each node's parent, -1 for the root, which is the last committed token. None: a chain."""
    probs: tuple[SparseProbs, ...] = ()
    """Distribution from which each node was sampled, under rejection verification at temperature > 0; else
    empty."""

    def __post_init__(self) -> None:
        num_nodes = len(self.token_ids)
        if num_nodes > MAX_DRAFT_NODES:
            raise ValueError(f"draft.token_ids has {num_nodes} entries; allowed: at most {MAX_DRAFT_NODES}")
        if self.probs and len(self.probs) != num_nodes:
            raise ValueError(
                f"draft.probs has {len(self.probs)} entries for {num_nodes} draft tokens; "
                f"allowed: none or {num_nodes}"
            )
        if self.parents is None:
            return
        if len(self.parents) != num_nodes:
            raise ValueError(
                f"draft.parents has {len(self.parents)} entries for {num_nodes} draft tokens; "
                f"allowed: none or {num_nodes}"
            )
        for index, parent in enumerate(self.parents):
            if not -1 <= parent < index:
                raise ValueError(f"draft.parents[{index}] is {parent}; allowed: -1..{index - 1}")
        if self.parents == tuple(range(-1, num_nodes - 1)):
            object.__setattr__(self, "parents", None)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """True when each node follows the one before it."""
        return self.parents is None

    @property
    def depths(self) -> tuple[int, ...]:
        """Nodes between each node and the root: its position is the number of committed tokens plus this."""
        if self.parents is None:
            return tuple(range(len(self.token_ids)))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Nodes of the longest path: the most that can be accepted."""
        return len(self.token_ids) if self.parents is None else max(self.depths) + 1

    def path(self, node: int) -> tuple[int, ...]:
        """The node and its ancestors, the first of them a child of the root; empty for the root, -1."""
        if self.parents is None:
            return tuple(range(node + 1))
        nodes: list[int] = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def walk(self, own: Callable[[int], int]) -> int:
        """Where the function ``walk`` ends."""
        parents = range(-1, len(self.token_ids) - 1) if self.parents is None else self.parents
        return walk(self.token_ids, parents, own)

    def common(self, token_ids: Sequence[int]) -> int:
        """The last node of the path that some tokens, one after the other, have in common with the tree; -1:
        not even the first is in it."""
        places = (*(depth + 1 for depth in self.depths), 0)
        padded = (*token_ids, *[-1] * len(places))
        return self.walk(lambda node: padded[places[node]])

    @property
    def first_path(self) -> tuple[int, ...]:
        """The nodes of the chain that takes the first child of every node, from the root on."""
        if self.parents is None:
            return tuple(range(len(self.token_ids)))
        nodes: list[int] = []
        for index, parent in enumerate(self.parents):
            if parent == (nodes[-1] if nodes else -1):
                nodes.append(index)
        return tuple(nodes)

    @property
    def chain_first(self) -> tuple[int, ...]:
        """All nodes, those of the first chain before the others."""
        first = self.first_path
        if len(first) == len(self.token_ids):
            return first
        return (*first, *sorted({*range(len(self.token_ids))} - {*first}))

    def first_chain(self) -> DraftTokens:
        """The chain that takes the first child of every node, from the root on."""
        return self if self.parents is None else self.only(self.first_path)

    def first(self, num_nodes: int) -> DraftTokens:
        """The first n nodes; all of them where there are fewer."""
        if num_nodes >= len(self.token_ids):
            return self
        parents = None if self.parents is None else self.parents[:num_nodes]
        return DraftTokens(self.token_ids[:num_nodes], parents, self.probs[:num_nodes])

    def within(self, depth: int) -> DraftTokens:
        """The nodes of depth at most n."""
        if self.parents is None:
            return self.first(depth)
        depths = self.depths
        if max(depths) < depth:
            return self
        return self.only([node for node, above in enumerate(depths) if above < depth])

    def without(self, is_dropped: Sequence[bool]) -> DraftTokens:
        """The nodes that are not dropped, each by its own index, and neither is any of their ancestors."""
        kept: dict[int, None] = {-1: None}
        for node, parent in enumerate(self.parents or range(-1, len(self.token_ids) - 1)):
            if parent in kept and not is_dropped[node]:
                kept[node] = None
        return self.only(list(kept)[1:])

    def only(self, nodes: Sequence[int]) -> DraftTokens:
        """Some nodes in a new order, in which the parents of each come before it."""
        places = {node: place for place, node in enumerate(nodes)}
        parents = self.parents or range(-1, len(self.token_ids) - 1)
        return DraftTokens(
            tuple(self.token_ids[node] for node in nodes),
            tuple(places.get(parents[node], -1) for node in nodes),
            tuple(self.probs[node] for node in nodes) if self.probs else (),
        )


NO_DRAFT: Final = DraftTokens()
"""No draft tokens."""


@dataclass(frozen=True, slots=True)
class TreeBudget:
    """What a tree of draft tokens may have, besides the longest path.

    Raises:
        ValueError: names the field, the value and what is allowed.
    """

    num_nodes: int
    """Most nodes, 1..MAX_DRAFT_NODES."""
    widths: tuple[int, ...] = ()
    """Children of each node, by depth, from the root on: a tree of one shape. Empty: the likeliest nodes."""
    min_chance: float = 0.0
    """Least chance that a node is reached, as the draft estimates it, in [0, 1); a shape has no bound."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= MAX_DRAFT_NODES:
            raise ValueError(f"tree.num_nodes is {self.num_nodes}; allowed: 1..{MAX_DRAFT_NODES}")
        if any(width < 1 for width in self.widths):
            raise ValueError(f"tree.widths is {self.widths}; allowed: numbers of 1 or more")
        if not 0.0 <= self.min_chance < 1.0:
            raise ValueError(f"tree.min_chance is {self.min_chance}; allowed: 0 or more, below 1")

    @classmethod
    def of_widths(cls, widths: Sequence[int]) -> TreeBudget:
        """The budget of a tree of one shape, for all of its nodes."""
        return cls(sum(accumulate(widths, mul)), tuple(widths))


@dataclass(frozen=True, slots=True)
class LookaheadBudget:
    """What lookahead decoding may compute with a step of the target, per request.

    Raises:
        ValueError: names the field, the value and what is allowed.
    """

    width: int = 7
    """Columns of the window (W)."""
    ngram_len: int = 5
    """Tokens of an n-gram (N): the first is committed, the others are proposed."""
    num_guesses: int = 7
    """N-grams stored, and proposed, for each first token (G)."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.num_guesses < 1:
            raise ValueError(
                f"lookahead has width {self.width} and {self.num_guesses} guesses; allowed: 1 or more"
            )
        if self.ngram_len < 2:
            raise ValueError(f"lookahead has n-grams of {self.ngram_len} tokens; allowed: 2 or more")
        if (num_rows := self.max_window_rows + self.max_guess_rows) > MAX_DRAFT_NODES:
            raise ValueError(
                f"lookahead {self} takes {num_rows} rows; allowed: at most {MAX_DRAFT_NODES}, of which "
                "guesses take num_guesses * (ngram_len - 1)"
            )

    def __str__(self) -> str:
        return f"{self.width}x{self.ngram_len}x{self.num_guesses}"

    @property
    def num_levels(self) -> int:
        """Levels of a full window."""
        return self.ngram_len - 1

    def num_columns(self, num_levels: int) -> int:
        """Columns of a window of n levels: one less for each, until all are there."""
        return self.width + self.num_levels - num_levels

    @property
    def max_window_rows(self) -> int:
        """Most rows of the window."""
        return max(levels * self.num_columns(levels) for levels in range(1, self.ngram_len)) - 1

    @property
    def max_guess_rows(self) -> int:
        """Most rows of n-grams that are verified."""
        return self.num_guesses * (self.ngram_len - 1)
