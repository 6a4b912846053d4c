"""How much to speculate: for each session and step, K and the fan-out, or nothing at all.

Plans are compared by the goodput that ``prospects`` predicts; whether to speculate at all, and how long the
longest proposal is for which all wait, all sessions decide ``together``. How sure the draft is of each token,
only the draft sees. So it decides which outcomes get branches, which a fan-out by position alone (geometric
in SSD/Saguaro, arXiv 2603.03251, theorem 12) does not; and a proposal ends where the draft believes too
little of it, K being only the most that it may have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specray.config import SpeculationConfig
from specray.control.cost_model import Measured
from specray.control.decisions import Decisions
from specray.control.estimators import Rate, chain_trials
from specray.control.expected import prior_hit_rate
from specray.control.experiments import Trials
from specray.control.mode import Together
from specray.control.probes import PROBE_ROUNDS, Probes
from specray.control.prospects import ANY_K, HYSTERESIS, Prospects
from specray.control.state import OFF, OFF_REVIEW_ROUNDS, REVIEW_ROUNDS, Judged, Pacing, Plan
from specray.metrics.router import RouterMetrics
from specray.requests import GenerateRequest
from specray.router.session_values import Lookup
from specray.router.trace import Trace
from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind, Overlap

PRIOR_ACCEPTANCE = 0.7
ACCEPTANCE_FADING = 0.998
"""Per round, of what new sessions start from: some hundred rounds, so that no single session makes it."""
PRIOR_CONTINUATION = 0.95
PRIOR_JUDGED_DRAFTS, PRIOR_JUDGED_ACCEPTED = 8.0, 4.0
"""Of a proposal that the draft ends. The pair of docs/peers.md comes to about 11 and 7.5 at temperature 0."""
RELAXATION = 0.05
"""Of what was measured, in the time of one session's review, however many sessions have theirs meanwhile."""
MAX_NEXT_TOKENS = 8
"""For one number of accepted tokens; what lies behind them is hardly ever drawn."""
FAILED_DRAFT_REST_ROUNDS = 16
MIN_PREFILL = 16
"""Prompt tokens that join every step, whatever they cost: a prompt must get on."""


