"""The router as its callers see it, over fakes in virtual time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

import pytest

from specray.control.controller import Controller
from specray.control.state import OFF, Plan, SessionStats
from specray.errors import DeadlineExceededError, EngineLostError, InvalidRequestError, SpecrayError
from specray.fakes import LocalVerifier, VirtualClock
from specray.requests import FinishReason, SpeculationParams
from tests.unit.router.harness import (
    PROMPT,
    TARGET_S,
    chunks_of,
    complete,
    expected,
    fake_target,
    request,
    router_config,
    serving,
)

# Streams


async def test_stream_gives_first_tokens_at_once_and_then_a_chunk_per_interval(clock: VirtualClock) -> None:
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


async def test_logprobs_travel_with_their_tokens(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        given = request(max_tokens=30, num_logprobs=2)
        for _, chunk in await chunks_of(pair, given):
            assert tuple(each.token_id for each in chunk.logprobs) == chunk.token_ids
        output = await pair.router.complete(given)
        assert tuple(each.token_id for each in output.logprobs) == expected(given)


# Aborts and deadlines


async def test_cancelled_complete_is_released_on_both_engines_within_one_step(clock: VirtualClock) -> None:
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


async def test_closed_stream_is_released_on_both_engines_within_one_step(clock: VirtualClock) -> None:
    async with serving(clock, overlap="serial", num_speculative_tokens=3) as pair:
        stream = pair.router.stream(request(max_tokens=2000))
        await anext(stream)
        await stream.aclose()
        await asyncio.sleep(2 * TARGET_S)
        assert pair.target.held_request_ids == pair.draft.held_request_ids == frozenset()
        await pair.settle()


async def test_request_that_is_aborted_while_it_waits_never_reaches_an_engine(clock: VirtualClock) -> None:
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


async def test_request_timeout_ends_running_and_waiting_requests_with_an_error(clock: VirtualClock) -> None:
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


# Items that fail


async def test_failed_item_ends_its_request_and_no_other(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        pair.target.fail_next("bad", "the mask is empty", is_retriable=False)
        calls = pair.router.complete(request("bad")), complete(pair, request_id="good")
        bad, good = await asyncio.gather(*calls, return_exceptions=True)
        assert type(bad) is SpecrayError and str(bad) == "the mask is empty"
        assert not isinstance(good, BaseException)
        await pair.settle()


async def test_item_that_is_its_callers_mistake_is_an_invalid_request(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        wrong = {"is_retriable": False, "is_invalid": True, "field": "grammar"}
        pair.target.fail_next("bad", "the grammar is too big", **wrong)
        with pytest.raises(InvalidRequestError, match=r"^the grammar is too big$") as raised:
            await pair.router.complete(request("bad"))
        assert raised.value.field == "grammar"
        assert pair.counted("specray_requests_total", finish_reason="error") == 1
        await pair.settle()


async def test_retriable_failure_puts_the_request_back_and_it_completes(clock: VirtualClock) -> None:
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


# The target and the router itself


async def test_silent_target_is_lost_after_verify_timeout_and_all_requests_hear_of_it(
    clock: VirtualClock,
) -> None:
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


async def test_readiness_runs_a_real_step(clock: VirtualClock) -> None:
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


async def test_stop_with_drain_finishes_what_runs_and_refuses_what_comes(clock: VirtualClock) -> None:
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


async def test_stop_without_drain_ends_streams_with_a_retriable_error(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        call = asyncio.create_task(chunks_of(pair, request(max_tokens=1000)))
        await asyncio.sleep(0.1)
        await pair.router.stop()
        with pytest.raises(EngineLostError):
            await call
        assert pair.target.held_request_ids == frozenset()


async def test_stop_strings_end_the_output_through_the_injected_matcher(clock: VirtualClock) -> None:
    given = request(max_tokens=40, stop=("two",))
    truth = expected(given)

    class Matcher:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def push(self, token_ids: Sequence[int]) -> str | None:
            self.seen += token_ids
            return "two" if tuple(self.seen[-2:]) == truth[8:10] else None

    def make(stop: Sequence[str], prompt_token_ids: Sequence[int]) -> Matcher:
        assert (stop, prompt_token_ids) == (("two",), given.prompt_token_ids)
        return Matcher()

    async with serving(clock, stop_matchers=make, num_speculative_tokens=5) as pair:
        output = await pair.router.complete(given)
        assert output.token_ids == truth[:10]
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "two")
        await pair.settle()


async def test_service_info_says_what_the_engines_say(clock: VirtualClock) -> None:
    async with serving(clock) as pair:
        info = await pair.router.service_info()
        assert (info.model, info.draft_model) == ("toy-target", "toy-draft")
        assert (info.vocab_size, info.max_model_len) == (64, 4096)


async def test_metrics_text_has_the_published_names(clock: VirtualClock) -> None:
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


async def test_the_policy_knows_what_the_draft_has_not_been_told(
    clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread: list[int] = []
    plan = Controller.plan

    def watched(controller: Controller, stats: SessionStats, **known: int) -> Plan:
        unread.append(known["num_unread"])
        return plan(controller, stats, **known) if len(unread) < 5 else OFF

    monkeypatch.setattr(Controller, "plan", watched)
    given = request(max_tokens=24)

    async with serving(clock, num_speculative_tokens=2, overlap="serial") as pair:
        await pair.router.complete(given)

    num_prompt = len(given.prompt_token_ids)
    assert unread[0] == num_prompt
    assert all(1 <= count <= 3 for count in unread[1:5])
    # From then on nothing is drafted, and each round writes one token.
    assert unread[5:] == list(range(unread[5], unread[5] + len(unread) - 5))
    assert unread[-1] > 3
