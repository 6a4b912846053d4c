"""Predicted tokens per second of each plan, and the plan that follows for a session or for all of them.

With a = acceptance per token, n = running sessions, V = target step by rows and n, D = draft time, R = round
trip to the draft, H = the router's time per proposal, h = hit rate::

    tokens per round   E(a, K) = (1 - a^(K+1)) / (1 - a)                          (Leviathan et al. 2023)
    no speculation     V(n)
    serial             V(n(K+1)) + D(K) + R + H n
    drafts at no cost  V(n+K); only now and then has a session any, so the others have none
    ahead, enumerate   max(V(n(K+1)), D_outcomes(K) + R) + (1 - h)(D(K) + R + H n)      outcomes are pushed

Where the draft may end a proposal early, V has as many rows as proposals have tokens on average, and D as
many steps as the longest proposal; where nothing else ends it, K and E are measured. D_outcomes grows with
the branches, and so does h: the width of the fan-out is part of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, geometric_mean
from typing import Final

from specray.config import SpeculationConfig
from specray.control.cost_model import CostModel
from specray.control.estimators import Rate
from specray.control.expectations import (
    ExpectedRound,
    expected_drafts,
    expected_steps,
    expected_tokens,
    prior_hit_rate,
)
from specray.control.state import OFF, BoundedProposalStats, Plan, SessionStats
from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind, Overlap

AUTO_K = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
"""K of the plans that ``num_speculative_tokens: auto`` compares, besides 0 and ANY_K."""
ANY_K = MAX_SPECULATIVE_TOKENS
"""K of a plan whose proposals only the draft ends."""
MAX_ACCEPTANCE = 0.99
"""Largest acceptance that predictions use: a session that accepted everything so far need not go on so."""
MAX_BOUND = 0.9
"""Largest ``Plan.min_acceptance``: the draft is never so sure that it should propose nothing further."""
MIN_SPEEDUP = 1.08
"""Least speedup over plain decoding at which speculation is switched on: predictions err with the load."""
HYSTERESIS = 1.05
"""Least ratio of goodputs at which a plan is left for another."""
MAX_SHARED_K, MANY_SESSIONS = 7, 4
"""Largest shared K from MANY_SESSIONS sessions on. Some of many sessions accept next to nothing and
end last: they need as many rounds as ever, each longer for the others' proposals. And attention works on
sixteen queries at a time, which are eight rows of two heads that share their keys: nine rows of each of 32
sequences take a fifth more than eight (``bench forwards --num-sequences 32 --rows 8 --rows 9``)."""
LONGER_GAIN = 1.03
"""Least ratio of goodputs at which all sessions take a larger K: sessions that accept little wait for it."""
WIDTHS = (3, 2, 1)
"""Widths of enumeration; the first plan, before anything is measured, has the last."""
MAX_BRANCH_ROWS = 96
"""Largest number of branches of all sessions: a small draft is compute-bound beyond about a hundred rows."""
MIN_SLOWDOWN = 1.04
"""Least ratio of a step with a few more rows to one without: step times are known to about that. With 32
other sessions, draft tokens at no cost cost an eighth of a step that grows to 36 rows, and nothing in a step
that has 40 anyway."""
HANDLING_S: Final = 40e-6
"""Seconds of the router per proposal: to ask, take the answer, send and commit more. With 64 sessions of the
embedded pair, rounds with proposals took 5.7 ms besides both engines' steps and the way to the draft, rounds
without 0.3 (2 cores, ``specray bench overlap``). Chosen, not fitted: with it they came to 0.94 times plain
decoding, with none to 0.84."""
_UNKNOWN_S = 1e-3
"""Seconds of a target step of which nothing is known."""


class GoodputModel:
    """Plans and their goodput. Keeps no state of its own."""

    def __init__(self, config: SpeculationConfig, source: str, cost_model: CostModel) -> None:
        self.overlaps: tuple[Overlap, ...] = (
            (Overlap.SERIAL,) if config.overlap == "auto" else (Overlap(config.overlap),)
        )
        """Overlaps that plans may have; under ``auto``, those of the way that was chosen."""
        self._is_model = source == DraftKind.MODEL.value
        self._ends_for_rows = source == DraftKind.FEATURES.value
        """What drafts ends proposals early, and takes no time but the target's."""
        self._cost = cost_model

    # Plans

    def plans(self, stats: SessionStats, overlaps: Sequence[Overlap] | None = None) -> list[Plan]:
        """Every plan that the session may have, OFF first if it may go without speculation.

        Args:
            overlaps: of the plans; None: those that are allowed.
        """
        overlaps = self.overlaps if overlaps is None else overlaps
        fixed_k = stats.fixed_k
        ks = AUTO_K if fixed_k is None else (fixed_k,)
        plans = [
            Plan(k, overlap, width)
            for overlap in overlaps
            for width in (WIDTHS if overlap is Overlap.ENUMERATE else (1,))
            for k in ks
        ]
        if fixed_k is not None:
            return plans
        can_end = Overlap.SERIAL in overlaps and self._is_bounded(Overlap.SERIAL, stats)
        return [OFF, *([Plan(ANY_K)] if can_end else []), *plans]

    def allows(self, plan: Plan) -> bool:
        return plan.is_off or plan.overlap in self.overlaps

    def by_way(self, stats: SessionStats, num_running: int) -> tuple[float, float]:
        """Predicted tokens per second of the best plan that takes turns, and of the best that overlaps."""
        most = MAX_SHARED_K if num_running >= MANY_SESSIONS and stats.fixed_k is None else ANY_K
        turns, overlapped = (
            max(
                self.goodput(plan, stats, num_running)
                for plan in self.plans(stats, overlaps)
                if 0 < plan.num_speculative_tokens <= most
            )
            for overlaps in ((Overlap.SERIAL,), (Overlap.AHEAD, Overlap.ENUMERATE))
        )
        return turns, overlapped

    def best(self, plans: Sequence[Plan], stats: SessionStats, num_running: int) -> Plan:
        """The plan with the highest goodput; OFF if it gains less than MIN_SPEEDUP."""
        if self._cost.verify_s(num_running, num_running) is None:
            first = [plan for plan in plans if plan.num_speculative_tokens == 3] or plans
            return first[-1]
        return max(
            plans,
            key=lambda plan: self.goodput(plan, stats, num_running) * (MIN_SPEEDUP if plan.is_off else 1.0),
        )

    def speedup(self, stats: SessionStats, num_running: int) -> float | None:
        """Predicted speedup of the best shared plan over plain decoding; None: nothing was measured."""
        if self._cost.verify_s(num_running, num_running) is None:
            return None
        plans = self._shared(stats, num_running)
        most = max(self.goodput(plan, stats, num_running) for plan in plans)
        return most / self.plain_goodput(num_running)

    def best_for_all(self, sessions: Sequence[SessionStats], num_running: int, current: Plan | None) -> Plan:
        """The plan under which sessions that share steps come furthest together.

        It may not be the best for one of them: all wait for the longest proposal.

        Args:
            sessions: some, which stand for all; at least one.
            current: their plan until now, kept unless another gains more than HYSTERESIS.
        """
        plans = self._shared(mean_of(sessions), num_running)
        predicted = {plan: self._joint_goodput(plan, sessions, num_running) for plan in plans}
        highest = max(predicted.values())
        if current in predicted and highest <= HYSTERESIS * predicted[current]:
            return current
        nearly = [plan for plan in plans if predicted[plan] >= highest / LONGER_GAIN]
        return min(nearly, key=lambda plan: (plan.num_speculative_tokens, -predicted[plan]))

    def share_of(self, plan: Plan, stats: SessionStats, num_running: int) -> Plan:
        """A session's share of the plan of all: only draft tokens that are worth their rows.

        Further steps of the draft are taken for other sessions anyway.
        """
        if plan.is_off or self._is_bounded(plan.overlap, stats):
            return self.with_bound(plan, stats, num_running)
        acceptance = min(stats.acceptance.value, MAX_ACCEPTANCE)
        most = min(plan.num_speculative_tokens, AUTO_K[-1])
        worth = self.break_even(replace(plan, num_speculative_tokens=most), stats, num_running)
        num_worthy = next((k for k in range(1, most) if acceptance ** (k + 1) < worth), most)
        return replace(plan, num_speculative_tokens=num_worthy)

    def with_bound(self, plan: Plan, stats: SessionStats, num_running: int) -> Plan:
        """The plan with its ``min_acceptance``: where a draft token's row and draft step break even."""
        ends_for_rows = self._ends_for_rows and stats.draft_knows_acceptance and stats.fixed_k is None
        if plan.is_off or not (ends_for_rows or self._is_bounded(plan.overlap, stats)):
            return plan
        bound = min(MAX_BOUND, self.break_even(plan, stats, num_running))
        return replace(plan, min_acceptance=round(bound, 3))

    # Goodput

    def goodput(self, plan: Plan, stats: SessionStats, num_running: int) -> float:
        """Predicted tokens per second of one session, if all others have the same plan."""
        k, acceptance = plan.num_speculative_tokens, min(stats.acceptance.value, MAX_ACCEPTANCE)
        if plan.is_off:
            return self.plain_goodput(num_running)
        if not self._is_model:
            return self.lone_goodput(k, expected_tokens(acceptance, k), num_running)
        if plan.overlap is Overlap.SERIAL:
            return self.serial_goodput(k, [self.expected_round(k, stats)], num_running)
        num_branches = num_running
        if plan.overlap is Overlap.ENUMERATE:
            num_branches *= max_branches(plan, k, num_running=num_running)
        return self._overlapped_goodput(plan, acceptance, num_branches, num_running)

    def asked(self, plan: Plan, stats: SessionStats, num_running: int) -> tuple[float, float]:
        """Tokens that a round commits for which the draft is asked first, and its seconds.

        Whatever the overlap: where a round asks, its outcome had not been foreseen.
        """
        one = self.expected_round(plan.num_speculative_tokens, stats)
        rate = self.serial_goodput(plan.num_speculative_tokens, [one], num_running)
        return one.num_tokens, one.num_tokens / rate

    def plain_goodput(self, num_running: int) -> float:
        """Predicted tokens per second of one session without speculation."""
        return 1.0 / max(self._cost.verify_s(num_running, num_running) or _UNKNOWN_S, 1e-9)

    def serial_goodput(
        self, k: int, rounds: Sequence[ExpectedRound], num_running: int, *, width: float = 1.0
    ) -> float:
        """Predicted tokens per second of one session where draft and target take turns.

        The geometric mean over sessions: slow ones are there for longer. Where each that ends makes room for
        another, requests per second grow with it; the sum of tokens per second grows with what fast sessions
        gain, which only end sooner for it.

        Args:
            k: most draft tokens of a proposal, >= 1; of a tree, of a path.
            rounds: of some sessions, which stand for all.
            width: rows of a proposal in a draft step, on average: more than one of a tree.
        """
        cost = self._cost
        num_drafts = fmean(one.num_drafts for one in rounds)
        steps = expected_steps(k, [one.continuation for one in rounds], num_running)
        num_rows, num_branches = num_running * (1 + num_drafts), num_running * num_drafts * (1 - 1 / width)
        verify = cost.verify_s(round(num_rows), num_running, num_branches=num_branches) or _UNKNOWN_S
        draft = sum(
            step.chance * cost.draft_step_s(round(width * step.num_growing), verify) for step in steps
        )
        num_read = fmean(one.num_tokens for one in rounds)
        draft += cost.load_factor * (
            cost.draft.unread_s(num_running, num_read) + cost.draft.overhead_s(num_running)
        )
        round_s = verify + draft + cost.round_trip_s + HANDLING_S * num_running
        return geometric_mean(one.num_tokens for one in rounds) / round_s

    def lone_goodput(
        self, num_drafts: int, num_tokens: float, num_running: int, *, num_branches: int = 0
    ) -> float:
        """Goodput of draft tokens that took no time, in a step in which the others have none.

        It is what the session adds to the tokens per second of all: its own tokens, less what the longer step
        costs the others. So it compares with ``plain_goodput`` as the others' does. The more others there
        are, the less a few rows gain: their cost is not known so well.

        Args:
            num_tokens: that such a round is expected to commit.
            num_branches: draft tokens besides the first chain.
        """
        plain, longer = (
            self._cost.verify_s(num_running + rows, num_running, num_branches=more) or _UNKNOWN_S
            for rows, more in ((0, 0), (num_drafts, num_branches))
        )
        longer = max(longer, MIN_SLOWDOWN * plain)
        num_others = num_running - 1
        return (num_others + num_tokens) / longer - num_others / plain

    def _overlapped_goodput(
        self, plan: Plan, acceptance: float, num_branches: int, num_running: int
    ) -> float:
        cost, k = self._cost, plan.num_speculative_tokens
        verify = cost.verify_s(num_running * (k + 1), num_running, is_overlapped=True) or _UNKNOWN_S
        round_trip = cost.round_trip_s
        step = cost.draft_step_s(1, verify)
        outcomes = cost.outcomes.predict(k, num_branches, step_s=step) + round_trip
        misses = 1 - self._hit_rate(plan, acceptance)
        fresh = cost.draft_step_s(max(1, round(misses * num_running)), verify) * k + round_trip
        fresh += HANDLING_S * num_running
        return expected_tokens(acceptance, k) / (max(verify, outcomes) + misses * fresh)

    def _hit_rate(self, plan: Plan, acceptance: float) -> float:
        if plan.overlap is Overlap.AHEAD:
            # One chain hits only when all K tokens are accepted and the bonus guess is right as well.
            return float(acceptance ** (plan.num_speculative_tokens + 1))
        measured = self._cost.hit_rate.get(plan.width)
        return prior_hit_rate(plan.width, acceptance) if measured is None else measured.value

    def _shared(self, stats: SessionStats, num_running: int) -> list[Plan]:
        most = MAX_SHARED_K if num_running >= MANY_SESSIONS else ANY_K
        return [plan for plan in self.plans(stats) if 0 < plan.num_speculative_tokens <= most]

    def _joint_goodput(self, plan: Plan, sessions: Sequence[SessionStats], num_running: int) -> float:
        if plan.overlap is not Overlap.SERIAL or not self._is_model:
            return fmean(self.goodput(plan, stats, num_running) for stats in sessions)
        k = plan.num_speculative_tokens
        return self.serial_goodput(k, [self.expected_round(k, stats) for stats in sessions], num_running)

    def break_even(self, plan: Plan, stats: SessionStats, num_running: int) -> float:
        """Least P(a draft token is accepted) at which it is worth its row and its draft step.

        At g tokens per second of all sessions, a token that is accepted with probability p may take p / g.
        """
        if plan.num_speculative_tokens == ANY_K:
            num_drafts = stats.bounded.num_drafts.value
        else:
            num_drafts = expected_drafts(plan.num_speculative_tokens, self._continuation(stats))
        # The average cost of the session's own rows: a step's time bends where rows are no longer hidden by
        # loading the weights, and a proposal has rows on both sides. Those of many sessions are beyond the
        # bend, but for the first ones, which nobody leaves out.
        num_more = max(1, round(num_running * num_drafts))
        first = num_more // 2 if num_running >= MANY_SESSIONS else 0
        plain, fewer, more = (
            self._cost.verify_s(num_running + rows, num_running) or 0.0 for rows in (0, first, num_more)
        )
        row_s = max(0.0, more - fewer) / (num_more - first)
        token_s = row_s + (self.draft_token_s(num_running, plain) if self._is_model else 0.0)
        return num_running * self.goodput(plan, stats, num_running) * token_s

    def draft_token_s(self, num_running: int, verify_s: float) -> float:
        """Draft seconds that one draft token costs.

        A step is taken for whichever proposal grows: of many, several are as long as the longest, so that
        ending one a token earlier saves its part of a step and no step.
        """
        alone, together = (self._cost.draft_step_s(count, verify_s) for count in (1, num_running))
        part_s = 0.0 if num_running == 1 else max(0.0, together - alone) / (num_running - 1)
        return part_s + max(0.0, alone - part_s) / num_running**2

    def expected_round(self, k: int, stats: SessionStats) -> ExpectedRound:
        """Expected round of a session where the draft goes first, and proposes a chain."""
        acceptance = min(stats.acceptance.value, MAX_ACCEPTANCE)
        if k == ANY_K and self._is_bounded(Overlap.SERIAL, stats):
            # At most as many tokens as are accepted per rejection, however long proposals are.
            num_accepted = min(stats.bounded.num_accepted.value, acceptance / (1 - acceptance))
            num_drafts = max(1.0, stats.bounded.num_drafts.value)
            return ExpectedRound(num_drafts, 1 + num_accepted, 1 - 1 / num_drafts)
        continuation = self._continuation(stats)
        return ExpectedRound(
            expected_drafts(k, continuation), expected_tokens(acceptance, k, continuation), continuation
        )

    def _is_bounded(self, overlap: Overlap, stats: SessionStats) -> bool:
        """The draft may end its proposals early: K is chosen here, and nothing is drafted ahead."""
        is_auto = stats.fixed_k is None
        return self._is_model and stats.draft_knows_acceptance and is_auto and overlap is Overlap.SERIAL

    def _continuation(self, stats: SessionStats) -> float:
        is_bounded = self._is_bounded(Overlap.SERIAL, stats)
        return min(stats.continuation.value, 1.0) if is_bounded else 1.0


def mean_of(sessions: Sequence[SessionStats]) -> SessionStats:
    """Statistics of an average session; ``sessions`` has at least one."""
    bounded = [stats.bounded for stats in sessions]
    return SessionStats(
        Rate(fmean(stats.acceptance.value for stats in sessions)),
        Rate(fmean(stats.continuation.value for stats in sessions)),
        BoundedProposalStats(
            Rate(fmean(one.num_drafts.value for one in bounded)),
            Rate(fmean(one.num_accepted.value for one in bounded)),
        ),
        draft_knows_acceptance=2 * sum(stats.draft_knows_acceptance for stats in sessions) > len(sessions),
    )


def max_branches(plan: Plan, num_drafts: int, *, num_running: int) -> int:
    """Most branches of one session's outcomes; the draft chooses which. 0: as the fan-out says."""
    if plan.overlap is not Overlap.ENUMERATE:
        return 0
    # Tokens of the n-gram fallback may be more: no more outcomes are worth a branch, and each costs a row.
    num_drafts = min(num_drafts, plan.num_speculative_tokens)
    return max(1, min(plan.width * (num_drafts + 1), MAX_BRANCH_ROWS // max(1, num_running)))
