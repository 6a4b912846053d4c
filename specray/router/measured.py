"""What both engines were measured to take, and the goodput that follows from it.

With a = acceptance per token, n = running sessions, V = target step by rows, D = draft time, R = round trip
to the draft, h = hit rate::

    tokens per round   E(a, K) = (1 - a^(K+1)) / (1 - a)                          (Leviathan et al. 2023)
    no speculation     V(n)
    serial             V(n(K+1)) + D(K) + R
    drafts at no cost  V(n+K); only now and then has a session any, so the others have none
    ahead, enumerate   max(V(n(K+1)), D_outcomes(K) + R) + (1 - h)(D(K) + R)      outcomes are pushed

Where the draft may end a proposal early, V has as many rows as proposals come to on average, and D as many
steps as the longest of all comes to; where nothing else ends it, K and E are measured. D_outcomes grows with
the branches, h too: so the width of the fan-out is part of what is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from specray.router.estimates import Average, OutcomesTime, Rate, TimeTable, size_of
from specray.router.expected import Round, expected_steps, expected_tokens, prior_hit_rate
from specray.router.plan import Plan
from specray.router.sequence_time import SequenceTime
from specray.types import Overlap

PRIOR_DRAFT_SHARE = 0.15
"""A draft step as part of a target step, before both are measured."""
UNMEASURED_SLOWDOWN = 1.1
"""Of a target step beside a working draft, before one was measured: engines often share cores or memory. On
two shared cores it is 1.25."""
_UNKNOWN_S = 1e-3
_LEAST_SHARE = 0.1
"""Of a step of the target that its rows take, whatever is believed of its sequences; of one of the draft, its
tokens."""
_OVERHEAD_WEIGHT = 0.2
"""Of a sample."""
_OVERHEAD_STEPS = 3.0
"""Of a proposal whose surprise is one half overhead."""


@dataclass(slots=True)
class Measured:
    """Running averages, and predictions from them in tokens per second of one session."""

    verify: dict[bool, TimeTable] = field(default_factory=lambda: {False: TimeTable(), True: TimeTable()})
    """By whether the draft works meanwhile: engines that share memory slow each other."""
    sequence: SequenceTime = field(default_factory=SequenceTime)
    """The target's: ``verify`` is without it."""
    draft_step: TimeTable = field(default_factory=TimeTable)
    """Per draft token, by the sequences that are drafted for side by side."""
    draft_overhead_s: float = 0.0
    """Per sequence, of a proposal of any length: what the draft's machine does for the others meanwhile, who
    have just had a verdict."""
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
        return 1.0 / max(self.verify_s(num_running, num_running) or _UNKNOWN_S, 1e-9)

    def serial_goodput(self, k: int, rounds: Sequence[Round], num_running: int) -> float:
        """Draft and target in turns.

        Args:
            k: most draft tokens of a proposal, >= 1.
            rounds: of some sessions, which stand for all.
        """
        num_drafts = fmean(one.num_drafts for one in rounds)
        num_steps = expected_steps(k, [one.continuation for one in rounds], num_running)
        verify = self.verify_s(round(num_running * (1 + num_drafts)), num_running) or _UNKNOWN_S
        draft = self.draft_step_s(num_running, verify) * num_steps + self.draft_overhead_s * num_running
        return fmean(one.num_tokens for one in rounds) / (verify + draft + self.round_trip_s)

    def lone_goodput(self, k: int, acceptance: float, num_running: int) -> float:
        """Of one session with ``k`` draft tokens, which took no time, among others with none.

        What it adds to the tokens per second of all: its own tokens, less what the longer step costs the
        others. So it is compared with ``plain_goodput`` as the others' are.
        """
        plain, longer = (self.verify_s(num_running + rows, num_running) or _UNKNOWN_S for rows in (0, k))
        num_others = num_running - 1
        return (num_others + expected_tokens(acceptance, k)) / longer - num_others / plain

    def overlapped_goodput(self, plan: Plan, acceptance: float, num_branches: int, num_running: int) -> float:
        """Draft and target at the same time; ``num_branches`` of all sessions together."""
        k = plan.num_speculative_tokens
        verify = self.verify_s(num_running * (k + 1), num_running, is_overlapped=True) or _UNKNOWN_S
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

    def add_verify(self, rows: int, num_sequences: int, seconds: float, *, is_overlapped: bool) -> None:
        """Takes a target step."""
        times = self.verify[is_overlapped]
        self.sequence.add(size_of(rows), num_sequences, seconds, is_overlapped=is_overlapped)
        times.add(rows, max(_LEAST_SHARE * seconds, seconds - self.sequence.value * num_sequences))
        self.pace = times.pace

    def add_proposals(self, num_steps: int, num_sequences: int, seconds: float) -> None:
        """Takes a draft step that answered so many proposals, the longest of which took so many steps.

        What it took longer than was believed is shared (normalised least mean squares): the fewer the steps,
        the more of it is the overhead's.
        """
        believed = self.draft_step.predict(num_sequences)
        step_s = seconds / num_steps
        if believed is not None:
            error_s = seconds - self.pace * believed * num_steps - self.draft_overhead_s * num_sequences
            share = 1 / (1 + (num_steps / _OVERHEAD_STEPS) ** 2)
            overhead_s = self.draft_overhead_s + _OVERHEAD_WEIGHT * share * error_s / num_sequences
            self.draft_overhead_s = max(0.0, overhead_s)
            step_s = max(_LEAST_SHARE * step_s, self.pace * believed + (1 - share) * error_s / num_steps)
        self.draft_step.add(num_sequences, step_s / self.pace)

    def verify_s(self, rows: int, num_sequences: int, *, is_overlapped: bool = False) -> float | None:
        """Seconds of a target step; None: nothing is known."""
        seconds = self.times(is_overlapped=is_overlapped).predict(rows)
        if seconds is None:
            return None
        seconds += self.sequence.value * num_sequences
        if self.verify[is_overlapped] or not is_overlapped:
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
