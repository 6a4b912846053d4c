"""What engines measure at their start, and that the router plans from it before it has measured anything."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from engine_harness import engine_info, toy_draft, toy_target
from router_harness import (
    fake_draft,
    fake_target,
    request,
    router_config,
    run,
    serving,
    speculation_config,
)

from specray.engine.profile import profile_draft, profile_target
from specray.fakes import LocalVerifier, VirtualClock
from specray.router.estimates import Average, OutcomesTime, TimeTable
from specray.router.expected import expected_drafts, expected_steps, expected_tokens
from specray.router.links import measure_round_trip
from specray.router.measured import Measured
from specray.router.plan import OFF, Plan
from specray.router.policy import Policy
from specray.router.prospects import ANY_K, AUTO_K
from specray.router.trace import Planned, decode_trace
from specray.types import (
    DraftReplies,
    EngineInfo,
    ItemFailed,
    SpeculateItem,
    StepTime,
    TargetReplies,
    VerifyItem,
)


def times(*pairs: tuple[int, float]) -> tuple[StepTime, ...]:
    return tuple(StepTime(num_rows, seconds) for num_rows, seconds in pairs)


# What an engine measures


class TimedEngine:
    """Both engines, on a clock of their own: a step takes ``first_s`` the first time, then ``step_s``."""

    def __init__(self, info: EngineInfo, *, step_s: float, first_s: float) -> None:
        self.info = info
        self.now_s = 0.0
        self.widths: list[int] = []
        self.fails = False
        self.disturbed: dict[int, float] = {}
        """Seconds of single steps, by their number."""
        self._step_s = step_s
        self._first_s = first_s

    def clock(self) -> float:
        return self.now_s

    def verify(self, items: Sequence[VerifyItem]) -> TargetReplies:
        rows = sum(len(item.token_ids) + len(item.draft_token_ids) for item in items)
        if items[0].sample:
            assert all(item.base_len == items[0].base_len for item in items)
        return TargetReplies(self._failures(items), self._pass(rows if items[0].sample else 0))

    def speculate(self, items: Sequence[SpeculateItem]) -> DraftReplies:
        num_tokens = items[0].num_speculative_tokens
        return DraftReplies(self._failures(items), self._pass(len(items) if num_tokens else 0))

    def release(self, request_ids: Sequence[str]) -> None: ...

    def check(self) -> None: ...

    def _failures(self, items: Sequence[VerifyItem | SpeculateItem]) -> tuple[ItemFailed, ...]:
        failed = ItemFailed(items[0].request_id, 0, 0, "no room", True)
        return (failed,) if self.fails else ()

    def _pass(self, width: int) -> int:
        if not width:
            return 0
        usual = self._step_s if width in self.widths else self._first_s
        seconds = self.disturbed.get(len(self.widths), usual)
        self.widths.append(width)
        self.now_s += seconds
        return round(seconds * 1e9)


INFO = engine_info("target", max_model_len=1024, block_size=1024, num_blocks=65, max_num_seqs=64)


def test_every_width_is_measured_and_its_first_step_does_not_count() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.010)
    measured = profile_target(engine, budget_s=0.5, clock=engine.clock).step_times
    assert measured == times(*((rows, 0.001) for rows in (1, 2, 4, 8, 16, 32, 64)))
    draft = TimedEngine(replace(INFO, role="draft"), step_s=0.001, first_s=0.010)
    # Four tokens a step.
    assert profile_draft(draft, budget_s=0.5, clock=draft.clock) == times(
        *((rows, 0.00025) for rows in (1, 2, 4, 8, 16, 32))
    )


def test_no_step_is_begun_that_would_end_after_the_budget() -> None:
    engine = TimedEngine(INFO, step_s=0.030, first_s=0.030)
    assert profile_target(engine, budget_s=0.1, clock=engine.clock).step_times == times((1, 0.030))
    assert engine.widths == [1, 1, 2]
    assert engine.now_s == pytest.approx(0.090)


def test_a_disturbed_step_is_measured_again_and_takes_no_longer_than_a_wider_one() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    engine.disturbed = {0: 0.020, 1: 0.030, 2: 0.025, 3: 0.025}
    assert profile_target(engine, budget_s=0.5, clock=engine.clock).step_times[:2] == times(
        (1, 0.001), (2, 0.001)
    )
    # No time for another pass: 4 rows in 1 ms are the bound for 1 and 2.
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    engine.disturbed = {0: 0.020, 1: 0.030, 2: 0.025, 3: 0.025}
    measured = profile_target(engine, budget_s=0.126, clock=engine.clock).step_times
    assert measured[:3] == times((1, 0.001), (2, 0.001), (4, 0.001))
    assert engine.widths == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64]


def test_an_engine_too_slow_for_the_budget_tells_nothing() -> None:
    engine = TimedEngine(INFO, step_s=2.0, first_s=2.0)
    assert profile_target(engine, budget_s=0.5, clock=engine.clock).step_times == ()
    assert engine.widths == [1]


def test_no_budget_no_step() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    assert profile_target(engine, budget_s=0.0, clock=engine.clock).step_times == ()
    assert engine.widths == []


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({"max_num_seqs": 3}, [1, 2, 4, 8]),
        ({"num_blocks": 3}, [1, 2, 4, 8]),
        ({"max_num_batched_tokens": 16}, [1, 2, 4, 8, 16]),
    ],
    ids=["sequences", "blocks", "rows of a step"],
)
def test_widths_stay_within_the_engines_limits(changes: dict[str, int], widths: list[int]) -> None:
    engine = TimedEngine(replace(INFO, **changes), step_s=0.001, first_s=0.001)
    measured = profile_target(engine, budget_s=0.5, clock=engine.clock).step_times
    assert [entry.num_rows for entry in measured] == widths


def test_a_step_that_fails_ends_the_measurement() -> None:
    engine = TimedEngine(INFO, step_s=0.001, first_s=0.001)
    engine.fails = True
    assert profile_target(engine, budget_s=0.5, clock=engine.clock).step_times == ()


def still() -> float:
    return 0.0


def test_a_real_target_head_computes_the_rows_that_are_claimed() -> None:
    head, runner = toy_target(num_blocks=400, max_model_len=96, max_num_seqs=8)
    measured = profile_target(head, budget_s=1.0, clock=still).step_times
    # Half of the model's length is context; eight sequences of four rows are the most.
    assert [entry.num_rows for entry in measured] == [1, 2, 4, 8, 16, 32]
    assert all(entry.seconds > 0 for entry in measured)
    sampled = [step for step in runner.steps if all(item.num_logits for item in step)]
    assert [sum(len(item.token_ids) for item in step) for step in sampled] == [
        *(rows for rows in (1, 2, 4, 8, 16, 32) for _ in range(2)),
        *(3 * (1, 2, 4, 8, 16, 32)),
    ]
    assert {item.start for step in sampled for item in step} == {48}
    head.check_integrity()


def test_a_real_draft_head_drafts_for_as_many_sequences_as_are_claimed() -> None:
    head, runner = toy_draft(num_blocks=400, max_model_len=96, max_num_seqs=8)
    measured = profile_draft(head, budget_s=1.0, clock=still)
    assert [entry.num_rows for entry in measured] == [1, 2, 4, 8]
    drafting = [step for step in runner.steps if all(item.num_logits for item in step)]
    assert [len(step) for step in drafting] == [
        *(rows for rows in (1, 2, 4, 8) for _ in range(2 * 4)),
        *(3 * [rows for rows in (1, 2, 4, 8) for _ in range(4)]),
    ]
    assert {len(item.token_ids) for step in drafting for item in step} == {1}
    head.check_integrity()


# What is expected before it is measured


def test_expected_steps_are_interpolated_and_go_on_growing_beyond_the_largest() -> None:
    table = TimeTable()
    table.expect({1: 0.010, 8: 0.010, 16: 0.018})
    assert [table.predict(rows) for rows in (1, 4, 12, 16, 32, 64, 500)] == pytest.approx(
        [0.010, 0.010, 0.014, 0.018, 0.034, 0.066, 0.066 + 0.056 / 63 * 436]
    )
    assert not table, "nothing was measured"


def test_a_single_measurement_does_not_replace_what_is_expected_three_do() -> None:
    table = TimeTable()
    table.expect({4: 0.010, 256: 0.010})
    for _ in range(2):
        table.add(4, 0.030)
    assert table.predict(4) == pytest.approx(0.010)
    table.add(4, 0.030)
    assert table.predict(4) == pytest.approx(0.030)


def test_a_slow_machine_makes_every_size_slower_not_only_the_one_that_comes() -> None:
    table = TimeTable()
    for size, seconds in ((4, 0.006), (8, 0.009)):
        for _ in range(20):
            table.add(size, seconds)
    for _ in range(40):
        table.add(4, 0.012)
    slow = [table.predict(size) for size in (4, 8)]
    assert slow == pytest.approx([0.012, 0.018], rel=0.15)
    assert slow[1] / slow[0] == pytest.approx(1.5, rel=0.12)
    assert table.largest_within(0.0121) == pytest.approx(4, abs=1)
    assert table.least(4) == slow[0]
    for _ in range(40):
        table.add(8, 0.009)
    assert [table.predict(size) for size in (4, 8)] == pytest.approx([0.006, 0.009], rel=0.3)


def test_predictions_lag_behind_the_averages_by_a_hundredth_at_most() -> None:
    table, fresh = TimeTable(), TimeTable()
    for size in (4, 8):
        for _ in range(60):
            table.add(size, 0.010)
            fresh.add(size, 0.010)
    assert table.predict(8) == pytest.approx(0.010)
    for index in range(200):
        seconds = 0.010 * (1 + 0.3 * (index % 3)) + 0.0001 * index
        for one in (table, fresh):
            one.add(8, seconds)
        fresh._points = None
        assert table.predict(8) == pytest.approx(fresh.predict(8), rel=0.0101)
        assert table.predict(4) == pytest.approx(fresh.predict(4), rel=0.0101)


def test_the_curve_is_drawn_anew_only_when_averages_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TimeTable()
    for _ in range(200):
        table.add(4, 0.010)
    draw, num_drawn = table._curve, 0

    def curve() -> list[tuple[int, float]]:
        nonlocal num_drawn
        num_drawn += 1
        return draw()

    monkeypatch.setattr(table, "_curve", curve)
    for index in range(100):
        # 4 % off, of which a twentieth is the average's: 0.2 % each time.
        table.add(4, 0.0104 if index % 2 else 0.0096)
        assert table.predict(4) is not None
    assert 5 <= num_drawn <= 25


def test_steps_that_take_no_time_at_all_are_taken_as_they_come() -> None:
    table = TimeTable()
    for seconds in (0.0, 0.006, 0.0):
        for _ in range(5000):
            table.add(4, seconds)
    assert table.predict(4) == pytest.approx(0.0, abs=1e-6)


def test_a_size_that_comes_alone_for_long_keeps_its_share_of_the_others() -> None:
    """What is noise in it does not move it against those that did not come."""
    rng = random.Random(5)
    table = TimeTable()
    for size, seconds in ((4, 0.006), (8, 0.009)):
        for _ in range(40):
            table.add(size, seconds)
    for _ in range(20_000):
        # Half as long or twice as long, now and then ten times.
        table.add(4, 0.006 * rng.choice((0.5, 0.5, 1.0, 2.0, 2.0, 2.0 if rng.random() < 0.9 else 10.0)))
    ratios = []
    for _ in range(40):
        table.add(4, 0.006)
        ratios.append((table.predict(8) or 0.0) / (table.predict(4) or 1.0))
    assert ratios[-1] == pytest.approx(1.5, rel=0.15)


def test_a_size_that_became_slower_for_good_does_not_take_the_others_with_it() -> None:
    table = TimeTable()
    for seconds in (0.009, 0.018):
        for _ in range(200):
            table.add(4, 0.006)
            table.add(8, seconds)
    assert [table.predict(size) for size in (4, 8)] == pytest.approx([0.006, 0.018], rel=0.05)


def test_a_new_size_that_was_lucky_at_first_is_not_taken_for_a_slow_machine() -> None:
    table = TimeTable()
    for _ in range(40):
        table.add(4, 0.006)
    for seconds in (*5 * [0.005], *10 * [0.010]):
        table.add(8, seconds)
    assert table.predict(8) == pytest.approx(0.010, rel=0.05)
    # Most of the doubling is the size's own.
    assert (table.predict(4) or 0.0) < 0.006 * 2**0.5


def test_one_disturbed_step_is_forgotten_within_ten() -> None:
    table = TimeTable()
    for _ in range(20):
        table.add(4, 0.006)
    table.add(4, 1.0)
    disturbed = table.predict(4)
    for _ in range(10):
        table.add(4, 0.006)
    assert disturbed is not None and disturbed < 0.012
    assert table.predict(4) == pytest.approx(0.006, rel=0.05)


def test_prompts_go_along_by_what_is_expected_of_the_step() -> None:
    table = TimeTable()
    table.expect({1: 0.010, 16: 0.010, 64: 0.040})
    assert table.least(1) == pytest.approx(0.010)
    assert table.largest_within(0.025) == 40
    assert table.largest_within(0.009) == 0


def test_an_expected_average_stands_until_the_first_sample_which_it_caps() -> None:
    average = Average()
    average.expect(0.010)
    assert average.value == 0.010
    average.add(0.500)
    assert average.value == pytest.approx(0.030)
    average.expect(0.001)
    average.add(0.012)
    assert average.value == 0.012


def test_expected_steps_of_no_length_are_none() -> None:
    table = TimeTable()
    table.expect({1: 0.0})
    assert table.predict(1) is None
    table.add(1, 0.5)
    assert table.predict(1) == 0.5


def test_outcomes_cost_what_the_draft_says_of_several_lines() -> None:
    outcomes = OutcomesTime()
    outcomes.expect([(1, 0.001), (8, 0.005)])
    # The ranking, then two tokens of eight branches.
    assert outcomes.predict(2, 8, step_s=0.001) == pytest.approx(0.001 + 2 * 0.003)


# What is chosen from it


def expecting(target: Sequence[StepTime], draft: Sequence[StepTime], *, round_trip_s: float = 0.0) -> Policy:
    policy = Policy(speculation_config(overlap="serial"))
    policy.expect_target(target, 0.0)
    policy.expect_draft(draft, round_trip_s)
    return policy


def first_plan(policy: Policy, *, num_running: int = 1) -> Plan:
    return policy.plan(policy.pace(request()), num_remaining=100, num_running=num_running)


def num_draft_steps(k: int) -> float:
    """Of a proposal of at most k tokens, by the prior; one that ends early drafts one more."""
    return expected_drafts(k, 0.95) + 1 - 0.95 ** (k - 1)


def test_first_plan_is_the_optimum_of_what_the_engines_say() -> None:
    policy = expecting(times((1, 0.010), (64, 0.010)), times((1, 0.0005), (2, 0.0005)), round_trip_s=0.010)

    def goodput(k: int) -> float:
        return expected_tokens(0.7, k, 0.95) / (0.010 + 0.0005 * num_draft_steps(k) + 0.010)

    # 8 draft tokens are believed, and of them as many as are accepted for each that is not at 0.7.
    any_k = (1 + 0.7 / 0.3) / (0.010 + 0.0005 * expected_steps(ANY_K, [7 / 8], 1) + 0.010)
    assert any_k > max(goodput(k) for k in AUTO_K)
    assert first_plan(policy) == Plan(ANY_K)
    pacing = policy.pace(request())
    assert policy.goodput(Plan(ANY_K), pacing, 1) == pytest.approx(any_k)
    for k in AUTO_K:
        assert policy.goodput(Plan(k), pacing, 1) == pytest.approx(goodput(k))
    assert policy.goodput(OFF, pacing, 1) == pytest.approx(100.0)
    assert policy.patience_s() == pytest.approx(4 * (32 * 0.0005 + 0.010))


def test_first_plan_is_none_with_a_draft_slower_than_the_target() -> None:
    assert first_plan(expecting(times((1, 0.001), (64, 0.002)), times((1, 0.003)))) == OFF


def test_first_plan_is_none_where_rows_are_dear() -> None:
    policy = expecting(times((1, 0.010), (8, 0.060), (64, 0.500)), times((1, 0.0005)))
    assert first_plan(policy, num_running=16) == OFF


def test_first_plan_of_many_sessions_counts_what_drafting_for_all_takes() -> None:
    flat = times((1, 0.020), (64, 0.020))
    cheap = expecting(flat, times((1, 0.001), (32, 0.001)))
    dear = expecting(flat, times((1, 0.001), (32, 0.032)))
    assert first_plan(cheap) == Plan(ANY_K)
    # Of sixteen proposals one is long, and all wait for it.
    assert first_plan(cheap, num_running=16) == Plan(5)
    assert first_plan(dear, num_running=16) == OFF


def test_way_to_the_target_is_part_of_its_steps() -> None:
    policy = Policy(speculation_config())
    policy.expect_target(times((1, 0.010)), 0.004)
    assert policy.verify_s(1, 1) == pytest.approx(0.014)


def test_router_takes_the_engines_at_their_word_when_it_connects() -> None:
    """20 ms a Verify and 0.5 ms a draft token: the draft may go on for as long as it is sure."""
    clock = VirtualClock()
    target = fake_target(step_times=times((1, 0.020), (64, 0.020)))
    draft = fake_draft(step_times=times((1, 0.0005), (32, 0.0005)))

    async def main() -> None:
        config = router_config(trace_events=100)
        async with serving(clock, target=target, draft=draft, overlap="serial", config=config) as pair:
            await pair.router.complete(request(max_tokens=12))
            first = next(e for e in decode_trace(await pair.router.trace_text() or "") if type(e) is Planned)
            assert (first.overlap, first.num_speculative_tokens) == ("serial", ANY_K)
            serial = (1 + 0.7 / 0.3) / (0.020 + 0.0005 * expected_steps(ANY_K, [7 / 8], 1))
            assert first.tokens_per_s == pytest.approx({"off": 50.0, "serial": serial})
            text = await pair.router.metrics_text()
            assert 'specray_step_time_seconds{engine="target",rows="64"} 0.02' in text
            assert 'specray_step_time_seconds{engine="draft",rows="1"} 0.0005' in text
            assert pair.counted("specray_plans_total", overlap="serial", num_speculative_tokens="32") >= 1

    run(clock, main())


def test_an_engine_that_does_not_answer_is_no_distance_away() -> None:
    clock = VirtualClock()

    async def main() -> float:
        verifier = LocalVerifier(fake_target(), clock)
        verifier.lose()
        return await measure_round_trip(verifier.fetch_info, clock)

    assert run(clock, main()) == 0.0


def test_round_trip_is_the_least_of_three() -> None:
    clock = VirtualClock()
    delays: Iterator[float] = iter((0.005, 0.003, 0.004))
    info = fake_draft().info

    async def fetch_info() -> EngineInfo:
        await clock.sleep(next(delays))
        return info

    assert run(clock, measure_round_trip(fetch_info, clock)) == pytest.approx(0.003)
    assert list(delays) == []


def test_what_a_size_took_tells_of_sizes_up_to_four_times_larger_or_smaller() -> None:
    times = TimeTable()
    times.expect(dict.fromkeys((2, 4, 16, 64, 128), 1.0))
    for _ in range(3):
        times.add(16, 2.0)
    assert [times.predict(size) for size in (2, 4, 16, 64, 128)] == [1.0, 2.0, 2.0, 2.0, 1.0]


def test_a_step_is_learnt_with_the_number_of_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    add = Measured.add_verify

    def note(self: Measured, rows: int, num_sequences: int, seconds: float, *, is_overlapped: bool) -> None:
        seen.append(num_sequences)
        add(self, rows, num_sequences, seconds, is_overlapped=is_overlapped)

    monkeypatch.setattr(Measured, "add_verify", note)
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, overlap="serial") as pair:
            await asyncio.gather(*(pair.router.complete(request(str(i), max_tokens=12)) for i in range(3)))

    run(clock, main())
    assert max(seen) == 3
