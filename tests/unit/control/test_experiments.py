"""Trials: what speculation brings is held against what it promised; a simulated machine holds it to 0.98."""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from specray.control.controller import Policy
from specray.control.experiments import (
    FIRST_INTERVAL_STEPS,
    LARGE_GAIN,
    LARGE_GAIN_INTERVAL_STEPS,
    MAX_INTERVAL_STEPS,
    PLAIN_INTERVAL_STEPS,
    PLAIN_STEPS,
    SPECULATED_ROUNDS,
    Level,
    Trial,
    Trials,
    Window,
    num_steps_of,
    size_of,
)
from specray.control.mode import FIRST_REVIEW_STEPS, OFF_REVIEW_STEPS, Together
from specray.control.state import OFF, Pacing, Plan
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
PROMISES = {Level.FILLERS: 1.0, Level.MODEL: 1.5}


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
    ("base", "tried", "gain"),
    [(Level.MODEL, Level.PLAIN, math.sqrt(2 * 8)), (Level.PLAIN, Level.MODEL, 1 / math.sqrt(2 * 8))],
)
def test_a_gain_is_that_of_whoever_speculates_over_what_lies_on_both_sides(
    base: Level, tried: Level, gain: float
) -> None:
    trial = Trial(base, tried, 1.5, window((2, 1.0)), window((1, 1.0)), window((8, 1.0)), num_left=9)
    assert trial.contender is Level.MODEL
    assert trial.gain == pytest.approx(gain)
    assert replace(trial, after=Window(1)).gain is None


def test_plain_steps_tell_as_much_as_many_rounds_with_drafts() -> None:
    assert num_steps_of(Level.PLAIN, 1) == num_steps_of(Level.MODEL, 64) == PLAIN_STEPS
    assert num_steps_of(Level.MODEL, 1) == SPECULATED_ROUNDS
    assert num_steps_of(Level.FILLERS, 3) == math.ceil(SPECULATED_ROUNDS / 3)


def test_numbers_of_sessions_that_are_alike_lie_around_powers_of_two() -> None:
    assert [size_of(n) for n in (1, 2, 3, 5, 6, 11, 12, 22, 23, 45, 46, 90)] == [
        0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6,
    ]  # fmt: skip


# One trial


def steps(
    trials: Trials, level: Level, count: int, tokens_per_s: float, num_running: int = NUM_RUNNING
) -> list[bool]:
    """Steps of a tenth of a second; says of each whether something has turned."""
    return [trials.observe(level, num_running, 0.1 * tokens_per_s * num_running, 0.1) for _ in range(count)]


def tried(trials: Trials, *, gain: float, promised: float = 1.5, num_running: int = NUM_RUNNING) -> None:
    """A whole trial of plain decoding beside the model."""
    trials.take_up(Level.MODEL, num_running)
    size = num_steps_of(Level.MODEL, num_running)
    promises = PROMISES | {Level.MODEL: promised}
    steps(trials, Level.MODEL, max(size, LARGE_GAIN_INTERVAL_STEPS), gain, num_running)
    assert trials.begin(Level.MODEL, promises, num_running) is Level.PLAIN
    assert steps(trials, Level.PLAIN, PLAIN_STEPS, 1.0, num_running)[-1]
    assert steps(trials, Level.MODEL, size, gain, num_running)[-1]
    assert trials.running is None


def test_promises_are_believed_as_far_as_they_were_kept() -> None:
    trials = Trials()
    assert trials.believed(PROMISES, NUM_RUNNING) == PROMISES
    tried(trials, gain=0.9)
    # One trial against the quarter of one that the promise stands for.
    factor = (0.9 / 1.5) ** (1 / 1.25)
    believed = trials.believed(PROMISES, NUM_RUNNING)
    assert believed == pytest.approx({Level.FILLERS: 1.0, Level.MODEL: 1.5 * factor})
    assert trials.believed({Level.MODEL: 3.0}, NUM_RUNNING)[Level.MODEL] == pytest.approx(3 * factor)
    # Of other numbers of sessions nothing was seen.
    assert trials.believed(PROMISES, 2 * NUM_RUNNING) == PROMISES


def test_what_was_seen_long_ago_is_believed_less() -> None:
    trials = Trials()
    tried(trials, gain=0.9)
    fresh = trials.believed(PROMISES, NUM_RUNNING)[Level.MODEL]
    steps(trials, Level.PLAIN, 2048, 1.0)
    stale = trials.believed(PROMISES, NUM_RUNNING)[Level.MODEL]
    assert stale == pytest.approx(1.5 * (0.9 / 1.5) ** (0.5 / (0.5 + 0.25)))
    assert fresh < stale < 1.5


