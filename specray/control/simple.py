"""The simple control, an alternative to measured plans: one K, early ends, and one on/off experiment.

``speculation.control: simple`` selects it, so that ``specray bench overlap`` can compare both. All sessions
speculate with the same K and the same bound below which the draft ends a proposal. Nothing is predicted but
one prior speedup; A/B experiments of plain decoding against speculation calibrate it and so switch
speculation on and off. No session explores on its own, and the n-gram fallback alone is no mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specray.control.goodput import MAX_SHARED_K, WIDTHS, GoodputModel
from specray.control.state import OFF, Plan, SessionStats

SIMPLE_K = MAX_SHARED_K
"""K of every session: eight rows with the last committed token."""
SIMPLE_MIN_ACCEPTANCE = 0.4
"""``Plan.min_acceptance`` of every proposal: a draft step of an eighth of a target step breaks even at about
0.4 where a round commits three tokens."""
PRIOR_SPEEDUP = 1.2
"""Speedup over plain decoding before an experiment: enough to switch speculation on."""


class SimpleModel(GoodputModel):
    """Answers a controller's questions about plans without comparing them."""

    def plans(self, stats: SessionStats) -> list[Plan]:
        """OFF and the plan; with a fixed K as measured control has them."""
        if stats.fixed_k is not None:
            return super().plans(stats)
        return [OFF, Plan(SIMPLE_K, self._overlaps[0], WIDTHS[-1])]

    def best(self, plans: Sequence[Plan], stats: SessionStats, num_running: int) -> Plan:
        """The last plan: experiments decide whether it is used."""
        return plans[-1]

    def speedup(self, stats: SessionStats, num_running: int) -> float | None:
        """The prior; experiments calibrate it."""
        return PRIOR_SPEEDUP

    def best_for_all(self, sessions: Sequence[SessionStats], num_running: int, current: Plan | None) -> Plan:
        """The plan of each session alone."""
        return self.plans(sessions[0])[-1]

    def share_of(self, plan: Plan, stats: SessionStats, num_running: int) -> Plan:
        """All of the plan."""
        return self.with_bound(plan, stats, num_running)

    def with_bound(self, plan: Plan, stats: SessionStats, num_running: int) -> Plan:
        """The plan with the bound, where the draft can keep one."""
        if plan.is_off or not self._is_bounded(plan.overlap, stats):
            return plan
        return replace(plan, min_acceptance=SIMPLE_MIN_ACCEPTANCE)
