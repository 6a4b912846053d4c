"""What engines say that steps take, what they took, and what is concluded for steps of other sizes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from specray.control.estimators import Average, TimeTable, isotonic
from specray.control.target_times import TargetTimes
from specray.fakes import VirtualClock
from specray.requests import SpeculationParams
from tests.unit.router.harness import request, serving

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
    table.expect({4: 0.010, 256: 0.040})
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
    table, taken = TimeTable(), [(size, 0.010) for size in (4, 8) for _ in range(60)]
    for one in taken:
        table.add(*one)
    assert table.predict(8) == pytest.approx(0.010)
    for index in range(200):
        seconds = 0.010 * (1 + 0.3 * (index % 3)) + 0.0001 * index
        taken.append((8, seconds))
        table.add(8, seconds)
        fresh = TimeTable()
        for one in taken:
            fresh.add(*one)
        assert table.predict(8) == pytest.approx(fresh.predict(8), rel=0.0101)
        assert table.predict(4) == pytest.approx(fresh.predict(4), rel=0.0101)


def test_the_curve_is_drawn_anew_only_when_averages_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TimeTable()
    for _ in range(200):
        table.add(4, 0.010)
    num_drawn = 0

    def curve(values: Sequence[tuple[float, float]]) -> list[float]:
        nonlocal num_drawn
        num_drawn += 1
        return isotonic(values)

    monkeypatch.setattr("specray.control.estimators.isotonic", curve)
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


# What sizes tell of one another, and what is learnt of a step


def test_what_a_size_took_tells_of_sizes_up_to_four_times_larger_or_smaller() -> None:
    times = TimeTable()
    times.expect({2: 1.0, 4: 1.0, 16: 1.0, 64: 1.0, 128: 3.0})
    for _ in range(3):
        times.add(16, 2.0)
    assert [times.predict(size) for size in (2, 4, 16, 64, 128)] == [1.0, 2.0, 2.0, 2.0, 3.0]


def test_of_two_sizes_near_each_other_neither_says_how_larger_ones_grow() -> None:
    table = TimeTable()
    # One that was disturbed makes both alike; a machine where rows cost nothing looks otherwise.
    table.expect({8: 0.035, 16: 0.045, 32: 0.077, 36: 0.077})
    slope = (0.077 - 0.045) / (36 - 16)
    assert table.predict(48) == pytest.approx(0.077 + slope * 12)
    table.expect({24: 0.060, 32: 0.076})
    assert table.predict(64) == pytest.approx(0.076 + 0.002 * 32)


def test_what_a_size_took_more_may_be_the_steps_and_not_the_rows() -> None:
    """Of 64 sequences 3 ms are for messages: no reason to believe that further rows are dear."""
    table = TimeTable()
    table.expect({1: 0.001, 64: 0.002, 128: 0.004})
    for _ in range(3):
        table.add(64, 0.005)
    assert table.predict(64) == pytest.approx(0.005)
    assert table.predict(128) == pytest.approx(0.004 + 0.003), "2.5 times as much would be 10 ms"
    assert table.predict(1) == pytest.approx(0.001), "too far away to tell"
    # One that took less took so many times less.
    faster = TimeTable()
    faster.expect({64: 0.002, 128: 0.004})
    for _ in range(3):
        faster.add(64, 0.001)
    assert faster.predict(128) == pytest.approx(0.002)


def test_a_size_that_took_longer_than_a_larger_one_is_pooled_with_it() -> None:
    table = TimeTable()
    for size, seconds in ((4, 0.006), (8, 0.012), (16, 0.010), (32, 0.020)):
        for _ in range(3):
            table.add(size, seconds)
    assert [table.predict(size) for size in (4, 6, 8, 12, 16, 32)] == pytest.approx(
        [0.006, 0.0085, 0.011, 0.011, 0.011, 0.020]
    )


def test_pooled_sizes_take_those_before_them_along_where_they_must() -> None:
    table = TimeTable()
    for size, seconds in ((1, 0.004), (2, 0.005), (4, 0.0), (8, 0.009)):
        for _ in range(3):
            table.add(size, seconds)
    assert [table.predict(size) for size in (1, 2, 4, 8)] == pytest.approx([0.003, 0.003, 0.003, 0.009])


def test_what_is_only_expected_gives_way_to_what_smaller_and_larger_sizes_took() -> None:
    """Of a machine three times slower than the engine said, at both ends; then of one ten times faster."""
    for factor, between in ((3.0, 0.090), (0.1, 0.003)):
        table = TimeTable()
        table.expect({4: 0.010, 64: 0.030, 256: 0.040, 4096: 0.050})
        for _ in range(3):
            table.add(4, 0.010 * factor)
            table.add(1024, 0.030 * factor)
        assert table.predict(4) == pytest.approx(0.010 * factor)
        assert table.predict(1024) == pytest.approx(0.030 * factor)
        middle = table.predict(64)
        assert middle is not None and 0.010 * factor <= middle <= between


async def test_a_step_is_learnt_with_what_its_sequences_hold_and_whether_it_fills_in_prompts(
    clock: VirtualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, dict[str, Any]]] = []
    add = TargetTimes.add

    def note(self: TargetTimes, num_rows: int, seconds: float, **values: Any) -> None:
        seen.append((num_rows, values))
        add(self, num_rows, seconds, **values)

    monkeypatch.setattr(TargetTimes, "add", note)
    plain = SpeculationParams(enabled=False)
    async with serving(clock, overlap="serial") as pair:
        given = [request(str(index), max_tokens=3, speculation=plain) for index in range(3)]
        await asyncio.gather(*(pair.router.complete(each) for each in given))
    # Three prompts of five tokens, then the token that came of each.
    assert [num_rows for num_rows, _ in seen] == [15, 3, 3]
    names = ("num_sequences", "num_context_tokens", "has_prompt")
    assert [tuple(values[name] for name in names) for _, values in seen] == [
        (3, 15, True),
        (3, 18, False),
        (3, 21, False),
    ]
