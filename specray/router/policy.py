"""How much to speculate: for each session and step, K and the fan-out, or nothing at all.

What is predicted, with a = acceptance per token, n = running sessions, V = target step by rows, D = draft
time, R = round trip to the draft, h = hit rate::

    tokens per round   E(a, K) = (1 - a^(K+1)) / (1 - a)                          (Leviathan et al. 2023)
    no speculation     V(n)
    serial             V(n(K+1)) + D(K) + R
    ahead, enumerate   max(V(n(K+1)), D_outcomes(K) + R) + (1 - h)(D(K) + R)      outcomes are pushed

D_outcomes grows with the branches, h too: so the width of the fan-out is part of what is chosen. Which
outcomes get the branches is the draft's choice: it sees how sure it is of each token, which a fan-out by
position alone (geometric in SSD/Saguaro, arXiv 2603.03251, theorem 12) does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specray.config import SpeculationConfig
from specray.router.estimates import Average, OutcomesTime, Rate, TimeTable, chain_trials
from specray.router.plan import OFF, REVIEW_ROUNDS, Pacing, Plan
from specray.router.records import Lookup
from specray.router.trace import Trace
from specray.types import DraftKind, GenerateRequest, Overlap, StepTime

AUTO_K = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""What ``num_speculative_tokens: auto`` chooses from, besides 0."""
FIRST_K = 3
PRIOR_ACCEPTANCE = 0.7
ACCEPTANCE_FADING = 0.998
"""Per round, of what new sessions start from: some hundred rounds, so that no single session makes it."""
MISSES_BY_WIDTH = (1.0, 0.5, 0.3)
"""Before it is measured: of the verdicts whose last token the draft's first guess misses, how many are missed
with 1, 2 or 3 branches for each number of accepted tokens. Measured on the embedded pair."""
PRIOR_DRAFT_SHARE = 0.15
"""A draft step as part of a target step, before both are measured."""
UNMEASURED_SLOWDOWN = 1.1
"""Of a target step beside a working draft, before one was measured: engines often share cores or memory. On
two shared cores it is 1.25."""
RELAXATION = 0.05
"""Of what was measured, in the time of one session's review, however many sessions have theirs meanwhile."""
HYSTERESIS = 1.05
"""A plan is left only for one that promises so much more."""
MIN_GAIN = 1.02
"""Speculation must promise so much more than none: predictions err, and none is sure."""
PROBE_INTERVAL_ROUNDS = 128
PROBE_ROUNDS = 2
"""With speculation off, so many rounds in each interval try it again: below 1 % even where it costs half."""
WIDTHS = (3, 2, 1)
"""Of enumeration; the first plan of all, before anything is measured, is the last."""
MAX_NEXT_TOKENS = 8
"""For one number of accepted tokens; what lies behind them is hardly ever drawn."""
MAX_BRANCH_ROWS = 96
"""Branches of all sessions together; a small draft becomes compute-bound beyond about a hundred rows."""
FAILED_DRAFT_REST_ROUNDS = 16
PREFILL_UNIT = 16
"""One joins every step, whatever it costs: a prompt must get on. A new size of step is slow at first."""


@dataclass(slots=True)
class _Measured:
    verify: dict[bool, TimeTable] = field(default_factory=lambda: {False: TimeTable(), True: TimeTable()})
    """By whether the draft works meanwhile: engines that share memory slow each other."""
    draft_step: TimeTable = field(default_factory=TimeTable)
    """Per draft token, by the sequences that are drafted for side by side."""
    outcomes: OutcomesTime = field(default_factory=OutcomesTime)
    slowest_outcomes_s: float = 0.0
    draft_round_trip: Average = field(default_factory=Average)
    hit_rate: dict[int, Rate] = field(default_factory=dict)
    """Of enumeration, by width."""


