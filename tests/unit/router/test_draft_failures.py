"""Drafts that fail, are late or refuse a session: the router goes on without them, and takes them back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from specray.control.controller import REFUSED_REST_ROUNDS
from specray.errors import ConfigError
from specray.fakes import (
    FakeDraft,
    FakeDrafterSource,
    LocalDrafter,
    LocalVerifier,
    PerfectGuesser,
    VirtualClock,
)
from specray.requests import SpeculationParams
from specray.router import Router
from specray.types import DraftReplies, SpeculateItem, UnknownSequence
from tests.unit.router.harness import (
    MODEL,
    TARGET_S,
    chunks_of,
    complete,
    expected,
    fake_draft,
    fake_target,
    leasing,
    request,
    router_config,
    serving,
)


async def test_lost_draft_costs_no_pause_and_another_is_leased(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    leased, lease = leasing(lambda _: LocalDrafter(draft, clock))
    async with serving(
        clock, draft=draft, make_drafter=lease, overlap="ahead", num_speculative_tokens=3
    ) as pair:
        given = request(max_tokens=400)
        call = asyncio.create_task(chunks_of(pair, given))
        await asyncio.sleep(0.5)
        leased[0].lose()
        draft.forget()
        timed = await call
        assert sum((chunk.token_ids for _, chunk in timed), ()) == expected(given)
        gaps = [after[0] - before[0] for before, after in pairwise(timed)]
        # Coming back, the new draft reads everything at once; that round alone waits for it.
        assert max(gaps) < 2.1 * TARGET_S
        assert len(leased) == 2
        assert pair.counted("specray_draft_lost_total") == 1
        assert pair.counted("specray_draft_leases_total") == 2
        lengths = [len(chunk.token_ids) for _, chunk in timed]
        assert lengths[-2] == 4, "speculation came back"
        await pair.settle()


async def test_draft_that_is_late_beyond_patience_is_not_waited_for_again_and_again(
    clock: VirtualClock,
) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    hanging = LocalDrafter(draft, clock, hangs_after=10)
    config = router_config(round_timeout_s=50.0)
    async with serving(
        clock,
        draft=draft,
        make_drafter=lambda _: hanging,
        config=config,
        overlap="ahead",
        num_speculative_tokens=3,
    ) as pair:
        await complete(pair, max_tokens=300)
        assert clock.monotonic() < 300 * TARGET_S + 0.3
        assert pair.counted("specray_draft_lost_total") == 0


async def test_no_draft_at_start_is_plain_decoding_until_one_comes(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    _, lease = leasing(lambda _: LocalDrafter(draft, clock), missing=range(3))
    async with serving(
        clock, draft=draft, make_drafter=lease, overlap="ahead", num_speculative_tokens=3
    ) as pair:
        output = await complete(pair, max_tokens=200)
        assert output.stats is not None
        assert 0 < output.stats.num_spec_steps < 50
        assert output.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("info", [{"tokenizer_fingerprint": "other"}, {"protocol_version": 99}])
async def test_draft_that_does_not_fit_is_refused_at_start(clock: VirtualClock, info: dict[str, Any]) -> None:
    draft = fake_draft(**info)
    router = Router(
        LocalVerifier(fake_target(), clock),
        FakeDrafterSource(lambda _: LocalDrafter(draft, clock)),
        clock=clock,
    )
    with pytest.raises(ConfigError, match=next(iter(info))):
        await router.start()


async def test_draft_that_refuses_a_session_is_left_alone_for_a_while(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL), max_num_seqs=1)
    async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=3) as pair:
        await asyncio.gather(
            complete(pair, request_id="first", max_tokens=100),
            complete(pair, request_id="second", max_tokens=100),
        )
        await pair.settle()


async def test_draft_that_does_not_know_what_it_was_told_from_the_start_is_left_alone_for_a_while(
    clock: VirtualClock,
) -> None:
    """Else it would be asked again with every answer, and its session would wait for ever."""

    class Forgetful(FakeDraft):
        def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
            self.num_steps += 1
            unknown = [UnknownSequence(item.request_id, item.round_id, item.base_len) for item in items]
            return DraftReplies(tuple(unknown), 1_000_000)

    draft = Forgetful(PerfectGuesser(MODEL))
    async with serving(clock, draft=draft, overlap="serial", num_speculative_tokens=3) as pair:
        await complete(pair, max_tokens=1 + 2 * (1 + REFUSED_REST_ROUNDS))
        await pair.settle()
        # Once with the prompt; then each time after the rest.
        assert draft.num_steps == 3


async def test_context_beyond_the_drafts_length_goes_on_without_it(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL), max_model_len=64)
    async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=3) as pair:
        output = await complete(pair, max_tokens=200)
        assert output.stats is not None and output.stats.num_spec_steps < 16
        await pair.settle()


async def test_request_may_switch_speculation_off_or_choose_k(clock: VirtualClock) -> None:
    draft = fake_draft(PerfectGuesser(MODEL))
    async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=3) as pair:
        off = await complete(pair, speculation=SpeculationParams(enabled=False))
        assert off.stats is not None and off.stats.num_draft_tokens == 0
        assert draft.num_steps == 0
        wide = await complete(pair, max_tokens=90, speculation=SpeculationParams(num_speculative_tokens=7))
        assert wide.stats is not None and len(wide.stats.acceptance_histogram) == 8
