"""Experiments: measured against predicted speedup; a simulated machine holds sessions to 0.98."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from specray.control.controller import Controller
from specray.control.experiments import (
    FIRST_INTERVAL_STEPS,
    LARGE_SPEEDUP,
    LARGE_SPEEDUP_INTERVAL_STEPS,
    MAX_INTERVAL_STEPS,
    PLAIN_INTERVAL_STEPS,
    PLAIN_STEPS,
    SPECULATED_ROUNDS,
    Experiment,
    Experiments,
    Window,
    num_window_steps,
    size_class,
)
from specray.control.mode import FIRST_DECISION_STEPS, OFF_DECISION_STEPS, ModeController
from specray.control.state import OFF, Mode, Plan, SessionStats
from specray.errors import EngineLostError
from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser, PerfectGuesser, ToyModel, VirtualClock
from specray.fakes.engines import fake_info
from specray.interfaces import Drafter
from specray.requests import SpeculationParams
from specray.types import DraftKind
from tests.unit.router.harness import (
    MODEL,
    TARGET_S,
    expected,
    fake_draft,
    request,
    router_config,
    serving,
    speculation_config,
)

NUM_RUNNING = 8
PROMISES = {Mode.NGRAM: 1.0, Mode.MODEL: 1.5}


# Windows and what is concluded from them


def window(*steps: tuple[float, float], num_steps: int = 4) -> Window:
    made = Window(num_steps)
    for tokens, seconds in steps:
        made.add(tokens, seconds)
    return made


def test_a_window_holds_the_last_steps() -> None:
    made = window((1, 1.0), (1, 1.0), (2, 1.0), (2, 1.0))
    assert made.is_full and made.tokens_per_s == pytest.approx(6 / 4)
    made.add(2, 2.0)
    assert made.tokens_per_s == pytest.approx(7 / 5)
    assert not Window(1).is_full and Window(1).tokens_per_s == 0.0


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
    assert replace(experiment, after=Window(1)).measured_speedup is None


def test_plain_steps_tell_as_much_as_many_rounds_with_drafts() -> None:
    assert num_window_steps(Mode.PLAIN, 1) == num_window_steps(Mode.MODEL, 64) == PLAIN_STEPS
    assert num_window_steps(Mode.MODEL, 1) == SPECULATED_ROUNDS
    assert num_window_steps(Mode.NGRAM, 3) == math.ceil(SPECULATED_ROUNDS / 3)


def test_numbers_of_sessions_that_are_alike_lie_around_powers_of_two() -> None:
    assert [size_class(n) for n in (1, 2, 3, 5, 6, 11, 12, 22, 23, 45, 46, 90)] == [
        0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6,
    ]  # fmt: skip


# One experiment


def steps(
    experiments: Experiments, mode: Mode, count: int, tokens_per_s: float, num_running: int = NUM_RUNNING
) -> list[bool]:
    """Steps of a tenth of a second; says of each whether something has turned."""
    return [
        experiments.observe(mode, num_running, 0.1 * tokens_per_s * num_running, 0.1) for _ in range(count)
    ]


def tried(
    experiments: Experiments,
    *,
    speedup: float,
    predicted_speedup: float = 1.5,
    num_running: int = NUM_RUNNING,
) -> None:
    """A whole experiment of plain decoding beside the model."""
    experiments.switch_to(Mode.MODEL, num_running)
    size = num_window_steps(Mode.MODEL, num_running)
    promises = PROMISES | {Mode.MODEL: predicted_speedup}
    steps(experiments, Mode.MODEL, max(size, LARGE_SPEEDUP_INTERVAL_STEPS), speedup, num_running)
    assert experiments.begin(Mode.MODEL, promises, num_running) is Mode.PLAIN
    assert steps(experiments, Mode.PLAIN, PLAIN_STEPS, 1.0, num_running)[-1]
    assert steps(experiments, Mode.MODEL, size, speedup, num_running)[-1]
    assert experiments.running is None


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
    for _ in range(7):
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
    assert distances == [FIRST_INTERVAL_STEPS * 2**n for n in range(6)] + [534]


@pytest.mark.parametrize(
    ("predicted_speedup", "distance"),
    [(LARGE_SPEEDUP - 0.01, FIRST_INTERVAL_STEPS), (LARGE_SPEEDUP, LARGE_SPEEDUP_INTERVAL_STEPS)],
)
def test_where_an_experiment_would_lose_much_it_comes_later(predicted_speedup: float, distance: int) -> None:
    experiments = Experiments()
    promises = PROMISES | {Mode.MODEL: predicted_speedup}
    experiments.calibrated(promises, NUM_RUNNING)
    num_steps = 0
    while experiments.begin(Mode.MODEL, promises, NUM_RUNNING) is None:
        steps(experiments, Mode.MODEL, 1, 1.2)
        num_steps += 1
    assert num_steps == distance


@pytest.mark.parametrize(("speedup", "interval"), [(0.9, 256), (0.75, 534), (0.5, 1600)])
def test_from_plain_decoding_an_experiment_is_as_rare_as_what_it_loses_asks_for(
    speedup: float, interval: int
) -> None:
    experiments = Experiments()
    promises = {Mode.NGRAM: 0.9, Mode.MODEL: 1.0}
    kept = experiments._of(Mode.MODEL, NUM_RUNNING)
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
    kept = experiments._of(Mode.MODEL, NUM_RUNNING)
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


# What all decide from it


@pytest.mark.parametrize(
    ("now", "fallback", "model", "mode"),
    [
        (None, 1.0, 1.079, Mode.NGRAM),
        (None, 1.0, 1.08, Mode.MODEL),
        (Mode.MODEL, 1.0, 1.03, Mode.MODEL),
        (Mode.MODEL, 1.0, 1.029, Mode.NGRAM),
        (Mode.MODEL, 0.99, 1.029, Mode.PLAIN),
        (Mode.MODEL, 1.2, 1.17, Mode.MODEL),
        (Mode.MODEL, 1.21, 1.17, Mode.NGRAM),
        (Mode.NGRAM, 1.2, 1.23, Mode.NGRAM),
        (Mode.NGRAM, 1.2, 1.24, Mode.MODEL),
        (Mode.NGRAM, 0.99, 1.07, Mode.PLAIN),
        (Mode.PLAIN, 1.029, 1.07, Mode.PLAIN),
        (Mode.PLAIN, 1.03, 1.07, Mode.NGRAM),
        (Mode.PLAIN, 1.0, 1.08, Mode.MODEL),
    ],
)
def test_what_is_at_work_is_left_only_for_what_brings_a_little_more(
    now: Mode | None, fallback: float, model: float, mode: Mode
) -> None:
    calibrated = {Mode.NGRAM: fallback, Mode.MODEL: model}
    assert ModeController(mode=now)._choose(calibrated) is mode


def test_a_decision_turns_begins_experiments_and_ends_those_of_other_numbers() -> None:
    modes = ModeController()
    on = sessions_of(NUM_RUNNING, Plan(3))
    modes.decide(1.5, NUM_RUNNING)
    kept = modes.experiments._of(Mode.MODEL, NUM_RUNNING)
    kept.interval = 4096
    modes.decide(0.9, NUM_RUNNING)
    assert modes.mode is Mode.NGRAM
    modes.decide(1.5, NUM_RUNNING)
    # It is seen soon what it brings now.
    assert kept.interval == 0
    for _ in range(2 + FIRST_INTERVAL_STEPS):
        step_of(modes, on, 0.1, 12, is_drafted=True)
    num_changes = modes.num_changes
    modes.decide(1.5, NUM_RUNNING)
    assert modes.is_trying_plain and modes.num_changes == num_changes + 1
    for _ in range(2 + PLAIN_STEPS):
        assert modes.is_trying_plain
        step_of(modes, on, 0.1, NUM_RUNNING, is_drafted=False)
    assert not modes.is_trying_plain and not modes.is_due(NUM_RUNNING)
    for _ in range(2 + num_window_steps(Mode.MODEL, NUM_RUNNING)):
        assert not modes.is_due(NUM_RUNNING)
        modes.take_mean(on[0])
        step_of(modes, on, 0.1, 12, is_drafted=True)
    # What was tried is weighed at once.
    assert modes.is_due(NUM_RUNNING)
    modes.experiments.running = Experiment(
        Mode.MODEL, Mode.PLAIN, 1.5, Window(8), Window(8), Window(8), num_left=9
    )
    modes.decide(1.5, NUM_RUNNING // 2)
    assert modes.experiments.running is None


def test_steps_with_fallback_have_no_plan_with_the_model() -> None:
    modes = ModeController(mode=Mode.NGRAM)
    mixed = [*sessions_of(3, OFF), *sessions_of(1, Plan(3))]
    step_of(modes, mixed, 0.1, 4, is_drafted=True)
    assert modes.experiments._num_steps == 0
    step_of(modes, mixed[:3], 0.1, 4, is_drafted=True)
    assert modes.experiments._num_steps == 1


def test_what_is_promised_of_many_is_of_plans_that_many_may_be_under() -> None:
    controller = Controller(speculation_config(overlap="serial"))
    for rows in (1, 4, 32, 256):
        controller.cost_model.target.add(rows, 0.020, is_overlapped=False)
    controller.cost_model.observe_proposals([4], 4 * 0.0005, 0.0)
    stats = controller.start_session(request())
    stats.draft_knows_acceptance = False
    for _ in range(200):
        stats.acceptance.add(1, 1)
    plain = controller._goodput.plain_goodput(1)
    for num_running, longest in ((3, 16), (4, 7)):
        speedup = controller._goodput.speedup(stats, num_running)
        assert speedup == pytest.approx(controller.goodput(Plan(longest), stats, num_running) / plain)


def step_of(
    modes: ModeController,
    sessions: list[SessionStats],
    seconds: float | None,
    num_tokens: int,
    *,
    is_drafted: bool,
    is_reading: bool = False,
) -> None:
    for stats in sessions:
        modes.add(stats, is_drafted=is_drafted)
    modes.end_step(
        seconds,
        is_reading=is_reading,
        num_sessions=len(sessions),
        num_running=len(sessions),
        num_tokens=num_tokens,
    )


def sessions_of(num_running: int, plan: Plan) -> list[SessionStats]:
    controller = Controller(speculation_config())
    sessions = [controller.start_session(request(f"r{index}")) for index in range(num_running)]
    for stats in sessions:
        stats.plan = plan
    return sessions


@pytest.mark.parametrize("num_running", [1, 8, 64])
@pytest.mark.parametrize(
    ("predicted_speedup", "model", "fallback"),
    [
        (1.4, 0.7, 0.9),
        (1.4, 0.95, 1.0),
        (1.1, 1.5, 1.0),
        (1.5, 1.5, 0.9),
        (0.7, 0.6, 0.8),
        (0.7, 0.6, 1.3),
        (3.0, 3.0, 1.1),
        (2.2, 0.9, 1.0),
    ],
)
def test_whatever_was_promised_all_work_about_as_fast_as_the_best_way(
    predicted_speedup: float, model: float, fallback: float, num_running: int
) -> None:
    """A machine whose own speed wanders by a third; tokens of a round with drafts are left to chance."""
    chance = random.Random(f"{predicted_speedup} {model} {fallback} {num_running}")
    speedups = {Mode.PLAIN: 1.0, Mode.NGRAM: fallback, Mode.MODEL: model}
    modes = ModeController()
    tokens, best = [0.0, 0.0], [0.0, 0.0]
    num_first, num_steps = 1200, 6000
    on, off = sessions_of(num_running, Plan(3)), sessions_of(num_running, OFF)
    for step in range(num_steps):
        if modes.is_due(num_running):
            modes.take_mean(off[0])
            modes.decide(predicted_speedup, num_running)
        mode = modes.experiments.tried
        mode = modes.mode if mode is None else mode
        assert mode is not None
        sessions = on if modes.uses_model else off
        pace = 1 + 0.3 * math.sin(step / 300) + chance.uniform(-0.05, 0.05)
        per_round = 1.0 if mode is Mode.PLAIN else 2.0
        num_tokens = sum(chance.choice((0.5, 1.5)) * per_round for _ in range(num_running))
        num_tokens = num_running if mode is Mode.PLAIN else num_tokens
        took = pace * per_round / speedups[mode]
        step_of(modes, sessions, took, num_tokens, is_drafted=mode > Mode.PLAIN)
        is_late = step >= num_first
        tokens[is_late] += num_tokens / num_running
        best[is_late] += took / pace * max(speedups.values())
    assert tokens[True] > 0.975 * best[True]
    # What is not known yet must be seen first.
    assert sum(tokens) > 0.94 * sum(best)


def test_steps_that_show_nothing_are_passed_by() -> None:
    modes = ModeController()
    on, off = sessions_of(4, Plan(3)), sessions_of(4, OFF)
    modes.decide(1.5, 4)
    assert modes.mode is Mode.MODEL

    def seen(sessions: list[SessionStats], seconds: float | None = 0.1, **options: bool) -> bool:
        before = modes.experiments._num_steps
        step_of(modes, sessions, seconds, 8, **({"is_drafted": True} | options))
        return modes.experiments._num_steps > before

    # After a turn two steps are left aside, and those in which the draft catches up.
    assert not seen(on, is_reading=True)
    assert [seen(on) for _ in range(3)] == [False, False, True]
    # From then on reading is what the model costs.
    assert seen(on, is_reading=True)
    assert not seen(on, None)
    assert not seen(on, 0.0)
    assert not seen(off)
    assert not seen([*on[:3], off[0]])
    # Its draft is not there.
    assert not seen(on, is_drafted=False)
    on[0].is_exploring = True
    assert not seen(on)


def test_plain_steps_have_no_draft_tokens_and_no_reading() -> None:
    modes = ModeController(mode=Mode.PLAIN)
    off = sessions_of(4, OFF)

    def seen(**options: bool) -> bool:
        before = modes.experiments._num_steps
        step_of(modes, off, 0.1, 4, **({"is_drafted": False} | options))
        return modes.experiments._num_steps > before

    assert seen()
    assert not seen(is_drafted=True)
    assert not seen(is_reading=True)
    assert modes.is_plain and modes.uses_model is False


def test_plans_stand_while_none_is_tried_and_are_chosen_anew_when_the_model_is() -> None:
    modes = ModeController()
    modes.decide(1.5, 8)
    num_changes = modes.num_changes
    modes.experiments.running = Experiment(
        Mode.MODEL, Mode.PLAIN, 1.5, Window(8), Window(8), Window(8), num_left=9
    )
    assert modes.uses_model and modes.is_plain and modes.is_trying_plain
    # Nothing is decided meanwhile, unless about half as many run.
    modes._num_rounds = 10_000
    assert not modes.is_due(8)
    assert modes.is_due(4)
    modes.mode = Mode.PLAIN
    modes.experiments.running = Experiment(
        Mode.PLAIN, Mode.MODEL, 1.5, Window(8), Window(8), Window(8), num_left=9
    )
    assert modes.uses_model and not modes.is_plain and not modes.is_trying_plain
    assert modes.num_changes == num_changes


def test_without_the_model_decisions_become_rare_until_a_session_has_tried_it() -> None:
    modes = ModeController()
    (stats,) = sessions_of(1, OFF)
    lengths = []
    for _ in range(5):
        modes.decide(0.5, 1)
        num_rounds = 0
        while not modes.is_due(1):
            modes.add(stats)
            num_rounds += 1
        modes.take_mean(stats)
        lengths.append(num_rounds)
    assert lengths == [FIRST_DECISION_STEPS, 16, 64, OFF_DECISION_STEPS, OFF_DECISION_STEPS]
    modes.decide(0.5, 1)
    for _ in range(20):
        modes.add(stats)
    assert not modes.is_due(1)
    stats.is_exploring = True
    modes.add(stats)
    assert modes.is_due(1)


def test_an_experiment_does_not_wait_for_a_decision_that_is_far_away() -> None:
    modes = ModeController()
    off = sessions_of(NUM_RUNNING, OFF)
    for _ in range(4):
        # ControlObserver are for 4, 16, 64 and 128 steps.
        modes.decide(0.5, NUM_RUNNING)
    assert modes.mode is Mode.NGRAM
    num_steps = 0
    while not modes.is_due(NUM_RUNNING):
        step_of(modes, off, 0.1, NUM_RUNNING, is_drafted=True)
        num_steps += 1
    assert num_steps == 2 + FIRST_INTERVAL_STEPS
    modes.take_mean(off[0])
    modes.decide(0.5, NUM_RUNNING)
    assert modes.is_trying_plain and not modes.is_due(NUM_RUNNING)
    # With others beside them they are not as many as the experiment would be of.
    other = ModeController()
    other.decide(0.5, NUM_RUNNING)
    for _ in range(FIRST_INTERVAL_STEPS + 2):
        other.take_mean(off[0])
        step_of(other, off, 0.1, NUM_RUNNING, is_drafted=True)
    assert other.is_due(NUM_RUNNING)
    other.decide(0.5, 2 * NUM_RUNNING - 1)
    step_of(other, off, 0.1, NUM_RUNNING, is_drafted=True)
    assert not other.is_due(2 * NUM_RUNNING - 1)


# What the router does then


def test_where_all_decode_plainly_nobody_has_fallback_but_who_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ModeController, "is_plain", property(lambda self: True))
    # It goes round in a circle, and so does what is looked up.
    circle = ToyModel(vocab_size=8, context_len=1)

    target = FakeTarget(circle, info=fake_info("target", vocab_size=64))

    def no_draft(number: int) -> Drafter:
        raise EngineLostError("no draft")

    async def num_rounds(make_drafter: Any = None, **speculation: DraftKind) -> float:
        options: dict[str, Any] = {"make_drafter": make_drafter, "fallback": "ngram", "overlap": "serial"}
        async with serving(clock, target=target, num_speculative_tokens="auto", **options) as pair:
            wanted = SpeculationParams(**speculation)
            given = request("a", max_tokens=60, speculation=wanted)
            output = await pair.router.complete(given)
            assert output.token_ids == circle.generate(given.prompt_token_ids, 60, 0)
            return pair.counted("specray_rounds_total")

    clock = VirtualClock()
    # With the draft model there are its tokens alone; here it is asked next to nothing.
    monkeypatch.setattr(Controller, "plan", lambda *_, **__: OFF)
    assert clock.run(num_rounds()) == 60
    monkeypatch.undo()
    monkeypatch.setattr(ModeController, "is_plain", property(lambda self: True))
    clock = VirtualClock()
    assert clock.run(num_rounds(draft=DraftKind.NGRAM)) < 15
    # Without a draft nothing is decided, and nothing tried.
    clock = VirtualClock()
    assert clock.run(num_rounds(no_draft)) < 15


def test_a_session_with_a_fallback_uses_modele_with_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    add = ModeController.add

    def noted(self: ModeController, stats: SessionStats, *, is_drafted: bool = False) -> None:
        seen.append(is_drafted)
        add(self, stats, is_drafted=is_drafted)

    monkeypatch.setattr(ModeController, "add", noted)
    circle = ToyModel(vocab_size=8, context_len=1)
    target = FakeTarget(circle, info=fake_info("target", vocab_size=64))
    clock = VirtualClock()

    async def main() -> tuple[float, float]:
        async with serving(clock, target=target, fallback="ngram", overlap="serial") as pair:
            await pair.router.complete(request("a", max_tokens=60))
            names = ("specray_spec_decode_num_drafts_by_source_total",)
            return tuple(
                sum(pair.counted(name, source=source) for name in names) for source in ("fallback", "model")
            )

    num_filled, num_modelled = clock.run(main())
    assert num_filled > 0
    # The first round has no plan yet, and takes no part.
    assert num_filled + num_modelled - 1 <= sum(seen) <= num_filled + num_modelled


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_while_plain_decoding_is_tried_nothing_is_asked_of_the_draft_but_for_a_fixed_k(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModeController, "is_trying_plain", property(lambda self: True))

    async def draft_steps(wanted: SpeculationParams) -> int:
        async with serving(clock, overlap=overlap) as pair:
            given = request("a", max_tokens=30, speculation=wanted)
            assert (await pair.router.complete(given)).token_ids == expected(given)
            return pair.draft.num_steps

    clock = VirtualClock()
    assert clock.run(draft_steps(SpeculationParams())) == 0
    clock = VirtualClock()
    assert clock.run(draft_steps(SpeculationParams(num_speculative_tokens=2))) > 10


def test_an_experiment_does_not_wait_for_a_session_that_came_meanwhile_to_end() -> None:
    """A session at a time: plain decoding is tried while one ends and the next, which is long, begins."""
    clock = VirtualClock()

    async def main() -> float:
        draft = fake_draft(PerfectGuesser(MODEL))
        async with serving(clock, draft=draft, overlap="serial") as pair:
            modes = pair.router._controller.modes
            lengths = iter(range(40, 400))
            while not modes.is_trying_plain:
                await pair.router.complete(request("short", max_tokens=next(lengths)))
            before = pair.counted("specray_rounds_total")
            await pair.router.complete(request("long", max_tokens=300))
            assert not modes.is_trying_plain
            return pair.counted("specray_rounds_total") - before

    # The rest of the experiment and its unsettled steps, then three tokens and more a round.
    assert clock.run(main()) < PLAIN_STEPS + 2 + 100


def test_a_steps_tokens_and_time_are_those_since_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float | None, bool, int, int, int]] = []

    def end_step(self: ModeController, seconds: float | None, **step: int) -> None:
        seen.append((seconds, bool(step["is_reading"]), *list(step.values())[1:]))

    monkeypatch.setattr(ModeController, "end_step", end_step)
    clock = VirtualClock()

    async def main() -> None:
        async with serving(clock, has_draft_model=False) as pair:
            first = [request(name, max_tokens=3) for name in ("a", "b")]
            await asyncio.gather(*map(pair.router.complete, first))
            await asyncio.sleep(5.0)
            await pair.router.complete(request("c", max_tokens=2))

    clock.run(main())
    assert not any(is_reading for _, is_reading, *_ in seen)
    took = pytest.approx(TARGET_S)
    # What fills in a prompt, and what follows a pause, shows nothing.
    assert seen == [
        (None, False, 2, 2, 2),
        (took, False, 2, 2, 2),
        (took, False, 2, 2, 2),
        (None, False, 1, 1, 1),
        (took, False, 1, 1, 1),
    ]


def test_steps_with_prompts_show_nothing_and_those_beside_which_the_draft_reads_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[bool, bool]] = []

    def end_step(self: ModeController, seconds: float | None, *, is_reading: bool, **_: int) -> None:
        seen.append((seconds is None, is_reading))

    monkeypatch.setattr(ModeController, "end_step", end_step)
    clock = VirtualClock()

    async def main() -> None:
        # The prompt is long enough to be read in pieces by a draft that takes its time for each.
        draft = FakeDraft(NoisyGuesser(MODEL), cost=lambda steps: int(steps * 4e6))
        config = router_config(prefill_chunk_tokens=16)
        async with serving(clock, draft=draft, overlap="serial", config=config) as pair:
            first = asyncio.create_task(pair.router.complete(request("a", max_tokens=40)))
            await asyncio.sleep(0.2)
            before = len(seen)
            await pair.router.complete(request("b", tuple([1, 2, 3] * 100), 4))
            await first
            during = seen[before:]
            # Nothing shows that is filled in; the draft has read at the same time.
            assert sum(is_prompt for is_prompt, _ in during) >= 300 // 16
            assert any(is_reading for _, is_reading in during)
            assert not any(is_prompt for is_prompt, _ in seen[1:before])

    clock.run(main())
