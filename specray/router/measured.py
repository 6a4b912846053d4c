"""What both engines were measured to take, and the goodput that follows from it.

With a = acceptance per token, n = running sessions, V = target step by rows, D = draft time, R = round trip
to the draft, h = hit rate::

    tokens per round   E(a, K) = (1 - a^(K+1)) / (1 - a)                          (Leviathan et al. 2023)
    no speculation     V(n)
    serial             V(n(K+1)) + D(K) + R
    drafts at no cost  V(n+K); only now and then has a session any, so the others have none
    ahead, enumerate   max(V(n(K+1)), D_outcomes(K) + R) + (1 - h)(D(K) + R)      outcomes are pushed

Where the draft may end a proposal early, K is what it comes to on average; where nothing else ends it, K and
E are measured. D_outcomes grows with the branches, h too: so the width of the fan-out is part of what is
chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specray.router.estimates import Average, OutcomesTime, Rate, TimeTable
from specray.router.expected import expected_drafts, expected_tokens, prior_hit_rate
from specray.router.plan import Plan
from specray.types import Overlap

PRIOR_DRAFT_SHARE = 0.15
"""A draft step as part of a target step, before both are measured."""
UNMEASURED_SLOWDOWN = 1.1
"""Of a target step beside a working draft, before one was measured: engines often share cores or memory. On
two shared cores it is 1.25."""
_UNKNOWN_S = 1e-3


@dataclass(slots=True)
class Measured:
    """Running averages, and predictions from them in tokens per second of one session."""

    verify: dict[bool, TimeTable] = field(default_factory=lambda: {False: TimeTable(), True: TimeTable()})
    """By whether the draft works meanwhile: engines that share memory slow each other."""
    draft_step: TimeTable = field(default_factory=TimeTable)
    """Per draft token, by the sequences that are drafted for side by side."""
    outcomes: OutcomesTime = field(default_factory=OutcomesTime)
    slowest_outcomes_s: float = 0.0
    draft_round_trip: Average = field(default_factory=Average)
    pace: float = 1.0
    """Of the target's last steps; see ``TimeTable``. The draft's times are divided by it too: where engines
    share a machine, what slows one slows the other, and the draft's were measured at other moments."""
    hit_rate: dict[int, Rate] = field(default_factory=dict)
    """Of enumeration, by width."""

    def plain_goodput(self, num_running: int) -> float:
        """Without speculation."""
        return 1.0 / max(self.verify_s(num_running) or _UNKNOWN_S, 1e-9)

    def serial_goodput(self, k: int, acceptance: float, continuation: float, num_running: int) -> float:
        """Draft and target in turns.

        Args:
            k: most draft tokens of a proposal, >= 1.
            acceptance: per draft token.
            continuation: how often a draft token is followed by another; 1: until there are ``k``.
        """
        num_drafts = expected_drafts(k, continuation)
        verify = self.verify_s(round(num_running * (1 + num_drafts))) or _UNKNOWN_S
        # The token before which a proposal ends early is drafted too.
        num_steps = num_drafts + 1 - continuation ** (k - 1)
        draft = self.draft_step_s(num_running, verify) * num_steps
        tokens = expected_tokens(acceptance, k, continuation)
        return tokens / (verify + draft + self.round_trip_s)

    def lone_goodput(self, k: int, acceptance: float, num_running: int) -> float:
        """Of one session with ``k`` draft tokens, which took no time, among others with none.

        What it adds to the tokens per second of all: its own tokens, less what the longer step costs the
        others. So it is compared with ``plain_goodput`` as the others' are.
        """
        plain, longer = (self.verify_s(num_running + rows) or _UNKNOWN_S for rows in (0, k))
        num_others = num_running - 1
        return (num_others + expected_tokens(acceptance, k)) / longer - num_others / plain

    def judged_goodput(self, num_drafts: float, num_accepted: float, num_running: int) -> float:
        """Draft and target in turns, with proposals that the draft ends.

        Args:
            num_drafts: of a proposal, on average; the token before which it ends is drafted too.
            num_accepted: of them, on average.
        """
        verify = self.verify_s(round(num_running * (1 + num_drafts))) or _UNKNOWN_S
        draft = self.draft_step_s(num_running, verify) * (num_drafts + 1)
        return (1 + num_accepted) / (verify + draft + self.round_trip_s)

    def overlapped_goodput(self, plan: Plan, acceptance: float, num_branches: int, num_running: int) -> float:
        """Draft and target at the same time; ``num_branches`` of all sessions together."""
        k = plan.num_speculative_tokens
        verify = self.verify_s(num_running * (k + 1), is_overlapped=True) or _UNKNOWN_S
        round_trip = self.round_trip_s
        step = self.draft_step_s(1, verify)
        outcomes = self.outcomes.predict(k, num_branches, step_s=step) + round_trip
        misses = 1 - self._hit_rate(plan, acceptance)
        fresh = self.draft_step_s(max(1, round(misses * num_running)), verify) * k + round_trip
        return expected_tokens(acceptance, k) / (max(verify, outcomes) + misses * fresh)

    def draft_step_s(self, num_sequences: int, verify_s: float) -> float:
        """Seconds per draft token, for so many sequences side by side."""
        known = self.draft_step.predict(num_sequences)
        return PRIOR_DRAFT_SHARE * verify_s if known is None else self.pace * known

    @property
    def round_trip_s(self) -> float:
        """To the draft; 0 when nothing is known."""
        return self.pace * (self.draft_round_trip.value or 0.0)

    def verify_s(self, rows: int, *, is_overlapped: bool = False) -> float | None:
        """Seconds of a target step; None: nothing is known."""
        seconds = self.times(is_overlapped=is_overlapped).predict(rows)
        if seconds is None or self.verify[is_overlapped] or not is_overlapped:
            return seconds
        return UNMEASURED_SLOWDOWN * seconds

    def times(self, *, is_overlapped: bool) -> TimeTable:
        """Of target steps; of the other kind, while none of this kind was measured."""
        return self.verify[is_overlapped] or self.verify[not is_overlapped]

    def _hit_rate(self, plan: Plan, acceptance: float) -> float:
        if plan.overlap is Overlap.AHEAD:
            # One chain holds only when all K tokens are accepted and the bonus guess is right as well.
            return float(acceptance ** (plan.num_speculative_tokens + 1))
        measured = self.hit_rate.get(plan.width)
        return prior_hit_rate(plan.width, acceptance) if measured is None else measured.value
