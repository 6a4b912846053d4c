"""Tries of continuations: the chain that is proposed anyway, and next to it what else may follow, best first.

Whoever proposes has several *continuations*: earlier places that the last tokens match, each with a weight
and with tokens that may come next. Continuations that agree on a token share a node, whose weight is the sum
of theirs. One that is followed down a branch has the share that it gave to it, so weights never grow with the
depth and estimate the chance that a node is reached.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Protocol

from specray.draft_tokens import MAX_DRAFT_NODES, NO_DRAFT, DraftTokens

MIN_WEIGHT = 0.01
"""Least estimated chance of a node besides the chain: no step is so cheap that a row for less would pay."""


class Continuation(Protocol):
    """One earlier place, and how much its continuation counts."""

    @property
    def weight(self) -> float:
        """Estimated chance that the output has followed it until here."""
        ...

    def next(self) -> Iterable[tuple[int, Continuation]]:
        """Tokens that may follow, and the continuation after each; together at most of this one's weight."""
        ...


def grow(
    chain: Sequence[int], continuations: Iterable[Continuation], *, num_nodes: int, depth: int
) -> DraftTokens:
    """The chain, and after it in the list the likeliest other nodes.

    Nothing follows the chain's last node, so the tree's first chain is the chain.

    Args:
        chain: at most MAX_DRAFT_NODES tokens; empty: there is nothing to propose.
        num_nodes: most nodes in all. The chain is never cut.
        depth: most tokens of a path.
    """
    num_nodes = min(num_nodes, MAX_DRAFT_NODES)
    if not chain or num_nodes <= len(chain):
        return DraftTokens(tuple(chain)) if chain else NO_DRAFT
    tokens, parents = list(chain), list(range(-1, len(chain) - 1))
    open_nodes: list[tuple[float, int, int, int, int, list[Continuation]]] = []
    num_seen = 0

    def push(parent: int, level: int, branches: dict[int, list[Continuation]]) -> None:
        nonlocal num_seen
        for token, following in branches.items():
            weight = sum(continuation.weight for continuation in following)
            if weight >= MIN_WEIGHT:
                num_seen += 1
                heappush(open_nodes, (-weight, num_seen, token, parent, level, following))

    along = list(continuations)
    for index, token in enumerate(chain[:depth]):
        branches = _branches(along)
        along = branches.pop(token, [])
        push(index - 1, index, branches)
    while open_nodes and len(tokens) < num_nodes:
        _, _, token, parent, level, following = heappop(open_nodes)
        tokens.append(token)
        parents.append(parent)
        if level + 1 < depth:
            push(len(tokens) - 1, level + 1, _branches(following))
    return DraftTokens(tuple(tokens), tuple(parents))


def _branches(continuations: Iterable[Continuation]) -> dict[int, list[Continuation]]:
    """What may follow, by token."""
    branches: dict[int, list[Continuation]] = {}
    for continuation in continuations:
        for token, following in continuation.next():
            branches.setdefault(token, []).append(following)
    return branches
