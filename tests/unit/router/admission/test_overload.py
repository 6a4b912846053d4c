"""A router with more to do than it can: who is served when, who is refused, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specray.errors import DeadlineExceededError, InvalidRequestError, OverloadedError
from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser, VirtualClock
from tests.unit.router.harness import (
    DRAFT_STEP_S,
    MODEL,
    TARGET_S,
    Pair,
    begin,
    expected,
    fake_target,
    of_tenant,
    request,
    router_config,
    serving,
)

ONE_PLACE = {"max_num_seqs": 1}


async def test_newcomer_takes_turns_with_a_tenant_that_waits_with_a_hundred(clock: VirtualClock) -> None:
    async with serving(clock, target=fake_target(**ONE_PLACE)) as pair:
        ended: list[str] = []
        tasks = [await begin(pair, ended, of_tenant(f"many{index}", "many")) for index in range(101)]
        tasks.append(await begin(pair, ended, of_tenant("few0", "few")))
        tasks.append(await begin(pair, ended, of_tenant("few1", "few")))
        await asyncio.gather(*tasks)
        assert ended[:5] == ["many0", "many1", "few0", "many2", "few1"]
        await pair.settle()


async def test_more_urgent_request_is_served_before_those_that_wait_and_stops_nobody(
    clock: VirtualClock,
) -> None:
    async with serving(clock, target=fake_target(**ONE_PLACE)) as pair:
        ended: list[str] = []
        tasks = [await begin(pair, ended, of_tenant(f"n{index}", "")) for index in range(3)]
        await asyncio.sleep(TARGET_S)
        tasks.append(await begin(pair, ended, of_tenant("late", "", priority=1)))
        tasks.append(await begin(pair, ended, of_tenant("urgent", "", priority=-1)))
        await asyncio.gather(*tasks)
        assert ended == ["n0", "urgent", "n1", "n2", "late"]
        assert pair.counted("specray_preemptions_total") == 0


async def test_tenant_with_less_takes_the_place_of_the_newest_of_one_with_more(clock: VirtualClock) -> None:
    config = router_config(max_queued_requests=3)
    async with serving(clock, target=fake_target(**ONE_PLACE), config=config) as pair:
        ended: list[str] = []
        many = [await begin(pair, ended, of_tenant(f"many{index}", "many")) for index in range(4)]
        few = await begin(pair, ended, of_tenant("few", "few"))
        with pytest.raises(OverloadedError, match="others have less of it") as refusal:
            await many.pop()
        assert refusal.value.retry_after_s >= 1.0
        with pytest.raises(OverloadedError, match="3 requests wait; allowed: 3"):
            await pair.router.complete(of_tenant("more", "many"))
        assert pair.counted("specray_requests_refused_total") == 2
        await asyncio.gather(*many, few)
        assert ended == ["many0", "many1", "few", "many2"]
        await pair.settle()


async def test_burst_of_long_prompts_fills_an_idle_router_and_the_rest_is_bounded(
    clock: VirtualClock,
) -> None:
    config = router_config(max_queued_tokens=250)
    async with serving(clock, target=fake_target(max_num_seqs=4), config=config) as pair:
        calls = [pair.router.complete(request(str(n), [n] * 100, max_tokens=2)) for n in range(8)]
        outputs = await asyncio.gather(*calls, return_exceptions=True)
        # Four have places, and two wait.
        assert [isinstance(output, OverloadedError) for output in outputs] == [False] * 6 + [True] * 2
        assert "600 prompt tokens wait; allowed: 250" in str(outputs[6])
        await pair.settle()


async def test_all_places_are_open_again_when_who_found_no_room_has_left(clock: VirtualClock) -> None:
    async with serving(clock, num_speculative_tokens=0) as pair:
        ended: list[str] = []
        pair.target.fail_next("back", "no room", is_retriable=True)
        gone = await begin(pair, ended, request("back"))
        await asyncio.sleep(1.5 * TARGET_S)
        assert pair.counted("specray_preemptions_total") == 1
        gone.cancel()
        await asyncio.sleep(1.0)
        num_steps = pair.target.num_steps
        await asyncio.gather(*(pair.router.complete(request(name, max_tokens=9)) for name in "abcdef"))
        assert pair.target.num_steps == num_steps + 9
        await pair.settle()


# What the metrics say


def shown(pair: Pair) -> tuple[float, float, float]:
    """Who runs, who waits, and prompt tokens of those who wait."""
    names = ("specray_running_sessions", "specray_queue_depth", "specray_queue_tokens")
    running, waiting, tokens = (pair.counted(name) for name in names)
    return running, waiting, tokens


async def test_who_was_put_back_and_who_comes_meanwhile_are_shown_as_waiting(clock: VirtualClock) -> None:
    async with serving(clock, num_speculative_tokens=0) as pair:
        ended: list[str] = []
        pair.target.fail_next("back", "no room", is_retriable=True)
        tasks = [await begin(pair, ended, request("back"))]
        await asyncio.sleep(0.5 * TARGET_S)
        assert shown(pair) == (1, 0, 0)
        # The step ends without room for it; it tries again RETRY_S later.
        await asyncio.sleep(TARGET_S)
        assert shown(pair) == (0, 1, 5)
        tasks.append(await begin(pair, ended, request("new", prompt=(1, 2))))
        assert shown(pair) == (0, 2, 7)
        await asyncio.gather(*tasks)
        await pair.settle()


async def test_prompt_of_a_request_that_is_let_in_again_is_counted_once(clock: VirtualClock) -> None:
    async with serving(clock, num_speculative_tokens=0) as pair:
        for _ in range(50):
            pair.target.fail_next("back", "no room", is_retriable=True)
        await pair.router.complete(request("back"))
        assert pair.counted("specray_preemptions_total") == 50
        assert pair.counted("specray_prompt_tokens_total") == 5


# Cancellation


class NotedTarget(FakeTarget):
    """Notes after how many steps it was told to release what."""

    def release(self, request_ids: Sequence[str]) -> None:
        self.released = dict.fromkeys(request_ids, self.num_steps)
        super().release(request_ids)


class NotedDraft(FakeDraft):
    def release(self, request_ids: Sequence[str]) -> None:
        self.released = dict.fromkeys(request_ids, self.num_steps)
        super().release(request_ids)


@pytest.mark.parametrize("overlap", ["serial", "ahead", "enumerate"])
@pytest.mark.parametrize("share_of_step", [0.0, 0.3, 0.6, 0.9])
async def test_cancelled_request_is_released_with_the_next_message_while_others_go_on(
    clock: VirtualClock, overlap: str, share_of_step: float
) -> None:
    target = NotedTarget(MODEL, cost=lambda rows: int(TARGET_S * 1e9))
    draft = NotedDraft(NoisyGuesser(MODEL), cost=lambda steps: int(steps * DRAFT_STEP_S * 1e9))
    async with serving(clock, target=target, draft=draft, overlap=overlap, num_speculative_tokens=3) as pair:
        other = asyncio.create_task(pair.router.complete(request("other", max_tokens=200)))
        call = asyncio.create_task(pair.router.complete(request("gone", max_tokens=2000)))
        await asyncio.sleep(0.25 + share_of_step * TARGET_S)
        assert target.held_request_ids == draft.held_request_ids == {"other", "gone"}
        num_target_steps, num_draft_steps = target.num_steps, draft.num_steps
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(TARGET_S + 4 * DRAFT_STEP_S)
        assert target.held_request_ids == draft.held_request_ids == {"other"}
        # One step may have been under way.
        assert target.released["gone"] <= num_target_steps + 1
        assert draft.released["gone"] <= num_draft_steps + 1
        assert (await other).token_ids == expected(request("other", max_tokens=200))
        await pair.settle()


# Deadlines


async def test_request_whose_time_ends_in_the_queue_is_dropped_then_and_never_computed(
    clock: VirtualClock,
) -> None:
    async with serving(clock, target=fake_target(**ONE_PLACE), num_speculative_tokens=0) as pair:
        ended: list[str] = []
        first = await begin(pair, ended, request("first", max_tokens=100))
        for timeout_s in (0.3, 0.1):
            with pytest.raises(DeadlineExceededError) as caught:
                await pair.router.complete(replace(request("second"), timeout_s=timeout_s))
            assert str(caught.value) == f"the time of {timeout_s:g} s ended before its first token"
        assert clock.monotonic() == pytest.approx(0.4, abs=0.001)
        assert pair.target.held_request_ids == {"first"}
        assert pair.counted("specray_requests_expired_total") == 2
        assert pair.counted("specray_prompt_tokens_total") == len(request("first").prompt_token_ids)
        await first
        await pair.settle()


async def test_running_request_ends_at_its_own_deadline_and_frees_both_engines_within_a_step(
    clock: VirtualClock,
) -> None:
    async with serving(clock, num_speculative_tokens=3) as pair:
        stream = pair.router.stream(replace(request(max_tokens=2000), timeout_s=0.5))
        with pytest.raises(DeadlineExceededError, match=r"the time of 0.5 s ended after \d+ tokens"):
            async for _ in stream:
                assert clock.monotonic() < 0.5 + TARGET_S
        await asyncio.sleep(TARGET_S)
        assert pair.target.held_request_ids == pair.draft.held_request_ids == frozenset()
        await pair.settle()


async def test_request_that_cannot_have_its_first_token_in_time_is_not_begun(clock: VirtualClock) -> None:
    async with serving(clock, target=fake_target(max_num_seqs=2), num_speculative_tokens=0) as pair:
        ended: list[str] = []
        tasks = [
            await begin(pair, ended, request("short", max_tokens=10)),
            await begin(pair, ended, request("long", max_tokens=100)),
        ]
        # The short one ends after 10 steps; half a step is left then.
        hopeless = replace(request("hopeless"), timeout_s=10.5 * TARGET_S)
        with pytest.raises(DeadlineExceededError):
            await pair.router.complete(hopeless)
        assert clock.monotonic() == pytest.approx(10 * TARGET_S, abs=0.001)
        # Both are told in the same step.
        await asyncio.sleep(0.001)
        assert ended == ["short"]
        assert "hopeless" not in pair.target.held_request_ids
        await asyncio.gather(*tasks)
        prompt = request().prompt_token_ids
        assert pair.counted("specray_prompt_tokens_total") == 2 * len(prompt)


async def test_deadline_of_a_request_is_never_later_than_the_services(clock: VirtualClock) -> None:
    async with serving(clock, config=router_config(request_timeout_s=0.2)) as pair:
        with pytest.raises(DeadlineExceededError, match=r"the time of 0\.2 s"):
            await pair.router.complete(replace(request(max_tokens=2000), timeout_s=50.0))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
async def test_time_that_is_not_positive_is_refused(clock: VirtualClock, timeout_s: float) -> None:
    async with serving(clock) as pair:
        with pytest.raises(InvalidRequestError, match="timeout_s"):
            await pair.router.complete(replace(request(), timeout_s=timeout_s))


async def test_deadline_of_a_request_that_ended_is_not_that_of_the_next_with_its_id(
    clock: VirtualClock,
) -> None:
    async with serving(clock, num_speculative_tokens=0) as pair:

        async def seconds_of(request_id: str, timeout_s: float) -> float:
            began_s = clock.monotonic()
            with pytest.raises(DeadlineExceededError):
                await pair.router.complete(replace(request(request_id, max_tokens=999), timeout_s=timeout_s))
            return clock.monotonic() - began_s

        # What ends before hides the deadline of the one that ended, until it is the next.
        before = asyncio.create_task(seconds_of("before", 1.9))
        await pair.router.complete(replace(request("a", max_tokens=2), timeout_s=2.0))
        after = asyncio.create_task(seconds_of("after", 2.5))
        again = replace(request("a", max_tokens=200), timeout_s=5.0)
        assert (await pair.router.complete(again)).token_ids == expected(again)
        assert clock.monotonic() > 4.0
        assert await before == pytest.approx(1.9, abs=0.001)
        assert await after == pytest.approx(2.5, abs=0.001)
        await pair.settle()


async def test_deadlines_of_requests_that_ended_long_before_do_not_pile_up(clock: VirtualClock) -> None:
    async with serving(clock, num_speculative_tokens=0) as pair:
        for index in range(300):
            await pair.router.complete(request(str(index), max_tokens=1))
        assert len(pair.router.sessions._by_deadline) <= 65
