"""What a round is expected to draft and to commit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Round(NamedTuple):
    """What a round of one session is expected to be."""

    num_drafts: float
    num_tokens: float
    """That it commits."""
    continuation: float
    """How often a draft token is followed by another."""


_LEAST_CHANCE = 0.01
"""Of a step that counts."""
MISSES_BY_WIDTH = (1.0, 0.5, 0.3)
"""Before it is measured: of the verdicts whose last token the draft's first guess misses, how many are missed
with 1, 2 or 3 branches for each number of accepted tokens. Measured on the embedded pair."""


def prior_hit_rate(width: int, acceptance: float) -> float:
    """How often the next token is among ``width`` guesses, when each alone is right so often."""
    return 1 - (1 - acceptance) * MISSES_BY_WIDTH[width - 1]


def expected_drafts(num_drafts: int, continuation: float) -> float:
    """Draft tokens of a proposal of at most ``num_drafts`` >= 1, when each but the first comes so often.

    Args:
        continuation: per token that follows another, in (0, 1].
    """
    if continuation >= 1.0:
        return float(num_drafts)
    return (1 - continuation**num_drafts) / (1 - continuation)


class DraftStep(NamedTuple):
    """What one step of the draft is expected to be."""

    chance: float
    """That it is taken at all."""
    num_lines: float
    """Proposals that it makes longer, when it is; at least 1."""


def expected_steps(num_drafts: int, continuations: Sequence[float], num_proposals: int) -> list[DraftStep]:
    """Steps of the draft until the last of some proposals has ended, each of at most ``num_drafts`` tokens.

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
        if taken < _LEAST_CHANCE:
            break
        steps.append(DraftStep(taken, max(1.0, share * sum(chances) / taken)))
        chances = [chance * more for chance, more in zip(chances, continuations, strict=True)]
    return steps


def expected_tokens(acceptance: float, num_drafts: int, continuation: float = 1.0) -> float:
    """Tokens that a round of at most ``num_drafts`` draft tokens commits on average.

    Leviathan et al. 2023 for ``continuation`` 1; token i is there and accepted, with all before it, in
    ``continuation^(i-1) * acceptance^i`` of the rounds.

    Args:
        acceptance: per token, in [0, 1).
        continuation: per token that follows another, in (0, 1].
    """
    both = acceptance * continuation
    return 1 + acceptance * (1 - both**num_drafts) / (1 - both)
