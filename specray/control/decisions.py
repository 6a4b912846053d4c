"""Tells metrics and trace what all sessions decided together, and what trials of it showed."""

from __future__ import annotations

from specray.control.experiments import Level, Trial
from specray.metrics.router import RouterMetrics
from specray.router.trace import Trace


class Decisions:
    """Where decisions of all sessions are told.

    Args:
        metrics: None: none are kept.
        trace: None: nobody is told of single ones.
    """

    def __init__(self, metrics: RouterMetrics | None = None, trace: Trace | None = None) -> None:
        self._metrics = metrics
        self._trace = trace

    def decided(
        self, level: Level, tried: Level | None, *, promised: float, believed: float, num_running: int
    ) -> None:
        """All decided anew, for the same or for another level.

        Args:
            level: for which they did.
            tried: instead of it, for a few steps; None: nothing.
            promised: tokens per second with the model, as a multiple of plain decoding.
            believed: of that, after what trials have shown.
            num_running: sessions, >= 1.
        """
        if self._metrics is not None:
            self._metrics.observe_decision(name_of(level), level, promised=promised, believed=believed)
        if self._trace is not None:
            self._trace.decided(
                level=name_of(level),
                tried=None if tried is None else name_of(tried),
                promised=promised,
                believed=believed,
                num_running=num_running,
            )

    def trial_ended(self, trial: Trial, gain: float | None) -> None:
        """``gain``: of the level that speculates over the other; None: given up, it showed nothing."""
        if self._metrics is not None:
            self._metrics.observe_trial(name_of(trial.level), gain)
        if self._trace is not None:
            self._trace.trial_ended(
                level=name_of(trial.base),
                tried=name_of(trial.level),
                contender=name_of(trial.contender),
                promised=trial.promised,
                gain=gain,
            )


def name_of(level: Level) -> str:
    """As labels and traces have it: plain, fillers or model."""
    return level.name.lower()
