"""What a round is expected to draft and to commit, from rates per token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

MISSES_BY_WIDTH = (1.0, 0.5, 0.3)
"""P(miss) of 1, 2 or 3 branches per number of accepted tokens, relative to the draft's first guess alone,
before it is measured. Measured on the embedded pair."""


class ExpectedRound(NamedTuple):
    """Expectation of one session's round."""

    num_drafts: float
    """Draft tokens: of a tree, all nodes."""
    num_tokens: float
    """Committed tokens."""
    continuation: float
    """P(a draft token is followed by another)."""


class DraftStep(NamedTuple):
    """Expectation of one step of the draft."""

    chance: float
    """P(the step is taken)."""
    num_growing: float
    """Proposals that grow in it if it is taken; at least 1."""


def expected_drafts(num_drafts: int, continuation: float) -> float:
    """Expected draft tokens of a proposal of at most ``num_drafts`` >= 1.

    Args:
        continuation: P(a draft token is followed by another), in (0, 1].
    """
    if continuation >= 1.0:
        return float(num_drafts)
    return (1 - continuation**num_drafts) / (1 - continuation)


def expected_steps(num_drafts: int, continuations: Sequence[float], num_proposals: int) -> list[DraftStep]:
    """Draft steps until the last of some proposals has ended, each of at most ``num_drafts`` tokens.

    They grow side by side, so all wait for the longest; the token before which it ends is drafted too.

    Args:
        continuations: of some of the proposals, which stand for all; as in ``expected_drafts``.
    """
    share = num_proposals / len(continuations)
    steps = [DraftStep(1.0, float(num_proposals))]
    chances = [1.0] * len(continuations)
    for _ in range(num_drafts - 1):
        # The step after token i is taken when one proposal at least has token i.
        taken = 1 - math.prod(1 - chance for chance in chances) ** share
        if taken < 0.01:
            break
        steps.append(DraftStep(taken, max(1.0, share * sum(chances) / taken)))
        chances = [chance * more for chance, more in zip(chances, continuations, strict=True)]
    return steps


def expected_tokens(acceptance: float, num_drafts: int, continuation: float = 1.0) -> float:
    """Expected tokens that a round of at most ``num_drafts`` draft tokens commits.

    Leviathan et al. 2023 for ``continuation`` 1; token i is there and accepted, with all before it, in
    ``continuation^(i-1) * acceptance^i`` of the rounds.

    Args:
        acceptance: per token, in [0, 1).
        continuation: per token that follows another, in (0, 1].
    """
    both = acceptance * continuation
    return 1 + acceptance * (1 - both**num_drafts) / (1 - both)


def prior_hit_rate(width: int, acceptance: float) -> float:
    """P(the next token is among ``width`` guesses), if the first alone is right with P(acceptance)."""
    return 1 - (1 - acceptance) * MISSES_BY_WIDTH[width - 1]
