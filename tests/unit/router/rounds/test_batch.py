"""Which sessions go into a step, and with how many tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from specray.router.scheduler import BatchLimits, Share, form_batch


@dataclass(frozen=True)
class Offer:
    num_missing: int
    num_drafted: int = 0
    is_prefilling: bool = False
    last_step: int = 0


def prompt(num_tokens: int, num_drafted: int = 0) -> Offer:
    return Offer(num_tokens, num_drafted, is_prefilling=True)


LIMITS = BatchLimits(max_num_seqs=4, max_num_batched_tokens=64, prefill_chunk_tokens=32)


def test_running_sessions_bring_all_they_have() -> None:
    assert form_batch([Offer(1, 4), Offer(3, 2)], LIMITS) == [Share(0, 5), Share(1, 5)]


def test_running_sessions_go_before_prefills() -> None:
    assert form_batch([prompt(10), Offer(1, 4)], LIMITS) == [Share(1, 5), Share(0, 10)]


def test_prefills_share_one_chunk_budget_in_order_of_arrival() -> None:
    assert form_batch([prompt(20), prompt(100), prompt(5)], LIMITS) == [Share(0, 20), Share(1, 12)]


def test_prefill_takes_what_running_sessions_leave() -> None:
    running = [Offer(1, 19), Offer(1, 19), Offer(1, 19)]
    assert form_batch([prompt(100), *running], LIMITS)[-1] == Share(0, 4)


def test_last_chunk_brings_its_draft_tokens() -> None:
    assert form_batch([prompt(32, num_drafted=4)], LIMITS) == [Share(0, 36)]
    assert form_batch([prompt(33, num_drafted=4)], LIMITS) == [Share(0, 32)]


def test_sessions_that_did_not_fit_go_first_in_the_next_step() -> None:
    offers = [Offer(1, last_step=7), Offer(1, last_step=7), Offer(1, last_step=3), Offer(1, last_step=7)]
    limits = BatchLimits(max_num_seqs=2, max_num_batched_tokens=64, prefill_chunk_tokens=32)
    assert [share.position for share in form_batch(offers, limits)] == [2, 0]


def test_a_session_larger_than_the_step_still_advances() -> None:
    limits = BatchLimits(max_num_seqs=4, max_num_batched_tokens=16, prefill_chunk_tokens=16)
    assert form_batch([Offer(20, 3)], limits) == [Share(0, 16)]


def test_nothing_offered_is_nothing_scheduled() -> None:
    assert form_batch([], LIMITS) == []


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_and_nobody_starves(seed: int) -> None:
    rng = random.Random(seed)
    limits = BatchLimits(
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(16, 80),
        prefill_chunk_tokens=rng.randint(16, 64),
    )
    last_steps = [0] * 12
    kinds = [rng.random() < 0.3 for _ in last_steps]
    for step in range(1, 60):
        offers = [
            Offer(rng.randint(1, 9), rng.randint(0, 8), is_prefilling=kinds[index], last_step=last)
            for index, last in enumerate(last_steps)
        ]
        shares = form_batch(offers, limits)
        assert len(shares) <= limits.max_num_seqs
        assert sum(share.max_new_tokens for share in shares) <= limits.max_num_batched_tokens
        assert len({share.position for share in shares}) == len(shares) > 0
        for share in shares:
            offer = offers[share.position]
            assert 1 <= share.max_new_tokens <= offer.num_missing + offer.num_drafted
            last_steps[share.position] = step
    running = [last for last, is_prefill in zip(last_steps, kinds, strict=True) if not is_prefill]
    assert min(running) > 40
