"""The theorem with a draft that proposes trees of any shape, whatever K and overlap."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specray.draft_tokens import DraftTokens
from specray.fakes import FakeDraft, LocalDrafter, NoisyGuesser, RandomGuesser, Transport, VirtualClock
from specray.requests import GenerateRequest
from specray.types import DraftReplies, SpeculateItem
from tests.unit.router.harness import DRAFT_STEP_S, MODEL, expected, request, router_config, run, serving


class TreeDraft(FakeDraft):
    """Proposes random trees, no deeper than asked: behind each node one of its guesser's first guesses."""

    def __init__(self, guesser: NoisyGuesser | RandomGuesser, seed: int, *, max_nodes: int = 12) -> None:
        super().__init__(guesser, cost=lambda steps: int(steps * DRAFT_STEP_S * 1e9))
        self._rng = random.Random(seed)
        self._max_nodes = max_nodes

    def _proposed(self, tokens: Sequence[int], length: int, noise_key: int) -> DraftTokens:
        draft = DraftTokens()
        for _ in range(self._rng.randint(0, self._max_nodes)):
            parent = self._rng.randrange(-1, len(draft))
            path = [draft.token_ids[node] for node in draft.path(parent)]
            if len(path) < length:
                guess = self._rng.choice(self.guesser.ranked([*tokens, *path], noise_key, 2))
                parents = draft.parents or tuple(range(-1, len(draft) - 1))
                draft = DraftTokens((*draft.token_ids, guess), (*parents, parent))
        return draft


def _requests() -> list[GenerateRequest]:
    return [
        request("short", (7,), 1),
        request("long", tuple(index % 64 for index in range(70)), 40),
        request("seeded", (9, 8, 7), 30, temperature=1.0, seed=1234, num_logprobs=0),
        request("stopped", (5, 5, 5), 40, stop_token_ids=(11, 12, 13), eos=(11,)),
    ]


def _truth(given: GenerateRequest) -> tuple[int, ...]:
    tokens = expected(given)
    stops = [index for index, token in enumerate(tokens) if token in given.sampling.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate", "auto"])
@pytest.mark.parametrize("k", [1, 3, 8, "auto"])
@pytest.mark.parametrize("guesser", [NoisyGuesser(MODEL, agreement=0.8), RandomGuesser(MODEL)])
def test_output_is_the_targets_alone_with_any_tree(
    guesser: NoisyGuesser | RandomGuesser, k: int | str, overlap: str
) -> None:
    clock = VirtualClock()
    config = router_config(prefill_chunk_tokens=16)

    async def main() -> None:
        draft = TreeDraft(guesser, seed=8)
        async with serving(
            clock, draft=draft, config=config, overlap=overlap, num_speculative_tokens=k
        ) as pair:
            given = _requests()
            outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
            for each, output in zip(given, outputs, strict=True):
                assert output.token_ids == _truth(each), each.request_id
                assert len(output.logprobs) == (len(output.token_ids) if each.request_id == "seeded" else 0)
                assert all(
                    entry.token_id == token
                    for entry, token in zip(output.logprobs, output.token_ids, strict=False)
                )
            rounds = pair.counted("specray_rounds_total")
            accepted = pair.counted("specray_spec_decode_num_accepted_tokens_total")
            cut = accepted + rounds - sum(len(output.token_ids) for output in outputs)
            assert 0 <= cut <= 8, "only tokens after the stop of one request are dropped"
            if isinstance(guesser, NoisyGuesser) and k != "auto":
                assert accepted > 10
            await pair.settle()

    run(clock, main())


def test_a_tree_accepts_more_than_its_first_chain() -> None:
    """The same guesser, whose second guess is often right where its first is not."""
    accepted: dict[str, float] = {}
    for name, kind in (("chain", FakeDraft), ("tree", TreeDraft)):
        clock = VirtualClock()

        async def main(name: str, kind: type[FakeDraft], clock: VirtualClock) -> None:
            guesser = NoisyGuesser(MODEL, agreement=0.5)
            draft = TreeDraft(guesser, 1, max_nodes=60) if kind is TreeDraft else FakeDraft(guesser)
            async with serving(clock, draft=draft, overlap="serial", num_speculative_tokens=3) as pair:
                await pair.router.complete(replace(request("a"), max_tokens=200))
                accepted[name] = pair.counted("specray_spec_decode_num_accepted_tokens_total")

        run(clock, main(name, kind, clock))
    assert accepted["tree"] > 1.2 * accepted["chain"] > 0


class FirstChainDraft(FakeDraft):
    """A draft from before outcomes of trees: it does not see the other nodes."""

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        return super().speculate([item.of_first_chain() for item in items])


def test_outcomes_of_all_nodes_are_hit_more_often_than_those_of_the_first_chain() -> None:
    """For as many branches. With a draft from before, verdicts beside the first chain are misses as ever."""
    hits: dict[type[FakeDraft], float] = {}
    for kind in (FakeDraft, FirstChainDraft):
        clock = VirtualClock()

        async def main(kind: type[FakeDraft], clock: VirtualClock) -> None:
            draft = kind(NoisyGuesser(MODEL, agreement=0.5), cost=lambda steps: int(steps * 1e6))
            options: dict[str, Any] = {"overlap": "enumerate", "num_speculative_tokens": 2, "tree": "2x2"}
            async with serving(clock, draft=draft, **options) as pair:
                given = request("a", max_tokens=300)
                output = await pair.router.complete(given)
                assert output.token_ids == expected(given)
                num_rounds = pair.counted("specray_rounds_total")
                hits[kind] = pair.counted("specray_outcomes_total", result="hit") / num_rounds
                await pair.settle()

        run(clock, main(kind, clock))
    assert hits[FakeDraft] > hits[FirstChainDraft] + 0.2 > 0.6


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_lost_and_late_messages_change_nothing_with_trees(seed: int, overlap: str) -> None:
    clock = VirtualClock()
    rng = random.Random(seed)

    async def main() -> None:
        draft = TreeDraft(NoisyGuesser(MODEL, agreement=0.8), seed)

        def lease(number: int) -> LocalDrafter:
            transport = Transport(rng, max_delay_s=0.05, loss=0.1, duplication=0.2)
            return LocalDrafter(draft, clock, transport=transport, dies_after=rng.choice([None, 20]))

        config = router_config(prefill_chunk_tokens=16, verify_timeout_s=0.5, round_timeout_s=0.3)
        async with serving(
            clock,
            draft=draft,
            make_drafter=lease,
            config=config,
            overlap=overlap,
            num_speculative_tokens=4,
        ) as pair:

            async def forget() -> None:
                while True:
                    await asyncio.sleep(rng.uniform(0.0, 0.3))
                    rng.choice([pair.target.forget, draft.forget])(rng.choice(["0", "1", "2"]))

            forgetting = asyncio.create_task(forget())
            given = [request(str(index), tuple(range(1, 30 - index)), 30) for index in range(3)]
            outputs = await asyncio.gather(*(pair.router.complete(each) for each in given))
            forgetting.cancel()
            assert [output.token_ids for output in outputs] == [expected(each) for each in given]

    run(clock, main())
