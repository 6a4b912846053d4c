"""What all sessions decide together, and what trials of it showed, stand in metrics and in the trace."""

from __future__ import annotations

import asyncio

import pytest

from specray.control.decisions import Decisions
from specray.control.experiments import FIRST_INTERVAL_STEPS, PLAIN_STEPS, Level, Trials, num_steps_of
from specray.control.mode import Together
from specray.fakes import NoisyGuesser, VirtualClock
from specray.metrics.router import RouterMetrics
from specray.router.trace import Decided, Trace, TrialEnded, decode_trace
from tests.unit.router.harness import expected, fake_draft, fake_target, request, router_config, run, serving

NUM_RUNNING = 8
DECISIONS, TRIALS = "specray_speculation_decisions_total", "specray_speculation_trials_total"
LEVEL, GAIN = "specray_speculation_level", "specray_speculation_gain"


class Told:
    """What all decide, with metrics and a trace that hear of it."""

    def __init__(self) -> None:
        self.metrics, self.trace = RouterMetrics(), Trace(VirtualClock(), 100)
        decisions = Decisions(self.metrics, self.trace)
        self.together = Together(trials=Trials(decisions.trial_ended), decisions=decisions)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.value(name, tuple(labels.items()))

    def gains(self) -> list[float]:
        return [self.value(GAIN, kind=kind) for kind in ("promised", "believed", "seen")]

    def steps(self, level: Level, count: int, tokens_per_s: float) -> None:
        """Of a tenth of a second each, in which all sessions worked at that level."""
        for _ in range(count):
            self.together.trials.observe(level, NUM_RUNNING, 0.1 * tokens_per_s * NUM_RUNNING, 0.1)

    def begin_trial(self) -> None:
        """Of plain decoding, beside the model."""
        self.together.decide(1.5, NUM_RUNNING)
        self.steps(Level.MODEL, FIRST_INTERVAL_STEPS, 1.2)
        self.together.decide(1.5, NUM_RUNNING)
        assert self.together.is_trying_plain


def test_each_decision_is_told_with_what_it_is_made_of() -> None:
    told = Told()
    told.together.decide(1.5, NUM_RUNNING)
    assert (told.value(LEVEL), told.gains()) == (2.0, [1.5, 1.5, 0.0])
    told.together.decide(0.5, 3)
    assert (told.value(LEVEL), told.gains()) == (1.0, [0.5, 0.5, 0.0])
    assert [told.value(DECISIONS, level=level) for level in ("model", "fillers")] == [1.0, 1.0]
    assert told.trace.events == [
        Decided(0, "model", None, 1.5, 1.5, NUM_RUNNING),
        Decided(0, "fillers", None, 0.5, 0.5, 3),
    ]


def test_a_trial_is_told_when_it_begins_and_with_the_gain_that_it_showed() -> None:
    told = Told()
    told.begin_trial()
    told.steps(Level.PLAIN, PLAIN_STEPS, 1.0)
    assert told.trace.events[1:] == [Decided(0, "model", "plain", 1.5, 1.5, NUM_RUNNING)]
    told.steps(Level.MODEL, num_steps_of(Level.MODEL, NUM_RUNNING), 1.2)
    told.together.decide(1.5, NUM_RUNNING)
    believed = 1.5 * (1.2 / 1.5) ** (1 / 1.25)
    assert told.trace.events[2:] == [
        TrialEnded(0, "model", "plain", "model", 1.5, pytest.approx(1.2)),
        Decided(0, "model", None, 1.5, pytest.approx(believed), NUM_RUNNING),
    ]
    assert told.value(TRIALS, tried="plain", result="measured") == 1.0
    assert told.gains() == pytest.approx([1.5, believed, 1.2])


def test_a_trial_that_is_given_up_is_told_without_a_gain() -> None:
    told = Told()
    told.begin_trial()
    told.steps(Level.PLAIN, 3, 1.0)
    # So few sessions show nothing of so many.
    told.together.decide(1.5, 1)
    assert told.trace.events[2:] == [
        TrialEnded(0, "model", "plain", "model", 1.5, None),
        Decided(0, "model", None, 1.5, 1.5, 1),
    ]
    assert told.value(TRIALS, tried="plain", result="given_up") == 1.0
    assert told.gains() == [1.5, 1.5, 0.0]


def test_a_router_tells_metrics_and_trace_the_same() -> None:
    clock = VirtualClock()

    async def main() -> None:
        target = fake_target()
        draft = fake_draft(NoisyGuesser(target.model, 0.6))
        config = router_config(trace_events=100_000)
        async with serving(
            clock, target=target, draft=draft, config=config, overlap="serial", filler="ngram"
        ) as pair:
            given = [request(f"r{index}", max_tokens=300) for index in range(NUM_RUNNING)]
            outputs = await asyncio.gather(*(pair.router.complete(one) for one in given))
            assert [output.token_ids for output in outputs] == [expected(one) for one in given]
            events = decode_trace(await pair.router.trace_text() or "")
            decided = [event for event in events if isinstance(event, Decided)]
            ended = [event for event in events if isinstance(event, TrialEnded)]
            assert {event.level for event in decided} >= {"model"} and ended
            for level in ("plain", "fillers", "model"):
                assert pair.counted(DECISIONS, level=level) == sum(event.level == level for event in decided)
            assert pair.counted(TRIALS, tried="plain", result="measured") == sum(
                event.tried == "plain" and event.gain is not None for event in ended
            )
            assert pair.counted(LEVEL) == Level[decided[-1].level.upper()]
            assert pair.counted(GAIN, kind="promised") == decided[-1].promised
            assert pair.counted(GAIN, kind="believed") == decided[-1].believed
            seen = [event.gain for event in ended if event.gain is not None]
            assert pair.counted(GAIN, kind="seen") == seen[-1]

    run(clock, main())
