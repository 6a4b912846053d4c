"""Passes the control's decisions to metrics and trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specray.control.state import Mode, Plan, SessionStats
from specray.router.trace import Trace
from specray.telemetry.metrics import RouterMetrics


class ControlObserver:
    """A router's ``control.state.Observer``."""

    def __init__(self, metrics: RouterMetrics | None = None, trace: Trace | None = None) -> None:
        self._metrics = metrics
        self._trace = trace

    def replanned(
        self,
        stats: SessionStats,
        plan: Plan,
        *,
        source: str,
        num_running: int,
        predict: Callable[[], Mapping[str, float]],
    ) -> None:
        """A session has a new plan; see ``Observer``."""
        if self._trace is not None:
            self._trace.planned(
                stats.request_id,
                source,
                overlap=plan.overlap_label,
                num_speculative_tokens=plan.num_speculative_tokens,
                width=plan.width,
                reason=plan.reason.value,
                num_running=num_running,
                acceptance=stats.acceptance.value,
                tokens_per_s=predict(),
            )

    def decided(
        self,
        mode: Mode,
        tried: Mode | None,
        *,
        predicted_speedup: float,
        calibrated_speedup: float,
        num_running: int,
    ) -> None:
        """All sessions have decided their mode; see ``Observer``."""
        if self._metrics is not None:
            self._metrics.observe_decision(
                mode.label, mode, predicted_speedup=predicted_speedup, calibrated_speedup=calibrated_speedup
            )
        if self._trace is not None:
            self._trace.decided(
                mode=mode.label,
                tried=None if tried is None else tried.label,
                predicted_speedup=predicted_speedup,
                calibrated_speedup=calibrated_speedup,
                num_running=num_running,
            )

    def chose_overlap(
        self, *, is_overlapped: bool, predicted_gain: float, calibrated_gain: float, num_running: int
    ) -> None:
        """It was decided whether engines overlap; see ``Observer``."""
        if self._metrics is not None:
            self._metrics.observe_overlap(is_overlapped)
        if self._trace is not None:
            self._trace.chose_overlap(
                is_overlapped=is_overlapped,
                predicted_gain=predicted_gain,
                calibrated_gain=calibrated_gain,
                num_running=num_running,
            )

    def experiment_ended(
        self,
        *,
        base: Mode,
        tried: Mode,
        speculating: Mode,
        predicted_speedup: float,
        measured_speedup: float | None,
    ) -> None:
        """An A/B experiment has ended; see ``Observer``."""
        if self._metrics is not None:
            self._metrics.observe_experiment(tried.label, measured_speedup)
        if self._trace is not None:
            self._trace.experiment_ended(
                mode=base.label,
                tried=tried.label,
                speculating=speculating.label,
                predicted_speedup=predicted_speedup,
                measured_speedup=measured_speedup,
            )
