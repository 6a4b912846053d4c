"""Trees of any shape in rounds: what they bring beyond their first chain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specray.fakes import FakeDraft, NoisyGuesser, VirtualClock
from specray.types import DraftReplies, SpeculateItem
from tests.unit.router.drafts import TreeDraft
from tests.unit.router.harness import MODEL, Pair, complete, in_virtual_time, serving


@in_virtual_time
async def served(clock: VirtualClock, draft: FakeDraft, **options: Any) -> Pair:
    async with serving(clock, draft=draft, **options) as pair:
        await complete(pair, max_tokens=300)
        await pair.settle()
        return pair


def test_a_tree_accepts_more_than_its_first_chain() -> None:
    """The same guesser, whose second guess is often right where its first is not."""
    guesser = NoisyGuesser(MODEL, agreement=0.5)
    chain, tree = (
        served(draft, overlap="serial", num_speculative_tokens=3).counted(
            "specray_spec_decode_num_accepted_tokens_total"
        )
        for draft in (FakeDraft(guesser), TreeDraft(guesser, 1, max_nodes=60))
    )
    assert tree > 1.2 * chain > 0


class FirstChainDraft(FakeDraft):
    """A draft from before outcomes of trees: it does not see the other nodes."""

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        return super().speculate([item.of_first_chain() for item in items])


def test_outcomes_of_all_nodes_are_hit_more_often_than_those_of_the_first_chain() -> None:
    """For as many branches. With a draft from before, verdicts beside the first chain are misses as ever."""
    hits: dict[type[FakeDraft], float] = {}
    for kind in (FakeDraft, FirstChainDraft):
        draft = kind(NoisyGuesser(MODEL, agreement=0.5), cost=lambda steps: int(steps * 1e6))
        pair = served(draft, overlap="enumerate", num_speculative_tokens=2, tree="2x2")
        num_rounds = pair.counted("specray_rounds_total")
        hits[kind] = pair.counted("specray_outcomes_total", result="hit") / num_rounds
    assert hits[FakeDraft] > hits[FirstChainDraft] + 0.2 > 0.6
