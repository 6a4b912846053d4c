"""One experiment: windows of steps, what is concluded from them, and when the next one begins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from specray.control.experiments import (
    FIRST_INTERVAL_STEPS,
    MAX_INTERVAL_STEPS,
    PLAIN_INTERVAL_STEPS,
    PLAIN_STEPS,
    SPECULATED_ROUNDS,
    Experiment,
    Experiments,
    StepWindow,
    num_window_steps,
    size_class,
)
from specray.control.state import Mode
from tests.unit.control.experiments.harness import NUM_RUNNING, PROMISES, steps, tried

# Windows and what is concluded from them


def window(*steps: tuple[float, float], num_steps: int = 4) -> StepWindow:
    made = StepWindow(num_steps)
    for tokens, seconds in steps:
        made.add(tokens, seconds)
    return made


def test_a_window_holds_the_last_steps() -> None:
    made = window((1, 1.0), (1, 1.0), (2, 1.0), (2, 1.0))
    assert made.is_full and made.tokens_per_s == pytest.approx(6 / 4)
    made.add(2, 2.0)
    assert made.tokens_per_s == pytest.approx(7 / 5)
    assert not StepWindow(1).is_full and StepWindow(1).tokens_per_s == 0.0


def test_a_step_that_was_disturbed_counts_as_three_ordinary_ones() -> None:
    assert window((1, 1.0), (1, 1.0), (1, 50.0)).tokens_per_s == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("base", "tried", "speedup"),
    [(Mode.MODEL, Mode.PLAIN, math.sqrt(2 * 8)), (Mode.PLAIN, Mode.MODEL, 1 / math.sqrt(2 * 8))],
)
def test_a_gain_is_that_of_whoever_speculates_over_what_lies_on_both_sides(
    base: Mode, tried: Mode, speedup: float
) -> None:
    experiment = Experiment(
        base, tried, 1.5, window((2, 1.0)), window((1, 1.0)), window((8, 1.0)), num_left=9
    )
    assert experiment.speculating is Mode.MODEL
    assert experiment.measured_speedup == pytest.approx(speedup)
    assert replace(experiment, after=StepWindow(1)).measured_speedup is None


def test_plain_steps_tell_as_much_as_many_rounds_with_drafts() -> None:
    assert num_window_steps(Mode.PLAIN, 1) == num_window_steps(Mode.MODEL, 64) == PLAIN_STEPS
    assert num_window_steps(Mode.MODEL, 1) == SPECULATED_ROUNDS
    assert num_window_steps(Mode.NGRAM, 3) == math.ceil(SPECULATED_ROUNDS / 3)


def test_numbers_of_sessions_that_are_alike_lie_around_powers_of_two() -> None:
    assert [size_class(n) for n in (1, 2, 3, 5, 6, 11, 12, 22, 23, 45, 46, 90)] == [
        0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6,
    ]  # fmt: skip


# One experiment


def test_promises_are_believed_as_far_as_they_were_kept() -> None:
    experiments = Experiments()
    assert experiments.calibrated(PROMISES, NUM_RUNNING) == PROMISES
    tried(experiments, speedup=0.9)
    # One experiment against the quarter of one that the promise stands for.
    factor = (0.9 / 1.5) ** (1 / 1.25)
    calibrated = experiments.calibrated(PROMISES, NUM_RUNNING)
    assert calibrated == pytest.approx({Mode.NGRAM: 1.0, Mode.MODEL: 1.5 * factor})
    assert experiments.calibrated({Mode.MODEL: 3.0}, NUM_RUNNING)[Mode.MODEL] == pytest.approx(3 * factor)
    # Of other numbers of sessions nothing was seen.
    assert experiments.calibrated(PROMISES, 2 * NUM_RUNNING) == PROMISES


def test_what_was_seen_long_ago_is_believed_less() -> None:
    experiments = Experiments()
    tried(experiments, speedup=0.9)
    fresh = experiments.calibrated(PROMISES, NUM_RUNNING)[Mode.MODEL]
    steps(experiments, Mode.PLAIN, 2048, 1.0)
    stale = experiments.calibrated(PROMISES, NUM_RUNNING)[Mode.MODEL]
    assert stale == pytest.approx(1.5 * (0.9 / 1.5) ** (0.5 / (0.5 + 0.25)))
    assert fresh < stale < 1.5


def test_an_experiment_turns_there_and_back_and_the_next_is_twice_as_far_away_while_that_is_often() -> None:
    experiments = Experiments()
    experiments.calibrated(PROMISES, NUM_RUNNING)
    size = num_window_steps(Mode.MODEL, NUM_RUNNING)
    distances = []
    for _ in range(8):
        num_steps = 0
        while experiments.begin(Mode.MODEL, PROMISES, NUM_RUNNING) is None:
            assert steps(experiments, Mode.MODEL, 1, 1.5) == [False]
            num_steps += 1
        distances.append(num_steps)
        assert experiments.tried is Mode.PLAIN
        turned = steps(experiments, Mode.PLAIN, PLAIN_STEPS, 1.0)
        assert turned == [False] * (PLAIN_STEPS - 1) + [True]
        # The other half of what it is compared with.
        assert experiments.tried is None and experiments.running is not None
        turned = steps(experiments, Mode.MODEL, size, 1.5)
        assert turned == [False] * (size - 1) + [True]
    # Eight steps that lose a third are half a percent of 534.
    assert distances == [FIRST_INTERVAL_STEPS * 2**n for n in range(7)] + [534]


@pytest.mark.parametrize("predicted_speedup", [1.1, 4.0])
def test_the_first_experiment_comes_soon_whatever_is_predicted(predicted_speedup: float) -> None:
    experiments = Experiments()
    promises = PROMISES | {Mode.MODEL: predicted_speedup}
    experiments.calibrated(promises, NUM_RUNNING)
    num_steps = 0
    while experiments.begin(Mode.MODEL, promises, NUM_RUNNING) is None:
        steps(experiments, Mode.MODEL, 1, 1.2)
        num_steps += 1
    assert num_steps == FIRST_INTERVAL_STEPS


@pytest.mark.parametrize(("speedup", "interval"), [(0.9, 256), (0.75, 534), (0.5, 1600)])
def test_from_plain_decoding_an_experiment_is_as_rare_as_what_it_loses_asks_for(
    speedup: float, interval: int
) -> None:
    experiments = Experiments()
    promises = {Mode.NGRAM: 0.9, Mode.MODEL: 1.0}
    kept = experiments.calibration(Mode.MODEL, NUM_RUNNING)
    kept.weight, kept.error = 1e9, math.log(speedup)
    num_steps = 0
    while experiments.begin(Mode.PLAIN, promises, NUM_RUNNING) is None:
        steps(experiments, Mode.PLAIN, 1, 1.0)
        num_steps += 1
        kept.num_elsewhere = 0
    assert num_steps == interval


def test_from_plain_decoding_whoever_may_gain_is_tried_in_turns() -> None:
    experiments = Experiments()
    order = []
    for _ in range(4):
        num_steps = 0
        while (mode := experiments.begin(Mode.PLAIN, PROMISES, NUM_RUNNING)) is None:
            steps(experiments, Mode.PLAIN, 1, 1.0)
            num_steps += 1
        order.append(mode)
        steps(experiments, mode, num_window_steps(mode, NUM_RUNNING), 1.0)
        steps(experiments, Mode.PLAIN, PLAIN_STEPS, 1.0)
        assert num_steps <= MAX_INTERVAL_STEPS
    assert sorted(order[:2]) == sorted(order[2:]) == [Mode.NGRAM, Mode.MODEL]
    # Nobody who promises a loss is.
    steps(experiments, Mode.PLAIN, 4 * PLAIN_INTERVAL_STEPS, 1.0)
    assert experiments.begin(Mode.PLAIN, {Mode.NGRAM: 0.99, Mode.MODEL: 0.99}, NUM_RUNNING) is None


def test_an_experiment_waits_while_others_come_and_go_but_not_for_ever() -> None:
    experiments = Experiments()
    experiments.calibrated(PROMISES, NUM_RUNNING)
    steps(experiments, Mode.MODEL, FIRST_INTERVAL_STEPS, 1.2)
    assert experiments.begin(Mode.MODEL, PROMISES, NUM_RUNNING) is Mode.PLAIN
    before = experiments.calibrated(PROMISES, NUM_RUNNING)
    waits = 6 * (PLAIN_STEPS + num_window_steps(Mode.MODEL, NUM_RUNNING))
    # Half as many sessions, and steps that show nothing.
    turned = [experiments.observe(Mode.PLAIN, NUM_RUNNING // 2, 1.0, 0.1) for _ in range(waits // 2)]
    turned += [experiments.pass_by() for _ in range(waits // 2)]
    assert turned == [False] * (waits - 1) + [True]
    assert experiments.running is None and experiments.tried is None
    assert experiments.calibrated(PROMISES, NUM_RUNNING) == before
    assert not experiments.pass_by()


def test_old_experiments_count_for_less_and_steps_at_work_make_none_stale() -> None:
    experiments = Experiments()
    for _ in range(12):
        tried(experiments, speedup=1.5)
    kept = experiments.calibration(Mode.MODEL, NUM_RUNNING)
    assert kept.weight == pytest.approx(8.0)
    tried(experiments, speedup=0.75)
    assert kept.error == pytest.approx(math.log(0.5) / 8)
    calibrated = experiments.calibrated(PROMISES, NUM_RUNNING)
    steps(experiments, Mode.MODEL, 3000, 1.2)
    assert experiments.calibrated(PROMISES, NUM_RUNNING) == calibrated


def test_sessions_that_come_and_go_are_each_counted_for_what_it_had() -> None:
    experiments = Experiments()
    experiments.calibrated(PROMISES, NUM_RUNNING)
    steps(experiments, Mode.MODEL, FIRST_INTERVAL_STEPS, 1.2)
    assert experiments.begin(Mode.MODEL, PROMISES, NUM_RUNNING) is Mode.PLAIN
    steps(experiments, Mode.PLAIN, PLAIN_STEPS, 1.0, NUM_RUNNING - 2)
    experiment = experiments.running
    steps(experiments, Mode.MODEL, num_window_steps(Mode.MODEL, NUM_RUNNING), 1.2, NUM_RUNNING + 2)
    assert experiment is not None and experiment.measured_speedup == pytest.approx(1.2)


def test_an_experiment_needs_steps_before_it_with_as_many_sessions() -> None:
    experiments = Experiments()
    for num_running in (NUM_RUNNING, 2 * NUM_RUNNING):
        experiments.calibrated(PROMISES, num_running)
    steps(experiments, Mode.MODEL, FIRST_INTERVAL_STEPS, 1.2)
    assert experiments.begin(Mode.MODEL, PROMISES, 2 * NUM_RUNNING) is None
    experiments.abandon()
    size = num_window_steps(Mode.MODEL, NUM_RUNNING)
    begun = []
    for _ in range(size):
        begun.append(experiments.begin(Mode.MODEL, PROMISES, NUM_RUNNING))
        steps(experiments, Mode.MODEL, 1, 1.2)
    assert begun == [None] * size
    assert experiments.begin(Mode.MODEL, PROMISES, NUM_RUNNING) is Mode.PLAIN
