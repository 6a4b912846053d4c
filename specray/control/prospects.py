"""What plans promise a session: tokens per second, predicted from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from specray.config import SpeculationConfig
from specray.control.cost_model import Measured
from specray.control.expected import Round, expected_drafts, expected_tokens
from specray.control.mode import MIN_GAIN, mean_of
from specray.control.state import OFF, Pacing, Plan
from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind, Overlap

AUTO_K = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""What ``num_speculative_tokens: auto`` chooses from, besides 0 and ANY_K."""
ANY_K = MAX_SPECULATIVE_TOKENS
"""Under auto, the draft alone ends its proposals."""
FIRST_K = 3
MAX_ACCEPTANCE = 0.99
"""Believed at most: a session that has accepted everything so far need not go on so."""
MAX_BOUND = 0.9
"""Of what a draft must believe: it is never so sure that it should propose nothing further."""
HYSTERESIS = 1.05
"""A plan is left only for one that promises so much more."""
MAX_SHARED_K, MANY_SESSIONS = 7, 4
"""Longer proposals are for few sessions. Of many, some accept next to nothing and are the last to end: they
need as many rounds as ever, and each of these is longer for the others' proposals. And attention works on
sixteen queries at a time, which are eight rows of two heads that share their keys: nine rows of each of 32
sequences take a fifth more than eight (``bench forwards --num-sequences 32 --rows 8 --rows 9``)."""
LONGER_GAIN = 1.03
"""All take longer proposals only for one that promises so much more: who accepts little waits for them."""
WIDTHS = (3, 2, 1)
"""Of enumeration; the first plan of all, before anything is measured, is the last."""
MAX_BRANCH_ROWS = 96
"""Branches of all sessions together; a small draft becomes compute-bound beyond about a hundred rows."""


