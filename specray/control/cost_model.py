"""What both engines were measured to take, and the goodput that follows from it.

With a = acceptance per token, n = running sessions, V = target step by rows, D = draft time, R = round trip
to the draft, H = the router's time for a proposal, h = hit rate::

    tokens per round   E(a, K) = (1 - a^(K+1)) / (1 - a)                          (Leviathan et al. 2023)
    no speculation     V(n)
    serial             V(n(K+1)) + D(K) + R + H n
    drafts at no cost  V(n+K); only now and then has a session any, so the others have none
    ahead, enumerate   max(V(n(K+1)), D_outcomes(K) + R) + (1 - h)(D(K) + R + H n)      outcomes are pushed

Where the draft may end a proposal early, V has as many rows as proposals come to on average, and D as many
steps as the longest of all comes to; where nothing else ends it, K and E are measured. D_outcomes grows with
the branches, h too: so the width of the fan-out is part of what is chosen.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean
from typing import Final

from specray.control.draft_times import DraftTimes
from specray.control.estimators import Average, OutcomesTime, Rate
from specray.control.expected import Round, expected_steps, expected_tokens, prior_hit_rate
from specray.control.state import Plan
from specray.control.target_times import TargetTimes
from specray.types import Overlap, StepTime

PRIOR_DRAFT_SHARE = 0.15
"""A draft step as part of a target step, before both are measured."""
LEAST_SLOWDOWN = 1.04
"""Of a step with a few more rows: about as far as what steps take is known. With 32 others, draft tokens at
no cost cost an eighth of a step where they make it one of 36 rows, and nothing where it has 40 anyway."""
MIN_READING = 64
"""Unread tokens that the draft is given at once, whatever they cost; a round or two bring no more."""
_UNKNOWN_S = 1e-3
HANDLING_S: Final = 40e-6
"""Of a router's time, for one proposal: it asks, takes the answer, and has more to send and to commit. Of 64
sessions of the embedded pair, rounds with proposals took 5.7 ms beside both engines' steps, the way to the
draft among them, and rounds without 0.3 (2 cores, ``specray bench overlap``). Chosen, not fitted: with it
they came to 0.94 times plain decoding, with none to 0.84."""


@dataclass(slots=True)
class Measured:
    """Running averages, and predictions from them in tokens per second of one session."""

    target: TargetTimes = field(default_factory=TargetTimes)
    draft: DraftTimes = field(default_factory=DraftTimes)
    """Of proposals."""
    outcomes: OutcomesTime = field(default_factory=OutcomesTime)
    slowest_outcomes_s: float = 0.0
    draft_round_trip: Average = field(default_factory=Average)
    hit_rate: dict[int, Rate] = field(default_factory=dict)
    """Of enumeration, by width."""

    # Measurements

    def expect_target(
        self, step_times: Sequence[StepTime], round_trip_s: float, *, context_token_s: float = 0.0
    ) -> None:
        """What to believe of the target's steps before they were measured here.

        Args:
            step_times: what the engine says of itself; may be empty.
            round_trip_s: of a message to it.
            context_token_s: as the engine says.
        """
        seconds = {entry.num_rows: entry.seconds + round_trip_s for entry in step_times}
        self.target.context_token_s = max(0.0, context_token_s) if math.isfinite(context_token_s) else 0.0
        for times in (*self.target.rounds.values(), self.target.prompts):
            times.expect(seconds)

    def expect_draft(self, step_times: Sequence[StepTime], round_trip_s: float) -> None:
        """What to believe of the draft's; as ``expect_target``."""
        pairs = [(entry.num_rows, entry.seconds) for entry in step_times]
        self.draft.expect(dict(pairs))
        self.outcomes.expect(pairs)
        self.draft_round_trip.expect(round_trip_s)

    def observe_proposals(
        self, num_steps: Sequence[int], forward_s: float, round_trip_s: float, *, num_read: int = 0
    ) -> None:
        """One draft step that answered proposals and nothing else; as ``DraftTimes.add``."""
        if max(num_steps) > 0:
            self.draft.add(num_steps, forward_s / self.pace, num_read=num_read)
            self.draft_round_trip.add(max(0.0, round_trip_s) / self.pace)

    def observe_outcomes(self, num_tokens: int, num_branches: int, forward_s: float) -> None:
        """One draft step that answered outcomes with branches of ``num_tokens`` and nothing else."""
        if self.draft.step_s(1) is None:
            # No proposal was asked for yet: the branches cost what is expected of them.
            step_s = forward_s / OutcomesTime().predict(num_tokens, num_branches, step_s=1.0)
            self.draft.add([1], step_s / self.pace)
        step_s = self.draft_step_s(1, 0.0)
        self.outcomes.add(num_tokens, num_branches, forward_s, step_s=step_s)
        # What was slow once may be so again; it fades.
        self.slowest_outcomes_s = max(forward_s, 0.98 * self.slowest_outcomes_s)

    # Predictions

    def plain_goodput(self, num_running: int) -> float:
        """Without speculation."""
        return 1.0 / max(self.verify_s(num_running, num_running) or _UNKNOWN_S, 1e-9)

    def serial_goodput(self, k: int, rounds: Sequence[Round], num_running: int) -> float:
        """Draft and target in turns.

        Of several sessions the geometric mean: those that go slowly are there for longer. Where each that
        ends makes room for another, it is what requests per second grow with; tokens of the moment grow with
        what fast ones gain, who are only gone sooner for it.

        Args:
            k: most draft tokens of a proposal, >= 1.
            rounds: of some sessions, which stand for all.
        """
        num_drafts = fmean(one.num_drafts for one in rounds)
        steps = expected_steps(k, [one.continuation for one in rounds], num_running)
        verify = self.verify_s(round(num_running * (1 + num_drafts)), num_running) or _UNKNOWN_S
        draft = sum(step.chance * self.draft_step_s(round(step.num_lines), verify) for step in steps)
        num_read = fmean(one.num_tokens for one in rounds)
        draft += self.pace * (
            self.draft.reading_s(num_running, num_read) + self.draft.overhead_s(num_running)
        )
        round_s = verify + draft + self.round_trip_s + HANDLING_S * num_running
        return geometric_mean(one.num_tokens for one in rounds) / round_s

    def lone_goodput(self, k: int, acceptance: float, num_running: int) -> float:
        """Of one session with ``k`` draft tokens, which took no time, among others with none.

        What it adds to the tokens per second of all: its own tokens, less what the longer step costs the
        others. So it is compared with ``plain_goodput`` as the others' are. The more others there are, the
        less are a few rows worth: what they cost is not known so well.
        """
        plain, longer = (self.verify_s(num_running + rows, num_running) or _UNKNOWN_S for rows in (0, k))
        longer = max(longer, LEAST_SLOWDOWN * plain)
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
        fresh += HANDLING_S * num_running
        return expected_tokens(acceptance, k) / (max(verify, outcomes) + misses * fresh)

    def draft_step_s(self, num_sequences: int, verify_s: float) -> float:
        """Seconds per draft token, for so many sequences side by side."""
        known = self.draft.step_s(num_sequences)
        return PRIOR_DRAFT_SHARE * verify_s if known is None else self.pace * known

    def reading_room(self, most: int, *, step_s: float | None, most_s: float) -> int:
        """Tokens that the draft may read at once while running sessions are drafted for.

        Args:
            most: that may be asked for, >= 1.
            step_s: of the target's step with these sessions it has left; None: nothing is known.
            most_s: the draft may take for it, however long that step is.

        Returns:
            In 1..most: what it is believed to read in that time, but never fewer than MIN_READING.
        """
        if step_s is None:
            return most
        sizes, within_s = range(1, most + 1), min(step_s, most_s)
        num_readable = bisect_right(sizes, within_s, key=lambda size: self.draft_step_s(size, 0.0))
        return min(most, max(MIN_READING, num_readable))

    @property
    def round_trip_s(self) -> float:
        """To the draft; 0 when nothing is known."""
        return self.pace * (self.draft_round_trip.value or 0.0)

    def verify_s(self, rows: int, num_sequences: int, *, is_overlapped: bool = False) -> float | None:
        """Seconds of a target step; None: nothing is known."""
        return self.target.predict(rows, num_sequences, is_overlapped=is_overlapped)

    @property
    def pace(self) -> float:
        """The target's. The draft's times are divided by it too: where engines share a machine, what slows
        one slows the other, and the draft's were measured at other moments."""
        return self.target.pace

    def _hit_rate(self, plan: Plan, acceptance: float) -> float:
        if plan.overlap is Overlap.AHEAD:
            # One chain holds only when all K tokens are accepted and the bonus guess is right as well.
            return float(acceptance ** (plan.num_speculative_tokens + 1))
        measured = self.hit_rate.get(plan.width)
        return prior_hit_rate(plan.width, acceptance) if measured is None else measured.value