def test_a_trial_turns_there_and_back_and_the_next_is_twice_as_far_away_while_that_is_often() -> None:
    trials = Trials()
    trials.believed(PROMISES, NUM_RUNNING)
    size = num_steps_of(Level.MODEL, NUM_RUNNING)
    distances = []
    for _ in range(7):
        num_steps = 0
        while trials.begin(Level.MODEL, PROMISES, NUM_RUNNING) is None:
            assert steps(trials, Level.MODEL, 1, 1.5) == [False]
            num_steps += 1
        distances.append(num_steps)
        assert trials.tried is Level.PLAIN
        turned = steps(trials, Level.PLAIN, PLAIN_STEPS, 1.0)
        assert turned == [False] * (PLAIN_STEPS - 1) + [True]
        # The other half of what it is compared with.
        assert trials.tried is None and trials.running is not None
        turned = steps(trials, Level.MODEL, size, 1.5)
        assert turned == [False] * (size - 1) + [True]
    # Eight steps that lose a third are half a percent of 534.
    assert distances == [FIRST_INTERVAL_STEPS * 2**n for n in range(6)] + [534]


@pytest.mark.parametrize(
    ("promised", "distance"),
    [(LARGE_GAIN - 0.01, FIRST_INTERVAL_STEPS), (LARGE_GAIN, LARGE_GAIN_INTERVAL_STEPS)],
)
def test_where_a_trial_would_lose_much_it_comes_later(promised: float, distance: int) -> None:
    trials = Trials()
    promises = PROMISES | {Level.MODEL: promised}
    trials.believed(promises, NUM_RUNNING)
    num_steps = 0
    while trials.begin(Level.MODEL, promises, NUM_RUNNING) is None:
        steps(trials, Level.MODEL, 1, 1.2)
        num_steps += 1
    assert num_steps == distance


@pytest.mark.parametrize(("gain", "interval"), [(0.9, 256), (0.75, 534), (0.5, 1600)])
def test_from_plain_decoding_a_trial_is_as_rare_as_what_it_loses_asks_for(gain: float, interval: int) -> None:
    trials = Trials()
    promises = {Level.FILLERS: 0.9, Level.MODEL: 1.0}
    kept = trials._of(Level.MODEL, NUM_RUNNING)
    kept.weight, kept.error = 1e9, math.log(gain)
    num_steps = 0
    while trials.begin(Level.PLAIN, promises, NUM_RUNNING) is None:
        steps(trials, Level.PLAIN, 1, 1.0)
        num_steps += 1
        kept.num_elsewhere = 0
    assert num_steps == interval


def test_from_plain_decoding_whoever_may_gain_is_tried_in_turns() -> None:
    trials = Trials()
    order = []
    for _ in range(4):
        num_steps = 0
        while (level := trials.begin(Level.PLAIN, PROMISES, NUM_RUNNING)) is None:
            steps(trials, Level.PLAIN, 1, 1.0)
            num_steps += 1
        order.append(level)
        steps(trials, level, num_steps_of(level, NUM_RUNNING), 1.0)
        steps(trials, Level.PLAIN, PLAIN_STEPS, 1.0)
        assert num_steps <= MAX_INTERVAL_STEPS
    assert sorted(order[:2]) == sorted(order[2:]) == [Level.FILLERS, Level.MODEL]
    # Nobody who promises a loss is.
    steps(trials, Level.PLAIN, 4 * PLAIN_INTERVAL_STEPS, 1.0)
    assert trials.begin(Level.PLAIN, {Level.FILLERS: 0.99, Level.MODEL: 0.99}, NUM_RUNNING) is None