class Prospects:
    """Plans and their goodput. Keeps nothing; what is measured belongs to the policy.

    Args:
        config: the ``speculation`` section.
        source: what drafts under the plans.
        measured: what predictions are made from.
    """

    def __init__(self, config: SpeculationConfig, source: str, measured: Measured) -> None:
        auto = config.overlap == "auto"
        self._overlaps = tuple(Overlap) if auto else (Overlap(config.overlap),)
        self._is_model = source == DraftKind.MODEL.value
        self._measured = measured

    def plans(self, pacing: Pacing) -> list[Plan]:
        """All that the session may do, OFF first where it may go without."""
        fixed_k = pacing.fixed_k
        ks = AUTO_K if fixed_k is None else (fixed_k,)
        plans = [
            Plan(k, overlap, width)
            for overlap in self._overlaps
            for width in (WIDTHS if overlap is Overlap.ENUMERATE else (1,))
            for k in ks
        ]
        if fixed_k is not None:
            return plans
        can_end = Overlap.SERIAL in self._overlaps and self._is_bounded(Overlap.SERIAL, pacing)
        return [OFF, *([Plan(ANY_K)] if can_end else []), *plans]

    def best(self, plans: Sequence[Plan], pacing: Pacing, num_running: int) -> Plan:
        """The plan that promises most; OFF when others promise little more."""
        if self._measured.verify_s(num_running, num_running) is None:
            first = [plan for plan in plans if plan.num_speculative_tokens == FIRST_K] or plans
            return first[-1]
        return max(
            plans,
            key=lambda plan: self.goodput(plan, pacing, num_running) * (MIN_GAIN if plan.is_off else 1.0),
        )

    def gain(self, pacing: Pacing, num_running: int) -> float | None:
        """What the best plan promises, as a multiple of plain decoding; None: nothing was measured."""
        if self._measured.verify_s(num_running, num_running) is None:
            return None
        plans = self._shared(pacing, num_running)
        most = max(self.goodput(plan, pacing, num_running) for plan in plans)
        return most / self._measured.plain_goodput(num_running)

    def _shared(self, pacing: Pacing, num_running: int) -> list[Plan]:
        """What sessions that share steps may be under."""
        most = MAX_SHARED_K if num_running >= MANY_SESSIONS else ANY_K
        return [plan for plan in self.plans(pacing) if 0 < plan.num_speculative_tokens <= most]

    def goodput(self, plan: Plan, pacing: Pacing, num_running: int) -> float:
        """Predicted tokens per second of one session under ``plan``, as all others are under it too."""
        k, acceptance = plan.num_speculative_tokens, min(pacing.acceptance.value, MAX_ACCEPTANCE)
        if plan.is_off:
            return self._measured.plain_goodput(num_running)
        if not self._is_model:
            return self._measured.lone_goodput(k, acceptance, num_running)
        if plan.overlap is Overlap.SERIAL:
            return self._measured.serial_goodput(k, [self._round(k, pacing)], num_running)
        num_branches = num_running
        if plan.overlap is Overlap.ENUMERATE:
            num_branches *= max_branches(plan, k, num_running=num_running)
        return self._measured.overlapped_goodput(plan, acceptance, num_branches, num_running)

    def best_for_all(self, sessions: Sequence[Pacing], num_running: int, current: Plan | None) -> Plan:
        """The plan under which sessions that share steps come furthest together.

        What is best for one may not be: all wait for the longest proposal.

        Args:
            sessions: some, which stand for all; at least one.
            current: theirs until now, which is left only for one that promises more than a little more.
        """
        plans = self._shared(mean_of(sessions), num_running)
        promised = {plan: self._joint_goodput(plan, sessions, num_running) for plan in plans}
        highest = max(promised.values())
        if current in promised and highest <= HYSTERESIS * promised[current]:
            return current
        nearly = [plan for plan in plans if promised[plan] >= highest / LONGER_GAIN]
        return min(nearly, key=lambda plan: (plan.num_speculative_tokens, -promised[plan]))

    def part_of(self, plan: Plan, pacing: Pacing, num_running: int) -> Plan:
        """What a session does of a plan that is for all: no more than is worth its rows.

        Further steps of the draft are taken for others anyway.
        """
        if plan.is_off or self._is_bounded(plan.overlap, pacing):
            return self.with_bound(plan, pacing, num_running)
        acceptance = min(pacing.acceptance.value, MAX_ACCEPTANCE)
        most = min(plan.num_speculative_tokens, AUTO_K[-1])
        worth = self._worth(replace(plan, num_speculative_tokens=most), pacing, num_running)
        num_worthy = next((k for k in range(1, most) if acceptance ** (k + 1) < worth), most)
        return replace(plan, num_speculative_tokens=num_worthy)

    def with_bound(self, plan: Plan, pacing: Pacing, num_running: int) -> Plan:
        """The plan, with what a draft token must promise: as much as its row and draft step could bring."""
        if plan.is_off or not self._is_bounded(plan.overlap, pacing):
            return plan
        return replace(plan, min_acceptance=round(min(MAX_BOUND, self._worth(plan, pacing, num_running)), 3))

    def _worth(self, plan: Plan, pacing: Pacing, num_running: int) -> float:
        """With what probability a draft token must come to be worth its row and its draft step.

        With g tokens per second of all sessions, one that comes with probability p is worth p / g.
        """
        if plan.num_speculative_tokens == ANY_K:
            num_drafts = pacing.judged.num_drafts.value
        else:
            num_drafts = expected_drafts(plan.num_speculative_tokens, self._goes_on(pacing))
        # What rows cost on average, of one's own: a step's time bends where rows are no longer hidden by its
        # weights, and a proposal has rows on both sides. Those of many sessions are beyond the bend, but for
        # the first ones, which nobody leaves out.
        num_more = max(1, round(num_running * num_drafts))
        first = num_more // 2 if num_running >= MANY_SESSIONS else 0
        plain, fewer, more = (
            self._measured.verify_s(num_running + rows, num_running) or 0.0 for rows in (0, first, num_more)
        )
        row_s = max(0.0, more - fewer) / (num_more - first)
        return (
            num_running * self.goodput(plan, pacing, num_running) * (row_s + self._line_s(num_running, plain))
        )

    def _line_s(self, num_running: int, verify_s: float) -> float:
        """What a draft token costs the draft.

        A step is taken for whoever goes on: of many proposals several are as long as the longest, so that one
        which ends a token earlier leaves out its part of a step and no step.
        """
        alone, together = (self._measured.draft_step_s(count, verify_s) for count in (1, num_running))
        part_s = 0.0 if num_running == 1 else max(0.0, together - alone) / (num_running - 1)
        return part_s + max(0.0, alone - part_s) / num_running**2

    def _joint_goodput(self, plan: Plan, sessions: Sequence[Pacing], num_running: int) -> float:
        """Predicted tokens per second of a session, on average, as all are under the plan."""
        if plan.overlap is not Overlap.SERIAL or not self._is_model:
            return fmean(self.goodput(plan, pacing, num_running) for pacing in sessions)
        k = plan.num_speculative_tokens
        return self._measured.serial_goodput(k, [self._round(k, pacing) for pacing in sessions], num_running)

    def _round(self, k: int, pacing: Pacing) -> Round:
        """Of a session that drafts first."""
        acceptance = min(pacing.acceptance.value, MAX_ACCEPTANCE)
        if k == ANY_K and self._is_bounded(Overlap.SERIAL, pacing):
            # Of as many tokens as are accepted for each that is not, however long proposals are.
            num_accepted = min(pacing.judged.num_accepted.value, acceptance / (1 - acceptance))
            num_drafts = max(1.0, pacing.judged.num_drafts.value)
            return Round(num_drafts, 1 + num_accepted, 1 - 1 / num_drafts)
        goes_on = self._goes_on(pacing)
        return Round(expected_drafts(k, goes_on), expected_tokens(acceptance, k, goes_on), goes_on)

    def _is_bounded(self, overlap: Overlap, pacing: Pacing) -> bool:
        """The draft may end its proposals early: where K is chosen here, and nothing is drafted ahead."""
        return (
            self._is_model and pacing.draft_is_judge and pacing.fixed_k is None and overlap is Overlap.SERIAL
        )

    def _goes_on(self, pacing: Pacing) -> float:
        is_bounded = self._is_bounded(Overlap.SERIAL, pacing)
        return min(pacing.continuation.value, 1.0) if is_bounded else 1.0


def max_branches(plan: Plan, num_drafts: int, *, num_running: int) -> int:
    """Most branches of one session's outcomes; the draft chooses which. 0: as the fan-out says."""
    if plan.overlap is not Overlap.ENUMERATE:
        return 0
    # A filler may be longer: there are not more outcomes worth a branch, and each costs the draft a row.
    num_drafts = min(num_drafts, plan.num_speculative_tokens)
    return max(1, min(plan.width * (num_drafts + 1), MAX_BRANCH_ROWS // max(1, num_running)))
