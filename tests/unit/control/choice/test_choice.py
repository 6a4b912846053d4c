"""Which method drafts a text: the service's own choice is as fast as the best single one, text by text."""

from __future__ import annotations

import pytest

from tests.pairwise import pairs
from tests.unit.control.choice.texts import Machine, Phase, kit, method, text, tokens_per_s

pytestmark = pytest.mark.slow
LENGTHS = (1, 2, 4)
"""Lengths of the draft model's proposals that are tried alone, besides the chosen one."""
LEAST = 0.95
"""Least share of the best single method's tokens per second."""


@pairs(
    repeats=(0.05, 0.6, 0.8, 0.97),
    agrees=(0.3, 0.6, 0.9),
    draft_step=(0.05, 0.2, 0.5),
    row=(0.0, 0.05),
    changes=(False, True),
)
def test_the_services_choice_is_as_fast_as_the_best_single_method(
    repeats: float, agrees: float, draft_step: float, row: float, changes: bool
) -> None:
    """Two texts of 200 tokens; in the middle of some, what repeats and what agrees changes places."""
    phases = [Phase(200, repeats, agrees)]
    if changes:
        phases = [Phase(100, repeats, agrees), Phase(100, 1.02 - repeats, 1.2 - agrees)]
    base = kit(Machine(draft_step, row), [text(phases, seed) for seed in (1, 2)])
    found = {
        "plain": tokens_per_s(method(base, "plain"), num_requests=2),
        "ngram": tokens_per_s(method(base, "ngram"), num_requests=2),
    }
    for k in ("auto", *LENGTHS):
        found[f"model, K = {k}"] = tokens_per_s(
            method(base, "model", num_speculative_tokens=k), num_requests=2
        )
    best = max(found, key=lambda name: found[name])
    assert tokens_per_s(method(base, "service"), num_requests=2) >= LEAST * found[best], (best, found)