def test_a_trial_waits_while_others_come_and_go_but_not_for_ever() -> None:
    trials = Trials()
    trials.believed(PROMISES, NUM_RUNNING)
    steps(trials, Level.MODEL, FIRST_INTERVAL_STEPS, 1.2)
    assert trials.begin(Level.MODEL, PROMISES, NUM_RUNNING) is Level.PLAIN
    before = trials.believed(PROMISES, NUM_RUNNING)
    waits = 6 * (PLAIN_STEPS + num_steps_of(Level.MODEL, NUM_RUNNING))
    # Half as many sessions, and steps that show nothing.
    turned = [trials.observe(Level.PLAIN, NUM_RUNNING // 2, 1.0, 0.1) for _ in range(waits // 2)]
    turned += [trials.pass_by() for _ in range(waits // 2)]
    assert turned == [False] * (waits - 1) + [True]
    assert trials.running is None and trials.tried is None
    assert trials.believed(PROMISES, NUM_RUNNING) == before
    assert not trials.pass_by()


def test_old_trials_count_for_less_and_steps_at_work_make_none_stale() -> None:
    trials = Trials()
    for _ in range(12):
        tried(trials, gain=1.5)
    kept = trials._of(Level.MODEL, NUM_RUNNING)
    assert kept.weight == pytest.approx(8.0)
    tried(trials, gain=0.75)
    assert kept.error == pytest.approx(math.log(0.5) / 8)
    believed = trials.believed(PROMISES, NUM_RUNNING)
    steps(trials, Level.MODEL, 3000, 1.2)
    assert trials.believed(PROMISES, NUM_RUNNING) == believed


def test_sessions_that_come_and_go_are_each_counted_for_what_it_had() -> None:
    trials = Trials()
    trials.believed(PROMISES, NUM_RUNNING)
    steps(trials, Level.MODEL, FIRST_INTERVAL_STEPS, 1.2)
    assert trials.begin(Level.MODEL, PROMISES, NUM_RUNNING) is Level.PLAIN
    steps(trials, Level.PLAIN, PLAIN_STEPS, 1.0, NUM_RUNNING - 2)
    trial = trials.running
    steps(trials, Level.MODEL, num_steps_of(Level.MODEL, NUM_RUNNING), 1.2, NUM_RUNNING + 2)
    assert trial is not None and trial.gain == pytest.approx(1.2)


def test_a_trial_needs_steps_before_it_with_as_many_sessions() -> None:
    trials = Trials()
    for num_running in (NUM_RUNNING, 2 * NUM_RUNNING):
        trials.believed(PROMISES, num_running)
    steps(trials, Level.MODEL, FIRST_INTERVAL_STEPS, 1.2)
    assert trials.begin(Level.MODEL, PROMISES, 2 * NUM_RUNNING) is None
    trials.abandon()
    size = num_steps_of(Level.MODEL, NUM_RUNNING)
    begun = []
    for _ in range(size):
        begun.append(trials.begin(Level.MODEL, PROMISES, NUM_RUNNING))
        steps(trials, Level.MODEL, 1, 1.2)
    assert begun == [None] * size
    assert trials.begin(Level.MODEL, PROMISES, NUM_RUNNING) is Level.PLAIN


# What all decide from it


@pytest.mark.parametrize(
    ("now", "filler", "model", "level"),
    [
        (None, 1.0, 1.079, Level.FILLERS),
        (None, 1.0, 1.08, Level.MODEL),
        (Level.MODEL, 1.0, 1.03, Level.MODEL),
        (Level.MODEL, 1.0, 1.029, Level.FILLERS),
        (Level.MODEL, 0.99, 1.029, Level.PLAIN),
        (Level.MODEL, 1.2, 1.17, Level.MODEL),
        (Level.MODEL, 1.21, 1.17, Level.FILLERS),
        (Level.FILLERS, 1.2, 1.23, Level.FILLERS),
        (Level.FILLERS, 1.2, 1.24, Level.MODEL),
        (Level.FILLERS, 0.99, 1.07, Level.PLAIN),
        (Level.PLAIN, 1.029, 1.07, Level.PLAIN),
        (Level.PLAIN, 1.03, 1.07, Level.FILLERS),
        (Level.PLAIN, 1.0, 1.08, Level.MODEL),
    ],
)
def test_what_is_at_work_is_left_only_for_what_brings_a_little_more(
    now: Level | None, filler: float, model: float, level: Level
) -> None:
    believed = {Level.FILLERS: filler, Level.MODEL: model}
    assert Together(level=now)._choose(believed) is level


def test_a_decision_turns_begins_trials_and_ends_those_of_other_numbers() -> None:
    together = Together()
    on = sessions_of(NUM_RUNNING, Plan(3))
    together.decide(1.5, NUM_RUNNING)
    kept = together.trials._of(Level.MODEL, NUM_RUNNING)
    kept.interval = 4096
    together.decide(0.9, NUM_RUNNING)
    assert together.level is Level.FILLERS
    together.decide(1.5, NUM_RUNNING)
    # It is seen soon what it brings now.
    assert kept.interval == 0
    for _ in range(2 + FIRST_INTERVAL_STEPS):
        step_of(together, on, 0.1, 12, is_drafted=True)
    num_turns = together.num_turns
    together.decide(1.5, NUM_RUNNING)
    assert together.is_trying_plain and together.num_turns == num_turns + 1
    for _ in range(2 + PLAIN_STEPS):
        assert together.is_trying_plain
        step_of(together, on, 0.1, NUM_RUNNING, is_drafted=False)
    assert not together.is_trying_plain and not together.is_due(NUM_RUNNING)
    for _ in range(2 + num_steps_of(Level.MODEL, NUM_RUNNING)):
        assert not together.is_due(NUM_RUNNING)
        together.take_mean(on[0])
        step_of(together, on, 0.1, 12, is_drafted=True)
    # What was tried is weighed at once.
    assert together.is_due(NUM_RUNNING)
    together.trials.running = Trial(
        Level.MODEL, Level.PLAIN, 1.5, Window(8), Window(8), Window(8), num_left=9
    )
    together.decide(1.5, NUM_RUNNING // 2)
    assert together.trials.running is None


def test_steps_with_fillers_have_no_plan_with_the_model() -> None:
    together = Together(level=Level.FILLERS)
    mixed = [*sessions_of(3, OFF), *sessions_of(1, Plan(3))]
    step_of(together, mixed, 0.1, 4, is_drafted=True)
    assert together.trials._num_steps == 0
    step_of(together, mixed[:3], 0.1, 4, is_drafted=True)
    assert together.trials._num_steps == 1


def test_what_is_promised_of_many_is_of_plans_that_many_may_be_under() -> None:
    policy = Policy(speculation_config(overlap="serial"))
    for rows in (1, 4, 32, 256):
        policy.measured.target.add(rows, 0.020, is_overlapped=False)
    policy.measured.observe_proposals([4], 4 * 0.0005, 0.0)
    pacing = policy.pace(request())
    pacing.draft_is_judge = False
    for _ in range(200):
        pacing.acceptance.add(1, 1)
    plain = policy.measured.plain_goodput(1)
    for num_running, longest in ((3, 16), (4, 7)):
        gain = policy._prospects.gain(pacing, num_running)
        assert gain == pytest.approx(policy.goodput(Plan(longest), pacing, num_running) / plain)


def step_of(
    together: Together,
    sessions: list[Pacing],
    seconds: float | None,
    num_tokens: int,
    *,
    is_drafted: bool,
    is_reading: bool = False,
) -> None:
    for pacing in sessions:
        together.add(pacing, is_drafted=is_drafted)
    together.end_step(
        seconds,
        is_reading=is_reading,
        num_sessions=len(sessions),
        num_running=len(sessions),
        num_tokens=num_tokens,
    )


def sessions_of(num_running: int, plan: Plan) -> list[Pacing]:
    policy = Policy(speculation_config())
    sessions = [policy.pace(request(f"r{index}")) for index in range(num_running)]
    for pacing in sessions:
        pacing.plan = plan
    return sessions


@pytest.mark.parametrize("num_running", [1, 8, 64])
@pytest.mark.parametrize(
    ("promised", "model", "filler"),
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
    promised: float, model: float, filler: float, num_running: int
) -> None:
    """A machine whose own speed wanders by a third; tokens of a round with drafts are left to chance."""
    chance = random.Random(f"{promised} {model} {filler} {num_running}")
    gains = {Level.PLAIN: 1.0, Level.FILLERS: filler, Level.MODEL: model}
    together = Together()
    tokens, best = [0.0, 0.0], [0.0, 0.0]
    num_first, num_steps = 1200, 6000
    on, off = sessions_of(num_running, Plan(3)), sessions_of(num_running, OFF)
    for step in range(num_steps):
        if together.is_due(num_running):
            together.take_mean(off[0])
            together.decide(promised, num_running)
        level = together.trials.tried
        level = together.level if level is None else level
        assert level is not None
        sessions = on if together.is_on else off
        pace = 1 + 0.3 * math.sin(step / 300) + chance.uniform(-0.05, 0.05)
        per_round = 1.0 if level is Level.PLAIN else 2.0
        num_tokens = sum(chance.choice((0.5, 1.5)) * per_round for _ in range(num_running))
        num_tokens = num_running if level is Level.PLAIN else num_tokens
        took = pace * per_round / gains[level]
        step_of(together, sessions, took, num_tokens, is_drafted=level > Level.PLAIN)
        is_late = step >= num_first
        tokens[is_late] += num_tokens / num_running
        best[is_late] += took / pace * max(gains.values())
    assert tokens[True] > 0.975 * best[True]
    # What is not known yet must be seen first.
    assert sum(tokens) > 0.94 * sum(best)


def test_steps_that_show_nothing_are_passed_by() -> None:
    together = Together()
    on, off = sessions_of(4, Plan(3)), sessions_of(4, OFF)
    together.decide(1.5, 4)
    assert together.level is Level.MODEL

    def seen(sessions: list[Pacing], seconds: float | None = 0.1, **options: bool) -> bool:
        before = together.trials._num_steps
        step_of(together, sessions, seconds, 8, **({"is_drafted": True} | options))
        return together.trials._num_steps > before

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
    on[0].is_probing = True
    assert not seen(on)


def test_plain_steps_have_no_draft_tokens_and_no_reading() -> None:
    together = Together(level=Level.PLAIN)
    off = sessions_of(4, OFF)

    def seen(**options: bool) -> bool:
        before = together.trials._num_steps
        step_of(together, off, 0.1, 4, **({"is_drafted": False} | options))
        return together.trials._num_steps > before

    assert seen()
    assert not seen(is_drafted=True)
    assert not seen(is_reading=True)
    assert together.is_plain and together.is_on is False


def test_plans_stand_while_none_is_tried_and_are_chosen_anew_when_the_model_is() -> None:
    together = Together()
    together.decide(1.5, 8)
    num_turns = together.num_turns
    together.trials.running = Trial(
        Level.MODEL, Level.PLAIN, 1.5, Window(8), Window(8), Window(8), num_left=9
    )
    assert together.is_on and together.is_plain and together.is_trying_plain
    # Nothing is decided meanwhile, unless about half as many run.
    together._num_rounds = 10_000
    assert not together.is_due(8)
    assert together.is_due(4)
    together.level = Level.PLAIN
    together.trials.running = Trial(
        Level.PLAIN, Level.MODEL, 1.5, Window(8), Window(8), Window(8), num_left=9
    )
    assert together.is_on and not together.is_plain and not together.is_trying_plain
    assert together.num_turns == num_turns


def test_without_the_model_decisions_become_rare_until_a_session_has_tried_it() -> None:
    together = Together()
    (pacing,) = sessions_of(1, OFF)
    lengths = []
    for _ in range(5):
        together.decide(0.5, 1)
        num_rounds = 0
        while not together.is_due(1):
            together.add(pacing)
            num_rounds += 1
        together.take_mean(pacing)
        lengths.append(num_rounds)
    assert lengths == [FIRST_REVIEW_STEPS, 16, 64, OFF_REVIEW_STEPS, OFF_REVIEW_STEPS]
    together.decide(0.5, 1)
    for _ in range(20):
        together.add(pacing)
    assert not together.is_due(1)
    pacing.is_probing = True
    together.add(pacing)
    assert together.is_due(1)


def test_a_trial_does_not_wait_for_a_decision_that_is_far_away() -> None:
    together = Together()
    off = sessions_of(NUM_RUNNING, OFF)
    for _ in range(4):
        # Decisions are for 4, 16, 64 and 128 steps.
        together.decide(0.5, NUM_RUNNING)
    assert together.level is Level.FILLERS
    num_steps = 0
    while not together.is_due(NUM_RUNNING):
        step_of(together, off, 0.1, NUM_RUNNING, is_drafted=True)
        num_steps += 1
    assert num_steps == 2 + FIRST_INTERVAL_STEPS
    together.take_mean(off[0])
    together.decide(0.5, NUM_RUNNING)
    assert together.is_trying_plain and not together.is_due(NUM_RUNNING)
    # With others beside them they are not as many as the trial would be of.
    other = Together()
    other.decide(0.5, NUM_RUNNING)
    for _ in range(FIRST_INTERVAL_STEPS + 2):
        other.take_mean(off[0])
        step_of(other, off, 0.1, NUM_RUNNING, is_drafted=True)
    assert other.is_due(NUM_RUNNING)
    other.decide(0.5, 2 * NUM_RUNNING - 1)
    step_of(other, off, 0.1, NUM_RUNNING, is_drafted=True)
    assert not other.is_due(2 * NUM_RUNNING - 1)


# What the router does then


def test_where_all_decode_plainly_nobody_has_fillers_but_who_asked_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Together, "is_plain", property(lambda self: True))
    # It goes round in a circle, and so does what is looked up.
    circle = ToyModel(vocab_size=8, context_len=1)

    target = FakeTarget(circle, info=fake_info("target", vocab_size=64))

    def no_draft(number: int) -> Drafter:
        raise EngineLostError("no draft")

    async def num_rounds(make_drafter: Any = None, **speculation: DraftKind) -> float:
        options: dict[str, Any] = {"make_drafter": make_drafter, "filler": "ngram", "overlap": "serial"}
        async with serving(clock, target=target, num_speculative_tokens="auto", **options) as pair:
            wanted = SpeculationParams(**speculation)
            given = request("a", max_tokens=60, speculation=wanted)
            output = await pair.router.complete(given)
            assert output.token_ids == circle.generate(given.prompt_token_ids, 60, 0)
            return pair.counted("specray_rounds_total")

    clock = VirtualClock()
    # With the draft model there are its tokens alone; here it is asked next to nothing.
    monkeypatch.setattr(Policy, "plan", lambda *_, **__: OFF)
    assert clock.run(num_rounds()) == 60
    monkeypatch.undo()
    monkeypatch.setattr(Together, "is_plain", property(lambda self: True))
    clock = VirtualClock()
    assert clock.run(num_rounds(draft=DraftKind.NGRAM)) < 15
    # Without a draft nothing is decided, and nothing tried.
    clock = VirtualClock()
    assert clock.run(num_rounds(no_draft)) < 15


def test_a_session_with_a_filler_is_one_with_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    add = Together.add

    def noted(self: Together, pacing: Pacing, *, is_drafted: bool = False) -> None:
        seen.append(is_drafted)
        add(self, pacing, is_drafted=is_drafted)

    monkeypatch.setattr(Together, "add", noted)
    circle = ToyModel(vocab_size=8, context_len=1)
    target = FakeTarget(circle, info=fake_info("target", vocab_size=64))
    clock = VirtualClock()

    async def main() -> tuple[float, float]:
        async with serving(clock, target=target, filler="ngram", overlap="serial") as pair:
            await pair.router.complete(request("a", max_tokens=60))
            names = ("specray_spec_decode_num_drafts_by_source_total",)
            return tuple(
                sum(pair.counted(name, source=source) for name in names) for source in ("filler", "model")
            )

    num_filled, num_modelled = clock.run(main())
    assert num_filled > 0
    # The first round has no plan yet, and takes no part.
    assert num_filled + num_modelled - 1 <= sum(seen) <= num_filled + num_modelled


@pytest.mark.parametrize("overlap", ["serial", "enumerate"])
def test_while_plain_decoding_is_tried_nothing_is_asked_of_the_draft_but_for_a_fixed_k(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Together, "is_trying_plain", property(lambda self: True))

    async def draft_steps(wanted: SpeculationParams) -> int:
        async with serving(clock, overlap=overlap) as pair:
            given = request("a", max_tokens=30, speculation=wanted)
            assert (await pair.router.complete(given)).token_ids == expected(given)
            return pair.draft.num_steps

    clock = VirtualClock()
    assert clock.run(draft_steps(SpeculationParams())) == 0
    clock = VirtualClock()
    assert clock.run(draft_steps(SpeculationParams(num_speculative_tokens=2))) > 10


def test_a_trial_does_not_wait_for_a_session_that_came_meanwhile_to_end() -> None:
    """A session at a time: plain decoding is tried while one ends and the next, which is long, begins."""
    clock = VirtualClock()

    async def main() -> float:
        draft = fake_draft(PerfectGuesser(MODEL))
        async with serving(clock, draft=draft, overlap="serial") as pair:
            together = pair.router._policy.together
            lengths = iter(range(40, 400))
            while not together.is_trying_plain:
                await pair.router.complete(request("short", max_tokens=next(lengths)))
            before = pair.counted("specray_rounds_total")
            await pair.router.complete(request("long", max_tokens=300))
            assert not together.is_trying_plain
            return pair.counted("specray_rounds_total") - before

    # The rest of the trial and its unsettled steps, then three tokens and more a round.
    assert clock.run(main()) < PLAIN_STEPS + 2 + 100


def test_a_steps_tokens_and_time_are_those_since_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[float | None, bool, int, int, int]] = []

    def end_step(self: Together, seconds: float | None, **step: int) -> None:
        seen.append((seconds, bool(step["is_reading"]), *list(step.values())[1:]))

    monkeypatch.setattr(Together, "end_step", end_step)
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

    def end_step(self: Together, seconds: float | None, *, is_reading: bool, **_: int) -> None:
        seen.append((seconds is None, is_reading))

    monkeypatch.setattr(Together, "end_step", end_step)
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
