"""Random trees of draft tokens for a target whose output is known, and what must be kept of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from specray.draft_tokens import DraftTokens
from tests.unit.engine.harness import Drafter, Session


@dataclass(frozen=True)
class Shape:
    """A tree without tokens: each node is right at its depth, or off by its error."""

    parents: tuple[int, ...]
    errors: tuple[int, ...]

    def tree(self, ahead: Sequence[int], vocab_size: int) -> DraftTokens:
        """The tree for an output that goes on with ``ahead``; deeper nodes are left out."""
        depths = DraftTokens((0,) * len(self.parents), self.parents).depths
        tokens = [
            (ahead[depth] + error) % vocab_size if depth < len(ahead) else 0
            for depth, error in zip(depths, self.errors, strict=True)
        ]
        return DraftTokens(tuple(tokens), self.parents).within(len(ahead))


@st.composite
def shapes(draw: st.DrawFn, max_nodes: int = 14) -> Shape:
    """Any tree; three nodes of five are right at their depth, so equal siblings occur too."""
    count = draw(st.integers(0, max_nodes))
    parents = tuple(draw(st.integers(-1, index - 1)) for index in range(count))
    return Shape(parents, tuple(draw(st.sampled_from((0, 0, 0, 1, 2))) for _ in range(count)))


def shaped_drafter(
    given: Sequence[Shape], output: Sequence[int], num_prompt: int, vocab_size: int, *, most: int = 64
) -> Drafter:
    """Trees of the given shapes, one round after the other, for the output that a target will write."""
    turns = itertools.cycle(given)

    def tree(session: Session, count: int) -> DraftTokens:
        ahead = output[len(session.token_ids) - num_prompt :]
        return next(turns).tree(ahead, vocab_size).first(most)

    return tree


def num_kept(draft: DraftTokens, ahead: Sequence[int]) -> int:
    """How many tokens of the output a path from the root holds, found by looking at every node."""
    lengths = [
        len(path)
        for path in map(draft.path, range(-1, len(draft)))
        if [draft.token_ids[node] for node in path] == list(ahead[: len(path)])
    ]
    return max(lengths)
