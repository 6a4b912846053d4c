"""The router as its callers see it, over fakes in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from specray.control.controller import REFUSED_REST_ROUNDS, Controller
from specray.control.state import OFF, Plan, SessionStats
from specray.errors import (
    ConfigError,
    DeadlineExceededError,
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
)
from specray.fakes import (
    AdversarialGuesser,
    FakeDraft,
    FakeDrafterSource,
    LocalDrafter,
    LocalVerifier,
    PerfectGuesser,
    VirtualClock,
)
from specray.interfaces import Drafter
from specray.requests import FinishReason, GenerateRequest, OutputChunk, SpeculationParams
from specray.router import Router
from specray.types import DraftReplies, SpeculateItem, UnknownSequence
from tests.unit.router.harness import (
    DRAFT_STEP_S,
    MODEL,
    PROMPT,
    TARGET_S,
    Pair,
    expected,
    fake_draft,
    fake_target,
    request,
    router_config,
    run,
    serving,
)


async def chunks_of(pair: Pair, given: GenerateRequest) -> list[tuple[float, OutputChunk]]:
    return [(pair.clock.monotonic(), chunk) async for chunk in pair.router.stream(given)]


async def complete(pair: Pair, **options: Any) -> OutputChunk:
    given = request(**options)
    output = await pair.router.complete(given)
    assert output.token_ids == expected(given)
    return output


# Overlap: what costs time and what does not


@pytest.mark.parametrize(
    ("overlap", "period_s"),
    [("serial", TARGET_S + 3 * DRAFT_STEP_S), ("ahead", TARGET_S), ("enumerate", TARGET_S)],
)
def test_period_of_a_round(overlap: str, period_s: float) -> None:
    """Serial: verify plus draft. Overlapped with a perfect draft: verify alone, for everything is hidden."""
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL))
        async with serving(clock, draft=draft, overlap=overlap, num_speculative_tokens=3) as pair:
            await complete(pair, max_tokens=403)
            # The first step has no draft tokens; a hundred rounds of four tokens follow.
            assert clock.monotonic() == pytest.approx(TARGET_S + 101 * period_s, rel=0.02)

    run(clock, main())


def test_miss_costs_one_fresh_proposal() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(AdversarialGuesser(MODEL))
        async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=2) as pair:
            await complete(pair, max_tokens=101)
            assert clock.monotonic() == pytest.approx(101 * TARGET_S + 99 * 2 * DRAFT_STEP_S, rel=0.02)
            # Two more: the first has no proposal, the last no room for one.
            assert pair.counted("specray_outcomes_total", result="miss_count") == 98

    run(clock, main())


def test_round_overhead_leaves_both_forwards_out() -> None:
    clock = VirtualClock()

    async def main() -> None:
        for overlap in ("serial", "enumerate"):
            async with serving(clock, overlap=overlap, num_speculative_tokens=3) as pair:
                await complete(pair, max_tokens=100)
                assert pair.counted("specray_round_overhead_seconds_count") > 20
                assert pair.counted("specray_round_overhead_seconds_sum") < 1e-9

    run(clock, main())


def test_late_proposal_of_one_session_holds_back_another_for_a_quarter_step_at_most() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(AdversarialGuesser(MODEL))
        async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=4) as pair:
            drafted = asyncio.create_task(complete(pair, request_id="drafted", max_tokens=300))
            await asyncio.sleep(10.5 * TARGET_S)
            started = clock.monotonic()
            off = SpeculationParams(enabled=False)
            await complete(pair, request_id="plain", max_tokens=100, speculation=off)
            # Each of the other's rounds misses, and its fresh proposal takes 4/5 of a step.
            step_s = (clock.monotonic() - started) / 100
            assert TARGET_S < step_s < 1.26 * TARGET_S
            await drafted

    run(clock, main())


def test_straggler_whose_proposal_comes_in_the_grace_time_rides_along() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(AdversarialGuesser(MODEL))
        async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=1) as pair:
            off = SpeculationParams(enabled=False)
            await asyncio.gather(
                complete(pair, request_id="drafted", max_tokens=50),
                complete(pair, request_id="plain", max_tokens=50, speculation=off),
            )
            # Fresh proposals take 1/5 of a step: both sessions share every step.
            assert pair.target.num_steps <= 52

    run(clock, main())


def test_last_chunk_of_a_prefill_already_carries_draft_tokens() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL))
        config = router_config(prefill_chunk_tokens=16)
        async with serving(
            clock, draft=draft, config=config, overlap="ahead", num_speculative_tokens=3
        ) as pair:
            given = request(prompt=tuple(range(60)), max_tokens=20)
            timed = await chunks_of(pair, given)
            assert timed[0][0] == pytest.approx(4 * TARGET_S)
            assert timed[0][1].token_ids == expected(given)[:4]

    run(clock, main())


# Streams


def test_stream_gives_first_tokens_at_once_and_then_a_chunk_per_interval() -> None:
    clock = VirtualClock()

    async def main() -> None:
        config = router_config(stream_interval_ms=91)
        async with serving(clock, config=config, num_speculative_tokens=0) as pair:
            given = request(max_tokens=23)
            timed = await chunks_of(pair, given)
            assert timed[0][0] == pytest.approx(TARGET_S)
            assert [len(chunk.token_ids) for _, chunk in timed] == [1, 4, 5, 4, 5, 4]
            assert sum((chunk.token_ids for _, chunk in timed), ()) == expected(given)
            assert [chunk.finish_reason for _, chunk in timed] == [None] * 5 + [FinishReason.LENGTH]
            assert [chunk.stats is not None for _, chunk in timed] == [False] * 5 + [True]
            assert timed[-1][0] == pytest.approx(23 * TARGET_S), "the end is not held back"

    run(clock, main())


def test_logprobs_travel_with_their_tokens() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            given = request(max_tokens=30, num_logprobs=2)
            for _, chunk in await chunks_of(pair, given):
                assert tuple(each.token_id for each in chunk.logprobs) == chunk.token_ids
            output = await pair.router.complete(given)
            assert tuple(each.token_id for each in output.logprobs) == expected(given)

    run(clock, main())


# Aborts and deadlines


def test_cancelled_complete_is_released_on_both_engines_within_one_step() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, overlap="ahead", num_speculative_tokens=3) as pair:
            call = asyncio.create_task(pair.router.complete(request(max_tokens=2000)))
            await asyncio.sleep(0.25)
            assert pair.target.held_request_ids == pair.draft.held_request_ids == {"a"}
            call.cancel()
            await asyncio.sleep(TARGET_S)
            assert pair.target.held_request_ids == pair.draft.held_request_ids == frozenset()
            assert pair.counted("specray_requests_total", finish_reason="abort") == 1
            await complete(pair, request_id="next")
            await pair.settle()

    run(clock, main())


def test_closed_stream_is_released_on_both_engines_within_one_step() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, overlap="serial", num_speculative_tokens=3) as pair:
            stream = pair.router.stream(request(max_tokens=2000))
            await anext(stream)
            await stream.aclose()
            await asyncio.sleep(2 * TARGET_S)
            assert pair.target.held_request_ids == pair.draft.held_request_ids == frozenset()
            await pair.settle()

    run(clock, main())


def test_request_that_is_aborted_while_it_waits_never_reaches_an_engine() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, target=fake_target(max_num_seqs=1), num_speculative_tokens=0) as pair:
            first = asyncio.create_task(complete(pair, request_id="first", max_tokens=20))
            await asyncio.sleep(0.01)
            second = asyncio.create_task(pair.router.complete(request("second")))
            await asyncio.sleep(0.01)
            assert pair.target.held_request_ids == {"first"}
            second.cancel()
            await first
            await pair.settle()
            assert pair.counted("specray_prompt_tokens_total") == len(PROMPT)

    run(clock, main())


def test_request_timeout_ends_running_and_waiting_requests_with_an_error() -> None:
    clock = VirtualClock()

    async def main() -> None:
        config = router_config(request_timeout_s=1.0)
        async with serving(clock, target=fake_target(max_num_seqs=1), config=config) as pair:
            outputs = await asyncio.gather(
                *(pair.router.complete(request(name, max_tokens=2000)) for name in ("running", "waiting")),
                return_exceptions=True,
            )
            assert clock.monotonic() == pytest.approx(1.0, abs=TARGET_S)
            assert all(isinstance(output, DeadlineExceededError) for output in outputs)
            assert re.fullmatch(r"the time of 1 s ended after \d+ tokens", str(outputs[0]))
            assert str(outputs[1]) == "the time of 1 s ended before its first token"
            assert pair.counted("specray_requests_expired_total") == 2
            await pair.settle()

    run(clock, main())


# Admission


def test_full_queue_refuses_with_retry_after_and_admitted_requests_go_on() -> None:
    clock = VirtualClock()

    async def main() -> None:
        config = router_config(max_queued_requests=1)
        async with serving(clock, target=fake_target(max_num_seqs=2), config=config) as pair:
            calls = [asyncio.create_task(complete(pair, request_id=str(index))) for index in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError) as refusal:
                await pair.router.complete(request("refused"))
            assert refusal.value.retry_after_s >= 1.0
            await asyncio.gather(*calls)
            assert pair.counted("specray_requests_refused_total") == 1
            await complete(pair, request_id="later")
            assert pair.counted("specray_preemptions_total") == 0, "a place that was left is free at once"
            await pair.settle()

    run(clock, main())


def test_more_requests_than_sequences_are_served_in_turn() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(
            clock,
            target=fake_target(max_num_seqs=3, max_num_batched_tokens=16),
            config=router_config(prefill_chunk_tokens=16),
            num_speculative_tokens=4,
        ) as pair:
            await asyncio.gather(
                *(complete(pair, request_id=str(index), prompt=(index, 2, 3)) for index in range(10))
            )
            await pair.settle()

    run(clock, main())


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"prompt": ()}, "prompt"),
        ({"prompt": (1, 64)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4092}, "max_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"stop": ("x",)}, "stop"),
        ({"speculation": SpeculationParams(num_speculative_tokens=33)}, "num_speculative_tokens"),
    ],
)
def test_request_that_cannot_be_served_is_refused_by_field(options: dict[str, Any], field: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            with pytest.raises(InvalidRequestError) as refusal:
                await pair.router.complete(request(**options))
            assert refusal.value.field == field
            assert pair.target.num_steps == 0

    run(clock, main())


def test_request_id_in_use_is_refused_and_the_first_goes_on() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            first = asyncio.create_task(complete(pair, request_id="same"))
            await asyncio.sleep(0.01)
            with pytest.raises(InvalidRequestError):
                await pair.router.complete(request("same"))
            await first

    run(clock, main())


# Items that fail


def test_failed_item_ends_its_request_and_no_other() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            pair.target.fail_next("bad", "the mask is empty", is_retriable=False)
            bad, _ = await asyncio.gather(
                pair.router.complete(request("bad")), complete(pair, request_id="good")
            )
            assert (bad.finish_reason, bad.message) == (FinishReason.ERROR, "the mask is empty")
            await pair.settle()

    run(clock, main())


def test_retriable_failure_puts_the_request_back_and_it_completes() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            other = asyncio.create_task(complete(pair, request_id="other", max_tokens=60))
            for _ in range(3):
                pair.target.fail_next("preempted", "no room", is_retriable=True)
            await complete(pair, request_id="preempted")
            await other
            assert pair.counted("specray_preemptions_total") == 3
            steps = pair.target.num_steps
            off = SpeculationParams(enabled=False)
            await asyncio.gather(
                *(complete(pair, request_id=str(index), max_tokens=9, speculation=off) for index in range(3))
            )
            assert pair.target.num_steps == steps + 9, "all places are open again"
            await pair.settle()

    run(clock, main())


# Drafts that fail


def test_lost_draft_costs_no_pause_and_another_is_leased() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL))
        leased: list[LocalDrafter] = []

        def lease(number: int) -> Drafter:
            leased.append(LocalDrafter(draft, clock))
            return leased[-1]

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

    run(clock, main())


@pytest.mark.parametrize("overlap", ["serial", "ahead"])
def test_hanging_draft_costs_at_most_one_round_timeout(overlap: str) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL))

        def lease(number: int) -> Drafter:
            if number > 0:
                raise EngineLostError("no draft left")
            return LocalDrafter(draft, clock, hangs_after=5)

        config = router_config(round_timeout_s=2.0)
        async with serving(
            clock,
            draft=draft,
            make_drafter=lease,
            config=config,
            overlap=overlap,
            num_speculative_tokens=3,
        ) as pair:
            given = request(max_tokens=300)
            timed = await chunks_of(pair, given)
            assert sum((chunk.token_ids for _, chunk in timed), ()) == expected(given)
            gaps = [after[0] - before[0] for before, after in pairwise(timed)]
            assert max(gaps) < 2.0 + 2 * TARGET_S
            assert sum(gap > 2 * TARGET_S for gap in gaps) <= 1
            assert pair.counted("specray_draft_lost_total") == 1

    run(clock, main())


def test_draft_that_is_late_beyond_patience_is_not_waited_for_again_and_again() -> None:
    clock = VirtualClock()

    async def main() -> None:
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

    run(clock, main())


def test_no_draft_at_start_is_plain_decoding_until_one_comes() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL))

        def lease(number: int) -> Drafter:
            if number < 3:
                raise EngineLostError("none yet")
            return LocalDrafter(draft, clock)

        async with serving(
            clock, draft=draft, make_drafter=lease, overlap="ahead", num_speculative_tokens=3
        ) as pair:
            output = await complete(pair, max_tokens=200)
            assert output.stats is not None
            assert 0 < output.stats.num_spec_steps < 50
            assert output.stats.draft_acceptance_rate == 1.0

    run(clock, main())


@pytest.mark.parametrize(
    "info", [{"vocab_size": 65}, {"tokenizer_fingerprint": "other"}, {"protocol_version": 99}]
)
def test_draft_that_does_not_fit_is_refused_at_start(info: dict[str, Any]) -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(**info)
        router = Router(
            LocalVerifier(fake_target(), clock),
            FakeDrafterSource(lambda _: LocalDrafter(draft, clock)),
            clock=clock,
        )
        with pytest.raises(ConfigError, match=next(iter(info))):
            await router.start()

    run(clock, main())


def test_draft_that_refuses_a_session_is_left_alone_for_a_while() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL), max_num_seqs=1)
        async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=3) as pair:
            await asyncio.gather(
                complete(pair, request_id="first", max_tokens=100),
                complete(pair, request_id="second", max_tokens=100),
            )
            await pair.settle()

    run(clock, main())


def test_draft_that_does_not_know_what_it_was_told_from_the_start_is_left_alone_for_a_while() -> None:
    """Else it would be asked again with every answer, and its session would wait for ever."""

    class Forgetful(FakeDraft):
        def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
            self.num_steps += 1
            unknown = [UnknownSequence(item.request_id, item.round_id, item.base_len) for item in items]
            return DraftReplies(tuple(unknown), 1_000_000)

    clock = VirtualClock()

    async def main() -> None:
        draft = Forgetful(PerfectGuesser(MODEL))
        async with serving(clock, draft=draft, overlap="serial", num_speculative_tokens=3) as pair:
            await complete(pair, max_tokens=1 + 2 * (1 + REFUSED_REST_ROUNDS))
            await pair.settle()
            # Once with the prompt; then each time after the rest.
            assert draft.num_steps == 3

    run(clock, main())


def test_context_beyond_the_drafts_length_goes_on_without_it() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL), max_model_len=64)
        async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=3) as pair:
            output = await complete(pair, max_tokens=200)
            assert output.stats is not None and output.stats.num_spec_steps < 16
            await pair.settle()

    run(clock, main())


def test_request_may_switch_speculation_off_or_choose_k() -> None:
    clock = VirtualClock()

    async def main() -> None:
        draft = fake_draft(PerfectGuesser(MODEL))
        async with serving(clock, draft=draft, overlap="ahead", num_speculative_tokens=3) as pair:
            off = await complete(pair, speculation=SpeculationParams(enabled=False))
            assert off.stats is not None and off.stats.num_draft_tokens == 0
            assert draft.num_steps == 0
            wide = await complete(
                pair, max_tokens=90, speculation=SpeculationParams(num_speculative_tokens=7)
            )
            assert wide.stats is not None and len(wide.stats.acceptance_histogram) == 8

    run(clock, main())


# The target and the router itself


def test_silent_target_is_lost_after_verify_timeout_and_all_requests_hear_of_it() -> None:
    clock = VirtualClock()

    async def main() -> None:
        target = fake_target()
        verifier = LocalVerifier(target, clock)
        config = router_config(verify_timeout_s=3.0)
        async with serving(clock, target=target, verifier=verifier, config=config) as pair:
            calls = [
                asyncio.create_task(pair.router.complete(request(str(index), max_tokens=1000)))
                for index in range(3)
            ]
            await asyncio.sleep(1.0)
            verifier.hang()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert clock.monotonic() == pytest.approx(4.0, abs=2 * TARGET_S)
            assert [type(result) for result in results] == [EngineLostError] * 3
            with pytest.raises(EngineLostError):
                await pair.router.complete(request("next"))
            with pytest.raises(EngineLostError):
                await pair.router.check_ready()

    run(clock, main())


def test_readiness_runs_a_real_step() -> None:
    clock = VirtualClock()

    async def main() -> None:
        target = fake_target()
        verifier = LocalVerifier(target, clock)
        config = router_config(verify_timeout_s=3.0)
        async with serving(clock, target=target, verifier=verifier, config=config) as pair:
            await pair.router.check_ready()
            assert target.num_steps == 1
            await pair.router.check_ready()
            assert target.num_steps == 1, "a fresh verdict is proof enough"
            verifier.hang()
            await asyncio.sleep(6.0)
            with pytest.raises(EngineLostError):
                await pair.router.check_ready()

    run(clock, main())


def test_stop_with_drain_finishes_what_runs_and_refuses_what_comes() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            call = asyncio.create_task(complete(pair, max_tokens=100))
            await asyncio.sleep(0.1)
            stopping = asyncio.create_task(pair.router.stop(drain=True))
            await asyncio.sleep(0.01)
            with pytest.raises(EngineLostError, match="stopping"):
                await pair.router.complete(request("late"))
            await call
            await stopping
            await pair.router.run()

    run(clock, main())


def test_stop_without_drain_ends_streams_with_a_retriable_error() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            call = asyncio.create_task(chunks_of(pair, request(max_tokens=1000)))
            await asyncio.sleep(0.1)
            await pair.router.stop()
            with pytest.raises(EngineLostError):
                await call
            assert pair.target.held_request_ids == frozenset()

    run(clock, main())


def test_stop_strings_end_the_output_through_the_injected_matcher() -> None:
    clock = VirtualClock()
    given = request(max_tokens=40, stop=("two",))
    truth = expected(given)

    class Matcher:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def push(self, token_ids: Sequence[int]) -> str | None:
            self.seen += token_ids
            return "two" if tuple(self.seen[-2:]) == truth[8:10] else None

    async def main() -> None:
        def make(stop: Sequence[str], prompt_token_ids: Sequence[int]) -> Matcher:
            assert (stop, prompt_token_ids) == (("two",), given.prompt_token_ids)
            return Matcher()

        async with serving(clock, stop_matchers=make, num_speculative_tokens=5) as pair:
            output = await pair.router.complete(given)
            assert output.token_ids == truth[:10]
            assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "two")
            await pair.settle()

    run(clock, main())


def test_service_info_says_what_the_engines_say() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock) as pair:
            info = await pair.router.service_info()
            assert (info.model, info.draft_model) == ("toy-target", "toy-draft")
            assert (info.vocab_size, info.max_model_len) == (64, 4096)

    run(clock, main())


def test_metrics_text_has_the_published_names() -> None:
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, overlap="enumerate", num_speculative_tokens=3) as pair:
            await complete(pair)
            text = await pair.router.metrics_text()
            for name in (
                "specray_spec_decode_num_drafts_total ",
                "specray_spec_decode_num_draft_tokens_total ",
                "specray_spec_decode_num_accepted_tokens_total ",
                'specray_spec_decode_num_accepted_tokens_per_pos_total{position="0"} ',
                'specray_outcomes_total{result="hit"} ',
                "specray_draft_ahead_depth_bucket",
                "specray_target_idle_seconds_bucket",
                "specray_time_to_first_token_seconds_bucket",
                "specray_inter_token_latency_seconds_bucket",
                "specray_round_overhead_seconds_bucket",
                "specray_queue_depth ",
                "specray_running_sessions ",
                'specray_requests_total{finish_reason="length"} 1.0',
            ):
                assert f"\n{name}" in text, name

    run(clock, main())


def test_the_policy_knows_what_the_draft_has_not_been_told(monkeypatch: pytest.MonkeyPatch) -> None:
    unread: list[int] = []
    plan = Controller.plan

    def watched(controller: Controller, stats: SessionStats, **known: int) -> Plan:
        unread.append(known["num_unread"])
        return plan(controller, stats, **known) if len(unread) < 5 else OFF

    monkeypatch.setattr(Controller, "plan", watched)
    clock, given = VirtualClock(), request(max_tokens=24)

    async def main() -> None:
        async with serving(clock, num_speculative_tokens=2, overlap="serial") as pair:
            await pair.router.complete(given)

    run(clock, main())
    num_prompt = len(given.prompt_token_ids)
    assert unread[0] == num_prompt
    assert all(1 <= count <= 3 for count in unread[1:5])
    # From then on nothing is drafted, and each round writes one token.
    assert unread[5:] == list(range(unread[5], unread[5] + len(unread) - 5))
    assert unread[-1] > 3
