"""Chooses each session's plan for the draft model: K and the fan-out, or no speculation, from measurements.

Plans are compared by their goodput (``goodput``). Whether to speculate at all, and the longest proposal that
all wait for, is decided for all sessions together (``mode``). Only the draft sees how sure it is of a token.
So it chooses which outcomes get branches, which a fan-out by position alone (geometric in SSD/Saguaro, arXiv
2603.03251, theorem 12) does not; and it ends a proposal that is too unlikely to be accepted, K being only the
largest length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specray.config import SpeculationConfig
from specray.control.cost_model import CostModel
from specray.control.draft_length import DECAY, PRIOR_ACCEPTANCE, DraftLength
from specray.control.experiments import Experiments, Exploration
from specray.control.goodput import ANY_K, HYSTERESIS, MIN_SPEEDUP
from specray.control.mode import KEEP_SPEEDUP, ModeController
from specray.control.overlap import OverlapChoice
from specray.control.state import OFF, OFF_BY_REASON, Observer, Plan, Reason, SessionStats
from specray.control.trees import with_branches
from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind, Overlap

MAX_NEXT_TOKENS = 8
"""Fan-out per number of accepted tokens; less likely tokens are hardly ever drawn."""
MAX_TRY_SHARE = 0.01
"""Largest share of the time without the draft that is lost to asking it where it was not worth its steps."""
NUM_FIRST_TRIES = 8
"""Rounds of the service in which the draft is asked whatever it promises: nothing was measured of it."""
FEW_ROUNDS_OFF = 4
"""Rounds of the only session without the draft after which asking it again must promise MIN_SPEEDUP, and is
considered once in as many: to consider it takes a tenth of a millisecond, while the target works."""
REFUSED_REST_ROUNDS = 16
"""Rounds for which a draft that refused a session is not asked for it: as long as a plan holds."""


class Controller(DraftLength):
    """Chooses plans of a draft model, and knows what other sources choose theirs from; one per Router.

    Attributes:
        cost_model: receives the measured times of both engines.
        modes: the mode of all sessions; receives the end of each step.
    """

    def __init__(self, config: SpeculationConfig, *, observer: Observer | None = None) -> None:
        self._overlap = OverlapChoice(config, observer)
        super().__init__(
            config,
            DraftKind.MODEL.value,
            CostModel(),
            prior_acceptance=PRIOR_ACCEPTANCE,
            observer=observer,
        )
        self.modes = ModeController(experiments=Experiments(observer), observer=observer)
        self._exploration = Exploration()
        self._lengths: list[DraftLength] = []
        self._num_asked = 0
        self._num_since_asked = 0

    def configure(self, config: SpeculationConfig) -> None:
        """See DraftLength; also the lengths of other sources. An overlap that is not allowed any more ends
        with a session's next plan."""
        self._overlap.configure(config)
        super().configure(config)
        self._set_overlaps()
        self.modes.set_plan(None)
        for length in self._lengths:
            length.configure(config.without_overlap)

    def length_of(self, source: str, *, prior_acceptance: float) -> DraftLength:
        """The choice of K for drafts that take no time and so never overlap; target times are shared.

        Args:
            source: what drafts so.
            prior_acceptance: per token, until some have been verified; in (0, 1).
        """
        length = DraftLength(
            self._config.without_overlap,
            source,
            CostModel(target=self.cost_model.target),
            prior_acceptance=prior_acceptance,
            observer=self._observer,
        )
        self._lengths.append(length)
        return length

    def allow_overlap(self, is_allowed: bool) -> None:
        """Takes whether the draft at hand may work while the target does, where that is chosen (``auto``)."""
        if self._overlap.allow(is_allowed):
            self._set_overlaps()
            self.modes.reopen()

    def _set_overlaps(self) -> None:
        if self._overlap.is_auto:
            self._goodput.overlaps = self._overlap.overlaps

    @property
    def is_serial(self) -> bool:
        """Draft and target take turns."""
        return not self._overlap.is_overlapped

    @property
    def max_k(self) -> int:
        """Largest K that the configuration allows a plan."""
        return self._fixed_k or ANY_K

    # Plans

    def plan(self, stats: SessionStats, *, num_remaining: int, num_running: int, num_unread: int = 0) -> Plan:
        """See DraftLength.

        Args:
            num_unread: tokens of the session that the draft was not sent.
        """
        is_alone = _is_alone(stats, num_running)
        if self.modes.is_trying_plain and _joins(stats) and not is_alone:
            return OFF_BY_REASON[Reason.EXPERIMENT]
        stats.num_remaining, stats.num_unread = num_remaining, num_unread
        if stats.rest_rounds > 0:
            return OFF_BY_REASON[Reason.REFUSED]
        if is_alone and stats.plan is not None and stats.plan.is_off:
            # It was made when all decided together.
            stats.rounds_to_replan = 0
        plan = super().plan(stats, num_remaining=num_remaining, num_running=num_running)
        if plan.is_off or not is_alone:
            return plan
        return self._alone(plan, stats)

    def _alone(self, plan: Plan, stats: SessionStats) -> Plan:
        """The plan of a round of the only session: off where asking the draft is not worth its time.

        Where it has not been for long, it is asked all the same once in a while.
        """
        plain_s = self.cost_model.verify_s(1, 1)
        if plain_s is None:
            return plan
        tokens, seconds = self.asked(plan, stats, 1)
        if plan.overlap is not Overlap.SERIAL and stats.rounds_since_ngram >= FEW_ROUNDS_OFF:
            # What follows is prepared meanwhile.
            seconds = tokens / self.goodput(plan, stats, 1)
        # The first prompt it reads while the target does.
        read_s = self._draft_prefill_s(stats) if stats.rounds_off else 0.0
        rate = self.rate(plan, stats, 1)
        margin = KEEP_SPEEDUP if stats.rounds_off < FEW_ROUNDS_OFF else MIN_SPEEDUP
        gain = tokens - 1 - rate * (margin * seconds - plain_s)
        # What it reads first serves all rounds that are left.
        if gain > rate * read_s * min(1.0, tokens / max(1, stats.num_remaining)):
            return plan
        lost_s = read_s - gain / rate
        # At best all its tokens are accepted.
        most = gain + 1 + plan.num_speculative_tokens - tokens if plan.tree is None else gain
        is_unknown = self._num_asked < NUM_FIRST_TRIES and most > 0
        # Of all sessions: a short one could never afford to ask.
        may_try = lost_s <= MAX_TRY_SHARE * self._num_since_asked * plain_s
        if is_unknown or may_try:
            return replace(plan, reason=Reason.EXPLORATION)
        if stats.rounds_off >= FEW_ROUNDS_OFF:
            # A plan that is not used does not age.
            stats.rounds_to_ask = FEW_ROUNDS_OFF
            stats.rounds_to_replan += FEW_ROUNDS_OFF
        return OFF

    def asked(self, plan: Plan, stats: SessionStats, num_running: int) -> tuple[float, float]:
        """Tokens that a round commits for which the draft is asked first, and its seconds."""
        tokens, seconds = self._goodput.asked(plan, stats, num_running)
        if plan.tree is None:
            return tokens, seconds
        # A tree was chosen for promising that much more.
        more = with_branches(tokens, stats)
        return more, more / tokens * seconds / HYSTERESIS

    def rate(self, plan: Plan, stats: SessionStats, num_running: int) -> float:
        """Tokens per second that a second of the session brings, against which a round is held.

        Measured where it runs alone; predicted for its plan where it shares steps.
        """
        predicted = self.goodput(plan, stats, num_running)
        if num_running > 1:
            return predicted
        return stats.rate.value(max(predicted, self._goodput.plain_goodput(num_running)))

    def resting_plan(self, stats: SessionStats, num_running: int) -> Plan | None:
        """The plan of a session without speculation and with nothing due; None: ``plan`` is to be called.

        Cheap: each round asks for it for each session.
        """
        if stats.fixed_k == 0:
            return OFF_BY_REASON[Reason.FIXED]
        if _is_alone(stats, num_running):
            return OFF if stats.rounds_to_ask > 0 else None
        is_resting = stats.plan is OFF and stats.rounds_to_replan > 0 and not self._is_outdated(stats)
        return OFF if is_resting else None

    def is_replan_near(self, stats: SessionStats, num_running: int) -> bool:
        """True if, with the next round, a decision of all or a re-plan of the session would be due."""
        if stats.plan is None or stats.fixed_k == 0:
            return False
        return (
            stats.rounds_to_replan <= 1
            or self._is_outdated(stats)
            or (self._shares(stats, num_running) and self.modes.is_due(num_running))
        )

    def prepare(
        self, stats: SessionStats, num_running: int, *, num_remaining: int | None = None, num_unread: int = 0
    ) -> None:
        """Decides and re-plans what is due with the next round, while no engine waits for it.

        Args:
            num_remaining, num_unread: as for ``plan``; None: as they were then.
        """
        if stats.plan is None or stats.fixed_k == 0:
            return
        if num_remaining is not None:
            stats.num_remaining, stats.num_unread = num_remaining, num_unread
        self._decide(stats, num_running)
        if stats.rounds_to_replan <= 1 or self._is_outdated(stats):
            self._replan(stats, num_running)

    def fanout(self, plan: Plan, num_drafts: int, num_others: int = 0) -> tuple[int, ...]:
        """F_0..F_K for the proposal under verification; empty: the draft rests until the verdict.

        Args:
            num_others: nodes of a tree besides its first chain, which has ``num_drafts``.
        """
        if plan.is_off or plan.overlap is Overlap.SERIAL:
            return ()
        if plan.overlap is Overlap.AHEAD:
            return (0,) * num_drafts + (1,)
        return (MAX_NEXT_TOKENS,) * (1 + num_drafts + num_others)

    # Measurements

    def observe_round(
        self, stats: SessionStats, num_drafts: int, num_accepted: int, *, has_ngram: bool = False
    ) -> None:
        """See DraftLength; ``has_ngram``: a verdict on draft tokens that are not counted here."""
        if stats.rest_rounds:
            stats.rest_rounds -= 1
        if stats.rounds_to_ask:
            stats.rounds_to_ask -= 1
        stats.rounds_since_ngram = 0 if has_ngram else stats.rounds_since_ngram + 1
        self._num_asked += num_drafts > 0
        self._num_since_asked = 0 if num_drafts else self._num_since_asked + 1
        self._exploration.add(is_used=num_drafts > 0 and not stats.is_exploring)
        # Without a draft nothing is planned, and nobody would decide and forget. While plain decoding is
        # tried nothing is planned for newcomers: they take part, or the experiment would wait for their end.
        takes_part = stats.plan is not None or self.modes.is_trying_plain
        if takes_part and _joins(stats):
            self.modes.add(stats, is_drafted=has_ngram or num_drafts > 0)
        super().observe_round(stats, num_drafts, num_accepted)

    def observe_pace(
        self, stats: SessionStats, num_tokens: int, seconds: float, *, num_running: int, plan: Plan | None
    ) -> None:
        """Takes the seconds since the session's last commit, and the tokens of this one.

        Args:
            plan: of the round; None: something else than the draft model has drafted.
        """
        stats.rate.add(num_tokens, seconds)
        is_drafted = plan is not None and (not plan.is_off or plan.reason is Reason.STALLED)
        if is_drafted and stats.promised > 0:
            self._overlap.observe(num_tokens, stats.promised * seconds, num_running)
        is_known = stats.fixed_k != 0 and self.cost_model.verify_s(num_running, num_running) is not None
        if not is_known or not self._overlap.is_due(num_running, is_drafted=is_drafted):
            return
        turns, overlapped = self._goodput.by_way(stats, num_running)
        if self._overlap.decide(overlapped / turns, num_running):
            self._set_overlaps()
            self.modes.reopen()

    def observe_proposal(self, stats: SessionStats, num_asked: int, num_drafts: int) -> None:
        """Takes the length of a proposal under a bound, for which ``num_asked`` tokens were asked at most."""
        self._rates_of(stats.adapter).observe_proposal(stats, num_asked, num_drafts)

    def observe_lookup(self, plan: Plan, *, is_hit: bool) -> None:
        """Takes whether a verdict was among the outcomes asked under ``plan``."""
        if plan.overlap is Overlap.ENUMERATE:
            self.cost_model.observe_lookup(plan.width, self._rates.acceptance.value, is_hit=is_hit)

    def observe_refusal(self, stats: SessionStats, *, is_final: bool = False) -> None:
        """The draft refused the session; ``is_final``: it is not asked again for this session."""
        stats.rest_rounds = 1 << 60 if is_final else REFUSED_REST_ROUNDS

    def postpone_exploration(self, stats: SessionStats) -> None:
        """The draft could not be asked in this round: an exploration has not begun yet."""
        stats.rounds_to_replan += stats.is_exploring

    # Choice

    def _replan(self, stats: SessionStats, num_running: int) -> None:
        self._decide(stats, num_running)
        stats.num_changes = self.modes.num_changes
        super()._replan(stats, num_running)
        if self._overlap.is_open:
            is_known = self.cost_model.verify_s(num_running, num_running) is not None
            stats.promised = self._goodput.by_way(stats, num_running)[0] if is_known else 0.0

    def _decide(self, stats: SessionStats, num_running: int) -> None:
        modes = self.modes
        if not self._shares(stats, num_running) or not modes.is_due(num_running):
            return
        predicted = self._goodput.speedup(modes.take_mean(stats), num_running)
        if predicted is None:
            return
        modes.decide(predicted, num_running)
        shares = num_running > 1 and modes.uses_model
        sample = modes.sample or (stats,)
        modes.set_plan(self._goodput.best_for_all(sample, num_running, modes.plan) if shares else None)

    @staticmethod
    def _shares(stats: SessionStats, num_running: int) -> bool:
        return _joins(stats) and num_running > 1

    def _is_outdated(self, stats: SessionStats) -> bool:
        """Mode, overlap or plan of all have changed since the session's last re-plan."""
        return stats.num_changes != self.modes.num_changes and stats.fixed_k != 0

    def _explores(self, stats: SessionStats, num_running: int) -> bool:
        def num_prefill_steps() -> float:
            step_s = self.cost_model.verify_s(num_running, num_running) or 0.0
            return self._draft_prefill_s(stats) / step_s if step_s > 0 else 0.0

        if num_running == 1:
            return False
        is_due = self._exploration.is_due(
            stats.rounds_off, num_running=num_running, num_prefill_steps=num_prefill_steps
        )
        if is_due:
            self._exploration.begin()
        return is_due

    def _joint(self, stats: SessionStats, num_running: int) -> Plan | None:
        if not self._shares(stats, num_running) or stats.is_exploring or not self.modes.uses_model:
            # After an experiment's window with the model its plan stands until the next decision.
            return None
        return self.modes.plan

    def _allowed(self, stats: SessionStats, num_running: int) -> list[Plan]:
        plans = super()._allowed(stats, num_running)
        if _is_alone(stats, num_running):
            # Whether it is worth asking, each round decides.
            return [plan for plan in plans if not plan.is_off]
        if not _joins(stats) or stats.is_exploring or self.modes.uses_model is None:
            return plans
        return [plan for plan in plans if not plan.is_off] if self.modes.uses_model else [OFF]

    def _choose(
        self, plans: Sequence[Plan], current: Plan | None, stats: SessionStats, num_running: int
    ) -> Plan:
        if stats.fixed_k is None or len(plans) > 1:
            self.cost_model.decay(DECAY / max(1, num_running))
        return super()._choose(plans, current, stats, num_running)

    def _reason(self, stats: SessionStats, num_running: int) -> Reason:
        is_tried = self._shares(stats, num_running) and self.modes.is_trying_model
        if is_tried and not stats.is_exploring:
            return Reason.EXPERIMENT
        return super()._reason(stats, num_running)

    def _pays_back(self, stats: SessionStats, num_running: int) -> bool:
        prefill_s = self._draft_prefill_s(stats)
        if prefill_s <= 0.0 or _is_alone(stats, num_running):
            return True
        plain_s = stats.num_remaining / self._goodput.plain_goodput(num_running)
        return plain_s * (1 - 1 / self.modes.calibrated_speedup) > prefill_s

    def _draft_prefill_s(self, stats: SessionStats) -> float:
        """Seconds of the draft's prefill of unread tokens: about a step of as many sequences."""
        if stats.num_unread <= 1 + MAX_SPECULATIVE_TOKENS:
            return 0.0
        return self.cost_model.draft_step_s(stats.num_unread, 0.0)


def _joins(stats: SessionStats) -> bool:
    return stats.fixed_k is None


def _is_alone(stats: SessionStats, num_running: int) -> bool:
    """Nobody waits for the session's draft but itself: its rounds are its own affair."""
    return _joins(stats) and num_running == 1