class Policy:
    """Chooses plans from configuration, request and measurements. Holds no session.

    Args:
        config: the ``speculation`` section.
        trace: told of reviews and decisions; None: nobody is.
        metrics: told of decisions; None: nobody is.
        source: what drafts under its plans.
        prior_acceptance: per token, until some have been verified; in (0, 1).
        measured: what is known of the engines; None: nothing.

    Attributes:
        measured: told by whoever sees the engines work.
        together: what all decide; told by whoever sees steps end.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        trace: Trace | None = None,
        metrics: RouterMetrics | None = None,
        source: str = DraftKind.MODEL.value,
        prior_acceptance: float = PRIOR_ACCEPTANCE,
        measured: Measured | None = None,
    ) -> None:
        fixed = config.num_speculative_tokens
        self._config = config
        self._trace = trace
        self._source = source
        self._is_model = source == DraftKind.MODEL.value
        self._fixed_k = None if fixed == "auto" else fixed
        self._acceptance = Rate(prior_acceptance, weight=4.0, fading=ACCEPTANCE_FADING)
        self._continuation = Rate(PRIOR_CONTINUATION, weight=4.0, fading=ACCEPTANCE_FADING)
        self._judged = Judged(
            Rate(PRIOR_JUDGED_DRAFTS, weight=4.0, fading=ACCEPTANCE_FADING),
            Rate(PRIOR_JUDGED_ACCEPTED, weight=4.0, fading=ACCEPTANCE_FADING),
        )
        self.measured = Measured() if measured is None else measured
        self._prospects = Prospects(config, source, self.measured)
        self._probes = Probes(self._is_model)
        decisions = Decisions(metrics, trace)
        self.together = Together(trials=Trials(decisions.trial_ended), decisions=decisions)

    def beside(self, source: str, *, prior_acceptance: float) -> Policy:
        """A policy of its own for drafts that take no time and so never overlap; target times are shared.

        Args:
            source: what drafts so.
            prior_acceptance: per token, until some have been verified; in (0, 1).
        """
        serial = self._config.model_copy(update={"overlap": Overlap.SERIAL})
        measured = Measured(target=self.measured.target)
        return Policy(
            serial, trace=self._trace, source=source, prior_acceptance=prior_acceptance, measured=measured
        )

    def pace(self, request: GenerateRequest) -> Pacing:
        """The record of a new session; its acceptance starts where the service's stands."""
        wanted = request.speculation
        fixed = wanted.num_speculative_tokens if wanted.num_speculative_tokens is not None else self._fixed_k
        fixed_k = fixed if wanted.enabled else 0
        return Pacing(
            Rate(self._acceptance.value, weight=4.0),
            Rate(self._continuation.value, weight=4.0),
            self._judged.start(4.0),
            request.request_id,
            fixed_k,
            draft_is_judge=not request.sampling.draws_by_rejection,
        )

    def plan(self, pacing: Pacing, *, num_remaining: int, num_running: int, num_unread: int = 0) -> Plan:
        """The plan of the round to come.

        Args:
            pacing: of the session.
            num_remaining: output tokens that may still come; K stays below.
            num_running: sessions that share the steps.
            num_unread: tokens of the session that the draft has not been told.
        """
        pacing.num_remaining, pacing.num_unread = num_remaining, num_unread
        if pacing.fixed_k == 0 or num_remaining <= 1 or pacing.rest_rounds > 0:
            return OFF
        if pacing.plan is None or pacing.rounds_to_review <= 0 or self._is_overruled(pacing):
            self._decide(pacing, num_running)
            self._review(pacing, num_running)
        assert pacing.plan is not None
        plan = pacing.plan
        if plan.num_speculative_tokens < num_remaining:
            return plan
        return replace(plan, num_speculative_tokens=num_remaining - 1)

    def is_review_near(self, pacing: Pacing, num_running: int) -> bool:
        """With the next round a decision of all or a review of the session would be due."""
        if pacing.plan is None or pacing.fixed_k == 0:
            return False
        return (
            pacing.rounds_to_review <= 1
            or self._is_overruled(pacing)
            or (self._joins(pacing) and self.together.is_due(num_running))
        )

    def is_resting(self, pacing: Pacing) -> bool:
        """The session drafts nothing, and nothing is due: asked for each session in each round."""
        if pacing.fixed_k == 0:
            return True
        return pacing.plan is OFF and pacing.rounds_to_review > 0 and not self._is_overruled(pacing)

    def is_trying_plain(self, pacing: Pacing) -> bool:
        """The session's plan is left aside for a few steps, to see what that brings."""
        return self.together.is_trying_plain and self._joins(pacing)

    def prepare(
        self, pacing: Pacing, num_running: int, *, num_remaining: int | None = None, num_unread: int = 0
    ) -> None:
        """Decides and reviews what would be due with the next round, now, while no engine waits for it.

        Args:
            num_remaining, num_unread: as for ``plan``; None: as they were then.
        """
        if pacing.plan is None or pacing.fixed_k == 0:
            return
        if num_remaining is not None:
            pacing.num_remaining, pacing.num_unread = num_remaining, num_unread
        self._decide(pacing, num_running)
        if pacing.rounds_to_review <= 1 or self._is_overruled(pacing):
            self._review(pacing, num_running)

    def fanout(self, plan: Plan, num_drafts: int) -> tuple[int, ...]:
        """F_0..F_K for the proposal under verification; empty: the draft rests until the verdict."""
        if plan.is_off or plan.overlap is Overlap.SERIAL:
            return ()
        if plan.overlap is Overlap.AHEAD:
            return (0,) * num_drafts + (1,)
        return (MAX_NEXT_TOKENS,) * (num_drafts + 1)

    def patience_s(self) -> float | None:
        """How long a round may wait for the draft: four times what it usually takes. None: not measured."""
        if self.measured.draft.step_s(1) is None:
            return None
        proposal_s = (self._fixed_k or ANY_K) * self.measured.draft_step_s(1, 0.0)
        slowest_s = max(proposal_s, self.measured.slowest_outcomes_s)
        return max(0.05, 4 * (slowest_s + self.measured.round_trip_s))

    def verify_s(self, rows: int, num_sequences: int) -> float | None:
        """Expected seconds of a target step; None before the first measurement."""
        target = self.measured.target
        return target.predict(rows, num_sequences, is_overlapped=bool(target.rounds[True]))

    def prefill_room(self, num_rows: int, most: int, *, max_slowdown: float, num_running: int = 0) -> int:
        """Prompt tokens that may share a step with the running sessions.

        Args:
            num_rows: of the running sessions, >= 1.
            num_running: these sessions.
            most: that may be asked for, >= 1.
            max_slowdown: the step may take so many times as long as without the prompt tokens.

        Returns:
            In 1..most: what fits into that time, but never fewer than MIN_PREFILL.
        """
        target = self.measured.target
        times = target.of(is_overlapped=True)
        alone = times.least(num_rows)
        if alone is None:
            return most
        # What their contexts take is part of the step, and becomes no more.
        more_s = (max_slowdown - 1) * times.pace * target.context_s(num_running)
        room = (target.prompts or times).largest_within(max_slowdown * alone + more_s) - num_rows
        return min(most, max(MIN_PREFILL, room))

    def reading_room(self, most: int, *, num_rows: int, num_running: int, most_s: float) -> int:
        """Tokens that the draft may read in a step of those who run; as ``Measured.reading_room``."""
        step_s = self.verify_s(num_rows, num_running)
        if step_s is not None:
            # The draft works meanwhile where both overlap.
            step_s -= self.measured.slowest_outcomes_s
        return self.measured.reading_room(most, step_s=step_s, most_s=most_s)

    def rest(self, pacing: Pacing, num_rounds: int) -> None:
        """Plans no draft for the session's next rounds: the draft refused it, or was lost with it."""
        pacing.rest_rounds = num_rounds

    def put_off_probe(self, pacing: Pacing) -> None:
        """A probe of the session could not begin in this round; it loses none of its rounds."""
        if pacing.is_probing:
            pacing.rounds_to_review += 1

    # Measurements

    def observe_round(
        self, pacing: Pacing, num_drafts: int, num_accepted: int, *, has_filler: bool = False
    ) -> None:
        """One verdict of a session; ``has_filler``: on draft tokens that are not counted here."""
        pacing.rounds_to_review -= 1
        if pacing.rest_rounds:
            pacing.rest_rounds -= 1
        self._probes.add(is_used=num_drafts > 0 and not pacing.is_probing)
        # Without a draft nothing is planned, and nobody would decide and forget. While plain decoding is
        # tried nothing is planned for newcomers: they take part, or the trial would wait for their end.
        takes_part = pacing.plan is not None or self.together.is_trying_plain
        if takes_part and self._joins(pacing):
            self.together.add(pacing, is_drafted=has_filler or num_drafts > 0)
        if num_drafts == 0:
            pacing.rounds_off += 1
        else:
            pacing.rounds_off = 0
            trials = chain_trials(num_drafts, num_accepted)
            pacing.acceptance.add(num_accepted, trials)
            self._acceptance.add(num_accepted, trials)
            if pacing.num_asked == ANY_K:
                pacing.judged.add(num_drafts, num_accepted)
                self._judged.add(num_drafts, num_accepted)
            pacing.num_asked = 0

    def observe_proposed(self, pacing: Pacing, num_asked: int, num_drafts: int) -> None:
        """How far the draft went under a bound, of the tokens that it was asked for at most."""
        pacing.num_asked = num_asked
        num_further = max(0, num_drafts - 1)
        num_trials = num_further + (0 < num_drafts < num_asked)
        for rate in (pacing.continuation, self._continuation):
            rate.add(num_further, num_trials)

    def observe_lookup(self, plan: Plan, lookup: Lookup) -> None:
        """What outcomes asked under ``plan`` were good for."""
        if plan.overlap is Overlap.ENUMERATE:
            rate = self.measured.hit_rate.get(plan.width)
            if rate is None:
                prior = prior_hit_rate(plan.width, self._acceptance.value)
                rate = self.measured.hit_rate[plan.width] = Rate(prior)
            rate.add(int(lookup is Lookup.HIT), 1)

    def goodput(self, plan: Plan, pacing: Pacing, num_running: int) -> float:
        """Predicted tokens per second of one session under ``plan``."""
        return self._prospects.goodput(plan, pacing, num_running)

    # Choice

    def _joins(self, pacing: Pacing) -> bool:
        """The session speculates or not as all do. Drafts at no cost keep nobody waiting."""
        return self._is_model and pacing.fixed_k is None

    def _decide(self, pacing: Pacing, num_running: int) -> None:
        """Whether all speculate, and how far, when that is due."""
        if not self._joins(pacing) or not self.together.is_due(num_running):
            return
        together = self.together
        promised = self._prospects.gain(together.take_mean(pacing), num_running)
        if promised is None:
            return
        together.decide(promised, num_running)
        sessions = together.sample or (pacing,)
        shares = num_running > 1 and together.is_on
        together.agree(self._prospects.best_for_all(sessions, num_running, together.plan) if shares else None)

    def _joint(self, pacing: Pacing) -> Plan | None:
        """What all do; None where each does as it likes, and where the session does otherwise."""
        return self.together.plan if self._joins(pacing) and not pacing.is_probing else None

    def _is_overruled(self, pacing: Pacing) -> bool:
        """All decided otherwise since its last review."""
        return pacing.num_turns != self.together.num_turns and self._joins(pacing)

    def _review(self, pacing: Pacing, num_running: int) -> None:
        pacing.num_turns = self.together.num_turns
        # A probe is a look, not a change of plan.
        current = OFF if pacing.is_probing else pacing.plan
        pacing.is_probing = (
            pacing.fixed_k is None and current == OFF and self._is_probe_due(pacing, num_running)
        )
        plans = self._allowed(pacing)
        if pacing.is_probing:
            self._probes.begin()
            plan = self._prospects.best(plans, pacing, num_running)
        else:
            plan = self._choose(plans, current, pacing, num_running)
        limit = self._prospects.with_bound if self._joint(pacing) is None else self._prospects.part_of
        pacing.plan = limit(plan, pacing, num_running)
        most = OFF_REVIEW_ROUNDS if plan.is_off else REVIEW_ROUNDS
        pacing.rounds_to_review = PROBE_ROUNDS if pacing.is_probing else min(most, pacing.review_rounds)
        pacing.review_rounds = min(most, 2 * pacing.review_rounds)
        if self._trace is not None:
            self._tell(self._trace, pacing, num_running)

    def _allowed(self, pacing: Pacing) -> list[Plan]:
        """What all decided leaves to a session; what a probe may be."""
        if pacing.fixed_k is not None:
            return self._prospects.plans(pacing)
        is_decided = self._joins(pacing) and self.together.is_on is not None
        if is_decided and not self.together.is_on and not pacing.is_probing:
            return [OFF]
        plans = self._prospects.plans(pacing)
        return [plan for plan in plans if not plan.is_off] if is_decided or pacing.is_probing else plans

    def _choose(self, plans: Sequence[Plan], current: Plan | None, pacing: Pacing, num_running: int) -> Plan:
        if pacing.fixed_k is None or len(plans) > 1:
            self._relax(RELAXATION / max(1, num_running))
            if current is not None and current.num_speculative_tokens != ANY_K:
                pacing.judged.relax(RELAXATION)
        joint = self._joint(pacing)
        best = plans[0] if joint is None else joint
        if joint is None and len(plans) > 1:
            best = self._prospects.best(plans, pacing, num_running)
        if current is None or best in (current, OFF):
            return best
        if current.is_off:
            return best if self._pays_back(pacing, num_running) else OFF
        if joint is not None:
            return joint
        # Speculation is left as soon as it promises too little; any other change must be worth it.
        expected, promised = (self.goodput(plan, pacing, num_running) for plan in (current, best))
        return best if promised > HYSTERESIS * expected else current

    def _tell(self, trace: Trace, pacing: Pacing, num_running: int) -> None:
        plan = pacing.plan
        assert plan is not None, "a plan was chosen"
        best: dict[str, float] = {}
        if self.measured.verify_s(num_running, num_running) is not None:
            for candidate in self._prospects.plans(pacing):
                tokens_per_s = self._prospects.goodput(candidate, pacing, num_running)
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

    def _is_probe_due(self, pacing: Pacing, num_running: int) -> bool:
        def num_reading_steps() -> float:
            step_s = self.measured.verify_s(num_running, num_running) or 0.0
            return self._reading_s(pacing) / step_s if step_s > 0 else 0.0

        return self._probes.is_due(
            pacing.rounds_off, num_running=num_running, num_reading_steps=num_reading_steps
        )

    def _pays_back(self, pacing: Pacing, num_running: int) -> bool:
        """What is left of the session is worth that the draft first reads what it has not been told."""
        reading_s = self._reading_s(pacing)
        if reading_s <= 0.0:
            return True
        plain_s = pacing.num_remaining / self.measured.plain_goodput(num_running)
        return plain_s * (1 - 1 / self.together.gain) > reading_s

    def _reading_s(self, pacing: Pacing) -> float:
        """What the draft needs for that: about what a step of so many sequences takes."""
        if not self._is_model or pacing.num_unread <= 1 + MAX_SPECULATIVE_TOKENS:
            return 0.0
        return self.measured.draft_step_s(pacing.num_unread, 0.0)

    def _relax(self, share: float) -> None:
        """What was measured of ways of working that were left since becomes less certain."""
        self.measured.outcomes.relax(share)
        for rate in self.measured.hit_rate.values():
            rate.relax(share)
