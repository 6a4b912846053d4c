"""What all sessions decide together, and what experiments of it showed, stand in metrics and in the trace."""

from __future__ import annotations

import asyncio

import pytest

from specray.control.experiments import FIRST_INTERVAL_STEPS, PLAIN_STEPS, Experiments, num_window_steps
from specray.control.mode import ModeController
from specray.control.state import Mode
from specray.fakes import NoisyGuesser, VirtualClock
from specray.router.observer import ControlObserver
from specray.router.trace import Decided, ExperimentEnded, Trace, decode_trace
from specray.telemetry.metrics import RouterMetrics
from tests.unit.router.harness import expected, fake_draft, fake_target, request, router_config, serving

NUM_RUNNING = 8
DECISIONS, EXPERIMENTS = "specray_speculation_decisions_total", "specray_speculation_experiments_total"
MODE, SPEEDUP = "specray_speculation_mode", "specray_speculation_speedup"


class Told:
    """What all decide, with metrics and a trace that hear of it."""

    def __init__(self) -> None:
        self.metrics, self.trace = RouterMetrics(), Trace(VirtualClock(), 100)
        observer = ControlObserver(self.metrics, self.trace)
        self.modes = ModeController(experiments=Experiments(observer), observer=observer)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.value(name, tuple(labels.items()))

    def speedups(self) -> list[float]:
        return [self.value(SPEEDUP, kind=kind) for kind in ("predicted", "calibrated", "measured")]

    def steps(self, mode: Mode, count: int, tokens_per_s: float) -> None:
        """Of a tenth of a second each, in which all sessions worked at that mode."""
        for _ in range(count):
            self.modes.experiments.observe(mode, NUM_RUNNING, 0.1 * tokens_per_s * NUM_RUNNING, 0.1)

    def begin_experiment(self) -> None:
        """Of plain decoding, beside the model."""
        self.modes.decide(1.5, NUM_RUNNING)
        self.steps(Mode.MODEL, FIRST_INTERVAL_STEPS, 1.2)
        self.modes.decide(1.5, NUM_RUNNING)
        assert self.modes.is_trying_plain


def test_each_decision_is_told_with_what_it_is_made_of() -> None:
    told = Told()
    told.modes.decide(1.5, NUM_RUNNING)
    assert (told.value(MODE), told.speedups()) == (2.0, [1.5, 1.5, 0.0])
    told.modes.decide(0.5, 3)
    assert (told.value(MODE), told.speedups()) == (1.0, [0.5, 0.5, 0.0])
    assert [told.value(DECISIONS, mode=mode) for mode in ("model", "ngram")] == [1.0, 1.0]
    assert told.trace.events == [
        Decided(0, "model", None, 1.5, 1.5, NUM_RUNNING),
        Decided(0, "ngram", None, 0.5, 0.5, 3),
    ]


def test_an_experiment_is_told_when_it_begins_and_with_the_speedup_that_it_showed() -> None:
    told = Told()
    told.begin_experiment()
    told.steps(Mode.PLAIN, PLAIN_STEPS, 1.0)
    assert told.trace.events[1:] == [Decided(0, "model", "plain", 1.5, 1.5, NUM_RUNNING)]
    told.steps(Mode.MODEL, num_window_steps(Mode.MODEL, NUM_RUNNING), 1.2)
    told.modes.decide(1.5, NUM_RUNNING)
    calibrated = 1.5 * (1.2 / 1.5) ** (1 / 1.25)
    assert told.trace.events[2:] == [
        ExperimentEnded(0, "model", "plain", "model", 1.5, pytest.approx(1.2)),
        Decided(0, "model", None, 1.5, pytest.approx(calibrated), NUM_RUNNING),
    ]
    assert told.value(EXPERIMENTS, tried="plain", result="measured") == 1.0
    assert told.speedups() == pytest.approx([1.5, calibrated, 1.2])


def test_an_experiment_that_is_given_up_is_told_without_a_speedup() -> None:
    told = Told()
    told.begin_experiment()
    told.steps(Mode.PLAIN, 3, 1.0)
    # So few sessions show nothing of so many.
    told.modes.decide(1.5, 1)
    assert told.trace.events[2:] == [
        ExperimentEnded(0, "model", "plain", "model", 1.5, None),
        Decided(0, "model", None, 1.5, 1.5, 1),
    ]
    assert told.value(EXPERIMENTS, tried="plain", result="given_up") == 1.0
    assert told.speedups() == [1.5, 1.5, 0.0]


@pytest.mark.slow
async def test_a_router_tells_metrics_and_trace_the_same(clock: VirtualClock) -> None:
    target = fake_target()
    draft = fake_draft(NoisyGuesser(target.model, 0.6))
    config = router_config(trace_events=100_000)
    async with serving(
        clock, target=target, draft=draft, config=config, overlap="serial", fallback="ngram"
    ) as pair:
        given = [request(f"r{index}", max_tokens=300) for index in range(NUM_RUNNING)]
        outputs = await asyncio.gather(*(pair.router.complete(one) for one in given))
        assert [output.token_ids for output in outputs] == [expected(one) for one in given]
        events = decode_trace(await pair.router.trace_text() or "")
        decided = [event for event in events if isinstance(event, Decided)]
        ended = [event for event in events if isinstance(event, ExperimentEnded)]
        assert {event.mode for event in decided} >= {"model"} and ended
        for mode in ("plain", "ngram", "model"):
            assert pair.counted(DECISIONS, mode=mode) == sum(event.mode == mode for event in decided)
        assert pair.counted(EXPERIMENTS, tried="plain", result="measured") == sum(
            event.tried == "plain" and event.measured_speedup is not None for event in ended
        )
        assert pair.counted(MODE) == Mode[decided[-1].mode.upper()]
        assert pair.counted(SPEEDUP, kind="predicted") == decided[-1].predicted_speedup
        assert pair.counted(SPEEDUP, kind="calibrated") == decided[-1].calibrated_speedup
        seen = [event.measured_speedup for event in ended if event.measured_speedup is not None]
        assert pair.counted(SPEEDUP, kind="measured") == seen[-1]
