"""What is concluded from measurements: averages, tables of times, rates, and how soon they are doubted."""

from __future__ import annotations

import pytest

from specray.control.estimators import Average, OutcomesTime, Rate, TimeTable, chain_trials
from specray.types import Overlap
from tests.unit.control.harness import chosen, measured, worked


def test_one_measurement_of_outcomes_tells_of_other_widths_and_lengths() -> None:
    times = OutcomesTime()
    assert times.predict(3, 5, step_s=0.01) == pytest.approx(0.01 * (1 + 3 * 1.2))
    times.add(2, 11, 0.01 * 1.4 * (1 + 2 * 1.5), step_s=0.01)
    assert times.predict(3, 5, step_s=0.01) == pytest.approx(1.4 * 0.01 * (1 + 3 * 1.2))
    # Slow steps of one branch say nothing of wide ones that are known.
    times.add(2, 1, 3 * 0.01 * 3, step_s=0.01)
    assert times.predict(2, 1, step_s=0.01) == pytest.approx(3 * 0.01 * 3)
    assert times.predict(2, 11, step_s=0.01) == pytest.approx(1.4 * 0.01 * (1 + 2 * 1.5))


def test_outcomes_cost_what_the_draft_said_of_its_steps() -> None:
    times = OutcomesTime()
    times.expect([(1, 0.004), (8, 0.006), (16, 0.010)])
    widths = [times.predict(2, count, step_s=0.004) / 0.004 for count in (1, 8, 12, 20)]
    assert widths == pytest.approx([3, 1 + 2 * 1.25, 1 + 2 * 1.5, 1 + 2 * 2.0])


def test_what_was_measured_once_is_doubted_replan_by_replan() -> None:
    """A way of working that was slow when it was tried is tried again one day."""
    controller, stats = measured(overlap="auto", draft_step_s=0.002)
    assert worked(controller, stats) is Overlap.ENUMERATE
    for _ in range(60):
        for num_branches in (1, 4, 8, 20, 40):
            controller.cost_model.observe_outcomes(3, num_branches, 0.080)
    ways = []
    for _ in range(100):
        ways.append(worked(controller, stats))
    assert ways[0] is not Overlap.ENUMERATE
    assert ways[-1] is Overlap.ENUMERATE


def test_many_sessions_doubt_no_faster_than_one() -> None:
    """What one round of reviews forgets does not depend on how many sessions have theirs in it."""
    left = []
    for num_running in (1, 32):
        times = OutcomesTime()
        times.add(3, 4, 0.080, step_s=0.002)
        before = times.predict(3, 4, step_s=0.002)
        controller, stats = measured(overlap="auto")
        controller.cost_model.outcomes = times
        for _ in range(num_running):
            stats.rounds_to_replan = 0
            chosen(controller, stats, num_running=num_running)
        left.append(times.predict(3, 4, step_s=0.002) / before)
    assert left[0] < 0.97
    assert left[1] == pytest.approx(left[0], rel=1e-2)


def test_average_forgets_a_slow_start_and_caps_a_hiccup() -> None:
    average = Average()
    for sample in (1.0, 0.02, 0.021, 0.02, 0.02):
        average.add(sample)
    assert average.value == 0.02
    average.add(5.0)
    assert average.value == pytest.approx(0.02 + (0.03 - 0.02) / 3)
    for _ in range(100):
        average.add(0.024)
    assert average.value == pytest.approx(0.024, rel=1e-3)
    average.add(5.0)
    assert average.value == pytest.approx(0.024 + 0.1 * (0.072 - 0.024), rel=1e-3)


def test_time_table_interpolates_between_and_grows_beyond_as_it_did() -> None:
    table = TimeTable()
    assert table.predict(4) is None
    table.add(4, 0.010)
    table.add(12, 0.018)
    assert [table.predict(rows) for rows in (1, 4, 8, 12, 500)] == pytest.approx(
        [0.010, 0.010, 0.014, 0.018, 0.018 + 0.001 * 488]
    )
    single = TimeTable()
    single.add(1, 0.010)
    assert single.predict(500) == 0.010


def test_large_sizes_share_an_average_of_the_time_by_the_row() -> None:
    """97 to 128 rows are one entry; the least of them must not stand for the largest."""
    table = TimeTable()
    for rows in (97, 98, 128, 99, 97):
        table.add(rows, 0.001 * rows)
    assert table.predict(128) == pytest.approx(0.128)


def test_rate_begins_at_its_prior_and_follows_the_trials() -> None:
    rate = Rate(0.7, weight=8.0)
    assert rate.value == pytest.approx(0.7)
    for _ in range(300):
        rate.add(0, 1)
    assert rate.value < 0.12


@pytest.mark.parametrize(
    ("num_drafts", "num_accepted", "trials"), [(4, 0, 1), (4, 2, 3), (4, 4, 4), (0, 0, 0)]
)
def test_a_rejection_is_one_trial_and_what_follows_it_none(
    num_drafts: int, num_accepted: int, trials: int
) -> None:
    assert chain_trials(num_drafts, num_accepted) == trials
