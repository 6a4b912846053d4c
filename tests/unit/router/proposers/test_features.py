"""Draft tokens that come with the verdict: from the target's own drafter, verified in the next round."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from specray.draft_tokens import TreeBudget
from specray.errors import EngineLostError, InvalidRequestError
from specray.fakes import (
    AdversarialGuesser,
    EmptyGuesser,
    FakeTarget,
    FakeTransport,
    LocalVerifier,
    NoisyGuesser,
    PerfectGuesser,
    RandomGuesser,
    VirtualClock,
)
from specray.interfaces import Verifier
from specray.requests import SpeculationParams
from specray.types import DraftKind, TargetReplies, VerifyItem
from tests.unit.router.harness import MODEL, expected, request, router_config, serving

GUESSERS = {
    "perfect": PerfectGuesser(MODEL),
    "noisy": NoisyGuesser(MODEL),
    "random": RandomGuesser(MODEL),
    "adversarial": AdversarialGuesser(MODEL),
    "empty": EmptyGuesser(),
}
FEATURES: dict[str, Any] = {"draft_kind": DraftKind.FEATURES, "has_draft_model": False}


class Watched(FakeTarget):
    """Keeps the items that it is sent."""

    def __init__(self, guesser: Any, **options: Any) -> None:
        super().__init__(MODEL, drafter=guesser, **{"cost": lambda rows: 20_000_000, **options})
        self.items: list[VerifyItem] = []

    def verify(self, items: Any) -> TargetReplies:
        self.items.extend(items)
        return super().verify(items)


async def test_a_perfect_drafter_makes_every_round_a_whole_one(clock: VirtualClock) -> None:
    target = Watched(PerfectGuesser(MODEL))

    async with serving(clock, target=target, num_speculative_tokens=3, **FEATURES) as pair:
        await pair.router.complete(request(max_tokens=9))

    # The prompt's verdict brings the first draft; the last rounds ask for no more than can be of use.
    assert [len(item.draft) for item in target.items] == [0, 3, 3]
    assert [item.num_next_draft_tokens for item in target.items] == [3, 3, 2]


@pytest.mark.parametrize("name", ["perfect", "noisy", "random", "adversarial"])
@pytest.mark.parametrize("tree", ["9", "3x2x1"])
async def test_trees_of_the_drafter_are_verified_and_the_output_stays(
    clock: VirtualClock, name: str, tree: str
) -> None:
    target = Watched(GUESSERS[name])
    given = [
        request("long", tuple(index % 64 for index in range(30)), 23),
        request("seeded", (9, 8, 7), 17, temperature=1.0, seed=1234),
    ]

    async with serving(clock, target=target, num_speculative_tokens=3, tree=tree, **FEATURES) as pair:
        outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
        assert [output.token_ids for output in outputs] == [expected(each) for each in given]
        await pair.settle()

    asked = [item.next_tree for item in target.items if item.num_next_draft_tokens == 3]
    assert asked and set(asked) == {TreeBudget(9) if tree == "9" else TreeBudget(15, (3, 2, 1))}
    assert any(not item.draft.is_chain for item in target.items)
    assert max(len(item.draft) for item in target.items) == (9 if tree == "9" else 15)


async def test_a_drafter_is_asked_to_end_what_is_not_worth_its_rows(clock: VirtualClock) -> None:
    """Where K is chosen by measurement, and of what is drawn without rejection's noise."""
    cost = lambda rows: 10_000_000 + 2_000_000 * rows  # noqa: E731
    target = Watched(NoisyGuesser(MODEL), cost=cost)

    async with serving(clock, target=target, num_speculative_tokens="auto", **FEATURES) as pair:
        for number in range(4):
            await pair.router.complete(request(str(number), max_tokens=100))

    bounds = [item.next_min_acceptance for item in target.items if item.num_next_draft_tokens]
    assert max(bounds) > 0.05


async def test_chunks_of_a_prompt_ask_for_nothing(clock: VirtualClock) -> None:
    target = Watched(PerfectGuesser(MODEL))
    given = request("long", tuple(index % 64 for index in range(70)), 8)

    config = router_config(prefill_chunk_tokens=16)
    async with serving(clock, target=target, config=config, num_speculative_tokens=2, **FEATURES) as pair:
        await pair.router.complete(given)

    chunks = [item for item in target.items if not item.sample]
    assert len(chunks) >= 4 and {item.num_next_draft_tokens for item in chunks} == {0}


class Dying(Watched):
    """Ends its connection every few steps, and knows no sequence afterwards."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(NoisyGuesser(MODEL))
        self._rng = rng
        self.num_losses = 0

    def verify(self, items: Any) -> TargetReplies:
        if self._rng.random() < 0.2:
            self.forget()
            self.num_losses += 1
            raise EngineLostError("gone")
        if self._rng.random() < 0.1:
            self.forget(items[0].request_id)
        return super().verify(items)


@pytest.mark.parametrize("seed", range(1, 5))
async def test_targets_that_die_cost_no_token(clock: VirtualClock, seed: int) -> None:
    target = Dying(random.Random(seed))

    async def connect() -> Verifier:
        transport = FakeTransport(random.Random(seed), max_delay_s=0.03, duplication=0.2)
        return LocalVerifier(target, clock, transport=transport)

    async with serving(clock, target=target, verifier=connect, num_speculative_tokens=3, **FEATURES) as pair:
        given = [request(str(number), (number, 3, 4), 30) for number in range(4)]
        outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
        assert [output.token_ids for output in outputs] == [expected(each) for each in given]
        assert target.num_losses and any(item.draft.token_ids for item in target.items)


async def test_a_request_may_ask_for_it_beside_a_draft_model(clock: VirtualClock) -> None:
    target = Watched(PerfectGuesser(MODEL))
    given = request(speculation=SpeculationParams(draft=DraftKind.FEATURES, num_speculative_tokens=2))

    async with serving(clock, target=target) as pair:
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        assert pair.counted("specray_spec_decode_num_draft_tokens_by_source_total", source="features") > 0
        assert pair.draft.num_steps == 0


async def test_it_is_refused_where_the_target_has_no_drafter(clock: VirtualClock) -> None:
    given = request(speculation=SpeculationParams(draft=DraftKind.FEATURES))

    async with serving(clock) as pair:
        with pytest.raises(InvalidRequestError, match="draft is 'features', but the target has no drafter"):
            await pair.router.complete(given)


async def test_foreign_tokens_of_a_drafter_do_not_reach_the_target(clock: VirtualClock) -> None:
    class Foreign:
        def ranked(self, tokens: Any, seed: int, count: int) -> tuple[int, ...]:
            return (MODEL.next_token(tokens, seed) if len(tokens) % 3 else 64 + 5,)

    target = Watched(Foreign())

    async with serving(clock, target=target, num_speculative_tokens=4, **FEATURES) as pair:
        given = request(max_tokens=20)
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)

    assert max(len(item.draft) for item in target.items) >= 1
    assert all(token < 64 for item in target.items for token in item.draft.token_ids)


async def test_rejection_drops_draft_tokens_without_their_distributions(clock: VirtualClock) -> None:
    """The fake drafter gives none; what was not sampled must not be tested as if it were."""
    from specray.types import Verification

    target = Watched(PerfectGuesser(MODEL))
    given = request(temperature=1.0, seed=3)
    given = replace(given, sampling=replace(given.sampling, verification=Verification.REJECTION))

    async with serving(clock, target=target, num_speculative_tokens=3, **FEATURES) as pair:
        await pair.router.complete(given)

    assert any(item.num_next_draft_tokens for item in target.items)
    assert all(not item.draft.token_ids for item in target.items)