class Policy:
    """Chooses plans from configuration, request and measurements. Holds no session.

    Args:
        config: the ``speculation`` section.
        trace: told of reviews; None: nobody is.
        source: what drafts under its plans.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        trace: Trace | None = None,
        source: str = DraftKind.MODEL.value,
    ) -> None:
        fixed = config.num_speculative_tokens
        self._config = config
        self._trace = trace
        self._source = source
        self._fixed_k = None if fixed == "auto" else fixed
        self._overlaps = _overlaps(config)
        self._acceptance = Rate(PRIOR_ACCEPTANCE, weight=4.0, fading=ACCEPTANCE_FADING)
        self._measured = _Measured()

    def beside(self, source: str, *, prior_acceptance: float) -> Policy:
        """A policy of its own for drafts that take no time and so never overlap; target times are shared.

        Args:
            source: what drafts so.
            prior_acceptance: per token, until some have been verified; in (0, 1).
        """
        serial = self._config.model_copy(update={"overlap": Overlap.SERIAL})
        policy = Policy(serial, trace=self._trace, source=source)
        policy._acceptance = Rate(prior_acceptance, weight=4.0, fading=ACCEPTANCE_FADING)
        policy._measured.verify = self._measured.verify
        policy.observe_proposal(1, 0.0, 0.0)
        return policy

    def pace(self, request: GenerateRequest) -> Pacing:
        """The record of a new session; its acceptance starts where the service's stands."""
        wanted = request.speculation
        fixed = wanted.num_speculative_tokens if wanted.num_speculative_tokens is not None else self._fixed_k
        fixed_k = fixed if wanted.enabled else 0
        return Pacing(Rate(self._acceptance.value, weight=4.0), request.request_id, fixed_k)

    def plan(self, pacing: Pacing, *, num_remaining: int, num_running: int) -> Plan:
        """The plan of the round to come.

        Args:
            pacing: of the session.
            num_remaining: output tokens that may still come; K stays below.
            num_running: sessions that share the steps.
        """
        if pacing.fixed_k == 0 or num_remaining <= 1 or pacing.rest_rounds > 0:
            return OFF
        if pacing.plan is None or pacing.rounds_to_review <= 0:
            self._review(pacing, num_running)
        assert pacing.plan is not None
        plan = pacing.plan
        if plan.num_speculative_tokens < num_remaining:
            return plan
        return replace(plan, num_speculative_tokens=num_remaining - 1)

    def prepare(self, pacing: Pacing, num_running: int) -> None:
        """Reviews a plan that ends with the next round, now, while no engine waits for it."""
        if pacing.plan is not None and pacing.fixed_k != 0 and pacing.rounds_to_review <= 1:
            self._review(pacing, num_running)

    def fanout(self, plan: Plan, num_drafts: int) -> tuple[int, ...]:
        """F_0..F_K for the proposal under verification; empty: the draft rests until the verdict."""
        if plan.is_off or plan.overlap is Overlap.SERIAL:
            return ()
        if plan.overlap is Overlap.AHEAD:
            return (0,) * num_drafts + (1,)
        return (MAX_NEXT_TOKENS,) * (num_drafts + 1)

    def max_branches(self, plan: Plan, num_drafts: int, *, num_running: int) -> int:
        """Most branches of one session's outcomes; the draft chooses which. 0: as the fan-out says."""
        if plan.overlap is not Overlap.ENUMERATE:
            return 0
        return max(1, min(plan.width * (num_drafts + 1), MAX_BRANCH_ROWS // max(1, num_running)))

    def patience_s(self) -> float | None:
        """How long a round may wait for the draft: four times what it usually takes. None: not measured."""
        step_s = self._measured.draft_step.predict(1)
        if step_s is None:
            return None
        proposal_s = (self._fixed_k or AUTO_K[-1]) * step_s
        slowest_s = max(proposal_s, self._measured.slowest_outcomes_s)
        return max(0.05, 4 * (slowest_s + (self._measured.draft_round_trip.value or 0.0)))

    def verify_s(self, rows: int) -> float | None:
        """Expected seconds of a target step; None before the first measurement."""
        return self._times(is_overlapped=True).predict(rows)

    def prefill_room(self, num_rows: int, most: int, *, max_slowdown: float) -> int:
        """Prompt tokens that may share a step with the running sessions.

        Args:
            num_rows: of the running sessions, >= 1.
            most: that may be asked for, >= 1.
            max_slowdown: the step may take so many times as long as without the prompt tokens.

        Returns:
            In 1..most: what fits into that time, in whole PREFILL_UNITs, but never fewer than one of them.
        """
        times = self._times(is_overlapped=True)
        alone = times.least(num_rows)
        if alone is None:
            return most
        room = times.largest_within(max_slowdown * alone) - num_rows
        return min(most, max(1, room // PREFILL_UNIT) * PREFILL_UNIT)

    # Measurements

    def expect_target(self, step_times: Sequence[StepTime], round_trip_s: float) -> None:
        """What to believe of the target's steps before they were measured here.

        Args:
            step_times: what the engine says of itself; may be empty.
            round_trip_s: of a message to it.
        """
        seconds = {entry.num_rows: entry.seconds + round_trip_s for entry in step_times}
        for times in self._measured.verify.values():
            times.expect(seconds)

    def expect_draft(self, step_times: Sequence[StepTime], round_trip_s: float) -> None:
        """What to believe of the draft's; as ``expect_target``."""
        pairs = [(entry.num_rows, entry.seconds) for entry in step_times]
        self._measured.draft_step.expect(dict(pairs))
        self._measured.outcomes.expect(pairs)
        self._measured.draft_round_trip.expect(round_trip_s)

    def observe_verify(self, rows: int, seconds: float, *, is_overlapped: bool) -> None:
        """One target step, with its transport."""
        self._measured.verify[is_overlapped].add(rows, seconds)

    def observe_proposal(
        self, num_tokens: int, forward_s: float, round_trip_s: float, *, num_sequences: int = 1
    ) -> None:
        """One draft step that answered ``num_sequences`` proposals of ``num_tokens`` and nothing else."""
        if num_tokens > 0:
            self._measured.draft_step.add(num_sequences, forward_s / num_tokens)
            self._measured.draft_round_trip.add(max(0.0, round_trip_s))

    def observe_outcomes(self, num_tokens: int, num_branches: int, forward_s: float) -> None:
        """One draft step that answered outcomes with branches of ``num_tokens`` and nothing else."""
        step_s = self._measured.draft_step.predict(1)
        if step_s is None:
            # No proposal was asked for yet: the branches cost what is expected of them.
            step_s = forward_s / OutcomesTime().predict(num_tokens, num_branches, step_s=1.0)
            self._measured.draft_step.add(1, step_s)
        self._measured.outcomes.add(num_tokens, num_branches, forward_s, step_s=step_s)
        # What was slow once may be so again; it fades.
        self._measured.slowest_outcomes_s = max(forward_s, 0.98 * self._measured.slowest_outcomes_s)

    def observe_round(self, pacing: Pacing, num_drafts: int, num_accepted: int) -> None:
        """One verdict of a session."""
        pacing.rounds_to_review -= 1
        pacing.rest_rounds = max(0, pacing.rest_rounds - 1)
        pacing.rounds_off = pacing.rounds_off + 1 if num_drafts == 0 else 0
        if num_drafts:
            trials = chain_trials(num_drafts, num_accepted)
            pacing.acceptance.add(num_accepted, trials)
            self._acceptance.add(num_accepted, trials)

    def observe_lookup(self, plan: Plan, lookup: Lookup) -> None:
        """What outcomes asked under ``plan`` were good for."""
        if plan.overlap is Overlap.ENUMERATE:
            rate = self._measured.hit_rate.get(plan.width)
            if rate is None:
                prior = prior_hit_rate(plan.width, self._acceptance.value)
                rate = self._measured.hit_rate[plan.width] = Rate(prior)
            rate.add(int(lookup is Lookup.HIT), 1)

    # Choice

    def _review(self, pacing: Pacing, num_running: int) -> None:
        candidates = self._candidates(pacing.fixed_k)
        self._choose(candidates, pacing, num_running)
        if self._trace is not None:
            self._tell(self._trace, candidates, pacing, num_running)

    def _tell(self, trace: Trace, candidates: Sequence[Plan], pacing: Pacing, num_running: int) -> None:
        plan = pacing.plan
        assert plan is not None, "a plan was chosen"
        best: dict[str, float] = {}
        if self._verify(num_running, is_overlapped=False) is not None:
            for candidate in candidates:
                tokens_per_s = self.goodput(candidate, pacing, num_running)
                best[candidate.way] = max(tokens_per_s, best.get(candidate.way, 0.0))
        trace.planned(
            pacing.request_id,
            self._source,
            overlap=plan.way,
            num_speculative_tokens=plan.num_speculative_tokens,
            width=plan.width,
            num_running=num_running,
            acceptance=pacing.acceptance.value,
            tokens_per_s=best,
        )

    def _choose(self, candidates: Sequence[Plan], pacing: Pacing, num_running: int) -> None:
        pacing.rounds_to_review = pacing.review_rounds
        pacing.review_rounds = min(REVIEW_ROUNDS, 2 * pacing.review_rounds)
        if len(candidates) == 1:
            pacing.plan = candidates[0]
            return
        # A probe is a look, not a change of plan.
        current = OFF if pacing.is_probing else pacing.plan
        pacing.is_probing = False
        if current == OFF and pacing.rounds_off >= PROBE_INTERVAL_ROUNDS:
            pacing.plan = self._best([plan for plan in candidates if not plan.is_off], pacing, num_running)
            pacing.rounds_to_review = PROBE_ROUNDS
            pacing.is_probing = True
            return
        self._relax(RELAXATION / max(1, num_running))
        best = self._best(candidates, pacing, num_running)
        # Speculation is left as soon as it promises less than none; any other change must be worth it.
        if current is not None and best not in (current, OFF):
            expected = self.goodput(current, pacing, num_running)
            if self.goodput(best, pacing, num_running) <= HYSTERESIS * expected:
                best = current
        pacing.plan = best

    def _relax(self, share: float) -> None:
        """What was measured of ways of working that were left since becomes less certain."""
        self._measured.outcomes.relax(share)
        for rate in self._measured.hit_rate.values():
            rate.relax(share)

    def _candidates(self, fixed_k: int | None) -> list[Plan]:
        ks = AUTO_K if fixed_k is None else (fixed_k,)
        plans = [
            Plan(k, overlap, width)
            for overlap in self._overlaps
            for width in (WIDTHS if overlap is Overlap.ENUMERATE else (1,))
            for k in ks
        ]
        return [OFF, *plans] if fixed_k is None else plans

    def _best(self, candidates: Sequence[Plan], pacing: Pacing, num_running: int) -> Plan:
        if self._verify(num_running, is_overlapped=False) is None:
            first = [plan for plan in candidates if plan.num_speculative_tokens == FIRST_K] or candidates
            return first[-1]
        return max(
            candidates,
            key=lambda plan: self.goodput(plan, pacing, num_running) * (MIN_GAIN if plan.is_off else 1.0),
        )

    def goodput(self, plan: Plan, pacing: Pacing, num_running: int) -> float:
        """Predicted tokens per second of one session under ``plan``."""
        k, overlap = plan.num_speculative_tokens, plan.overlap
        is_overlapped = overlap is not Overlap.SERIAL
        verify = self._verify(num_running * (k + 1), is_overlapped=is_overlapped) or 1e-3
        if k == 0:
            return 1.0 / max(verify, 1e-9)
        acceptance = min(pacing.acceptance.value, 0.99)
        tokens = expected_tokens(acceptance, k)
        step = self._draft_step(1, verify)
        round_trip = self._measured.draft_round_trip.value or 0.0
        if not is_overlapped:
            return tokens / (verify + self._draft_step(num_running, verify) * k + round_trip)
        num_branches = num_running
        if overlap is Overlap.ENUMERATE:
            num_branches *= self.max_branches(plan, k, num_running=num_running)
        outcomes = self._measured.outcomes.predict(k, num_branches, step_s=step) + round_trip
        misses = 1 - self._hit_rate(plan, acceptance)
        fresh = self._draft_step(max(1, round(misses * num_running)), verify) * k + round_trip
        return tokens / (max(verify, outcomes) + misses * fresh)

    def _draft_step(self, num_sequences: int, verify_s: float) -> float:
        known = self._measured.draft_step.predict(num_sequences)
        return PRIOR_DRAFT_SHARE * verify_s if known is None else known

    def _verify(self, rows: int, *, is_overlapped: bool) -> float | None:
        seconds = self._times(is_overlapped=is_overlapped).predict(rows)
        if seconds is None or self._measured.verify[is_overlapped] or not is_overlapped:
            return seconds
        return UNMEASURED_SLOWDOWN * seconds

    def _times(self, *, is_overlapped: bool) -> TimeTable:
        own, other = self._measured.verify[is_overlapped], self._measured.verify[not is_overlapped]
        return own or other

    def _hit_rate(self, plan: Plan, acceptance: float) -> float:
        if plan.overlap is Overlap.AHEAD:
            # One chain holds only when all K tokens are accepted and the bonus guess is right as well.
            return float(acceptance ** (plan.num_speculative_tokens + 1))
        measured = self._measured.hit_rate.get(plan.width)
        return prior_hit_rate(plan.width, acceptance) if measured is None else measured.value


def prior_hit_rate(width: int, acceptance: float) -> float:
    """How often the next token is among ``width`` guesses, when each alone is right so often."""
    return 1 - (1 - acceptance) * MISSES_BY_WIDTH[width - 1]


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a round of ``num_drafts`` draft tokens commits on average.

    Args:
        acceptance: per token, in [0, 1).
    """
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)


def _overlaps(config: SpeculationConfig) -> tuple[Overlap, ...]:
    if config.overlap == "auto":
        return (Overlap.SERIAL, Overlap.AHEAD, Overlap.ENUMERATE)
    return (config.overlap,)
