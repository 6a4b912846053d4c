"""What a router counts of a request's life, and what it looks at in every round of a session."""

from __future__ import annotations

from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.state import OFF, OFF_BY_REASON, Reason
from specray.fakes import NoisyGuesser, VirtualClock
from specray.requests import SpeculationParams
from specray.router.session.session import Session
from specray.types import MAX_SPECULATIVE_TOKENS, Verdict
from tests.unit.router.harness import (
    Pair,
    expected,
    fake_draft,
    fake_target,
    request,
    serving,
    speculation_config,
)


def total(pair: Pair, name: str) -> float:
    """Of all samples of that name, whatever their labels."""
    families = pair.router.metrics.registry.collect()
    return sum(sample.value for family in families for sample in family.samples if sample.name == name)


def plans(pair: Pair) -> dict[tuple[str, str, str], float]:
    """Verdicts by (overlap, K, reason) of their round's plan."""
    families = [family for family in pair.router.metrics.registry.collect() if family.name == "specray_plans"]
    return {
        (
            sample.labels["overlap"],
            sample.labels["num_speculative_tokens"],
            sample.labels["reason"],
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "specray_plans_total"
    }


async def test_every_token_is_counted_once_and_every_verdict_under_its_plan(clock: VirtualClock) -> None:
    async with serving(clock, overlap="serial", num_speculative_tokens=3) as pair:
        given = request(max_tokens=24)
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        await pair.settle()
        assert pair.counted("specray_output_tokens_total") == 24
        assert pair.counted("specray_time_to_first_token_seconds_count") == 1
        # The first verdict is of the prompt alone; all tokens after it wait for those before them.
        assert pair.counted("specray_inter_token_latency_seconds_count") == 23
        rounds = pair.counted("specray_rounds_total")
        assert 6 < rounds < 24
        assert total(pair, "specray_plans_total") == rounds
        # Of the last rounds one may have one draft token and one none: no more tokens are wanted.
        assert plans(pair) == {
            ("off", "0", "prefill"): 1,
            ("serial", "3", "fixed"): rounds - 3,
            ("serial", "1", "fixed"): 1,
            ("off", "0", "last_token"): 1,
        }
        # The first verdict, of the prompt, is no round of draft and target.
        assert pair.counted("specray_round_overhead_seconds_count") == rounds - 1


async def test_verdicts_without_speculation_are_counted_under_their_plan(clock: VirtualClock) -> None:
    """Speculation that is never right is off soon."""

    target = fake_target()
    draft = fake_draft(NoisyGuesser(target.model, 0.0))
    async with serving(clock, target=target, draft=draft, overlap="serial") as pair:
        await pair.router.complete(request(max_tokens=100))
        await pair.settle()
        assert plans(pair)["off", "0", "unprofitable"] > 50
        assert total(pair, "specray_plans_total") == pair.counted("specray_rounds_total")


async def test_a_replan_is_prepared_with_what_the_session_has_before_it_and_the_draft_was_not_told(
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unread: list[int] = []

    async with serving(clock, overlap="serial") as pair:
        controller, running = pair.router.controller, pair.router.sessions.running
        prepare = controller.prepare

        def record(stats: Any, num_running: int, **options: Any) -> None:
            live = running.get(stats.request_id)
            if live is not None:
                assert options["num_remaining"] == live.session.num_remaining
                assert options["num_unread"] == live.num_unread
                unread.append(options["num_unread"])
            prepare(stats, num_running, **options)

        monkeypatch.setattr(controller, "prepare", record)
        await pair.router.complete(request(max_tokens=60))

    assert max(unread) > 0


async def test_requests_that_are_not_drafted_for_are_passed_by(clock: VirtualClock) -> None:
    """Resting is asked in each round of each session, and a draft is neither told nor asked anything."""

    async with serving(clock, overlap="serial") as pair:
        given = request(speculation=SpeculationParams(enabled=False))
        output = await pair.router.complete(given)
        assert output.token_ids == expected(given)
        assert pair.draft.num_steps == 0
        stats = pair.router.controller.start_session(given)
        assert pair.router.controller.resting_plan(stats, 1) is OFF_BY_REASON[Reason.FIXED]
        assert not pair.router.controller.is_replan_near(stats, 1)


def test_a_replan_is_near_when_all_decided_otherwise() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    stats = controller.start_session(request())
    stats.plan, stats.rounds_to_replan = OFF, 9
    controller.modes.decide(1.0, 1)
    stats.num_changes = controller.modes.num_changes
    assert not controller.is_replan_near(stats, 1)
    controller.modes.num_changes += 1
    assert controller.is_replan_near(stats, 1)


def test_cache_is_being_filled_until_the_first_token_and_after_a_loss_and_a_long_way_behind() -> None:
    session = Session(request(prompt=(1, 2, 3)), None, vocab_size=64)
    assert session.is_prefilling, "nothing came yet"
    item = session.verify_item(64)
    session.on_verdict(Verdict("a", item.round_id, 0, 0, 7))
    assert not session.is_prefilling
    session.lose_target()
    assert session.is_prefilling, "the target holds nothing"
    session.target.synced_len = 1
    session.committed += [5] * (MAX_SPECULATIVE_TOKENS - 2)
    assert session.num_missing == 1 + MAX_SPECULATIVE_TOKENS
    assert not session.is_prefilling, "as many as a round may have committed"
    session.committed.append(5)
    assert session.is_prefilling, "one more than any round commits"
