"""Chooses each session's plan: K and the fan-out, or no speculation, from measurements.

Plans are compared by their goodput (``goodput``). Whether to speculate at all, and the longest proposal that
all wait for, is decided for all sessions together (``mode``). Only the draft sees how sure it is of a token.
So it chooses which outcomes get branches, which a fan-out by position alone (geometric in SSD/Saguaro, arXiv
2603.03251, theorem 12) does not; and it ends a proposal that is too unlikely to be accepted, K being only the
largest length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specray.config import SpeculationConfig
from specray.control.cost_model import CostModel
from specray.control.experiments import EXPLORATION_ROUNDS, Experiments, Exploration
from specray.control.goodput import ANY_K, HYSTERESIS, GoodputModel
from specray.control.mode import ModeController
from specray.control.service_rates import PRIOR_ACCEPTANCE, ServiceRates
from specray.control.simple import SimpleModel
from specray.control.state import (
    OFF,
    OFF_BY_REASON,
    OFF_REPLAN_ROUNDS,
    REPLAN_ROUNDS,
    Observer,
    Plan,
    Reason,
    SessionStats,
    TreeVerdict,
)
from specray.control.trees import PRIORS_BY_KIND, TreeChoice
from specray.requests import GenerateRequest
from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind, Overlap

DECAY = 0.05
"""Share of measurements forgotten in the time in which one session is re-planned once, however many are."""
MAX_NEXT_TOKENS = 8
"""Fan-out per number of accepted tokens; tokens behind these are hardly ever drawn."""
REFUSED_REST_ROUNDS = 16
"""Rounds for which a draft that refused a session is not asked for it."""
_FOR_EVER = 1 << 60


class Controller:
    """Chooses plans from configuration, request and measurements. Holds no session.

    Args:
        config: the ``speculation`` section.
        observer: told of plans, decisions and experiments; None: nobody is.
        source: what drafts under its plans.
        prior_acceptance: per token, until some have been verified; in (0, 1).
        cost_model: what is known of the engines; None: nothing.

    Attributes:
        cost_model: told by whoever sees the engines work.
        modes: the mode of all sessions; told by whoever sees steps end.
    """

    def __init__(
        self,
        config: SpeculationConfig,
        *,
        observer: Observer | None = None,
        source: str = DraftKind.MODEL.value,
        prior_acceptance: float = PRIOR_ACCEPTANCE,
        cost_model: CostModel | None = None,
    ) -> None:
        self._observer = observer
        self._source = source
        self._is_model = source == DraftKind.MODEL.value
        self._rates = ServiceRates(prior_acceptance, *PRIORS_BY_KIND[self._is_model])
        self.cost_model = CostModel() if cost_model is None else cost_model
        self._is_simple = self._is_model and config.control == "simple"
        self._set(config)
        self._exploration = Exploration(self._is_model)
        self.modes = ModeController(
            experiments=Experiments(observer), observer=observer, has_ngram=not self._is_simple
        )

    def configure(self, config: SpeculationConfig) -> None:
        """Plans by other settings from now on; ``control`` stays. What was measured stays, too.

        K of sessions that have begun stays as it was; an overlap that is not allowed any more ends with their
        next plan.
        """
        self._set(config)
        self.modes.set_plan(None)

    def _set(self, config: SpeculationConfig) -> None:
        fixed = config.num_speculative_tokens
        self._config = config
        self._fixed_k = None if fixed == "auto" else fixed
        model = SimpleModel if self._is_simple else GoodputModel
        self._goodput = model(config, self._source, self.cost_model)
        self._trees = TreeChoice(config, self._goodput, self.cost_model, source=self._source)

    def beside(self, source: str, *, prior_acceptance: float) -> Controller:
        """A controller for drafts that take no time and so never overlap; target times are shared.

        Args:
            source: what drafts so.
            prior_acceptance: per token, until some have been verified; in (0, 1).
        """
        return Controller(
            self._config.without_overlap,
            observer=self._observer,
            source=source,
            prior_acceptance=prior_acceptance,
            cost_model=CostModel(target=self.cost_model.target),
        )

    @property
    def max_k(self) -> int:
        """Largest K that the configuration allows a plan."""
        return self._fixed_k or ANY_K

    def fixed_k(self, request: GenerateRequest) -> int | None:
        """K that the request or the configuration sets; None: it is chosen by measurement."""
        wanted = request.speculation
        if not wanted.enabled:
            return 0
        return self._fixed_k if wanted.num_speculative_tokens is None else wanted.num_speculative_tokens

    def start_session(self, request: GenerateRequest, *, is_auto: bool = False) -> SessionStats:
        """Statistics of a new session; its acceptance starts from the service's.

        Args:
            is_auto: K is chosen by measurement even where it is fixed, unless it is 0.
        """
        fixed_k = self.fixed_k(request)
        return self._rates.start_session(request, None if is_auto and fixed_k else fixed_k)

    # Plans

    def plan(self, stats: SessionStats, *, num_remaining: int, num_running: int, num_unread: int = 0) -> Plan:
        """The plan of the next round.

        Args:
            stats: of the session.
            num_remaining: output tokens that may still come; K stays below.
            num_running: sessions that share the steps.
            num_unread: tokens of the session that the draft has not been told.
        """
        if self.modes.is_trying_plain and self._joins(stats):
            return OFF_BY_REASON[Reason.EXPERIMENT]
        stats.num_remaining, stats.num_unread = num_remaining, num_unread
        if stats.fixed_k == 0:
            return OFF_BY_REASON[Reason.FIXED]
        if num_remaining <= 1:
            return OFF_BY_REASON[Reason.LAST_TOKEN]
        if stats.rest_rounds > 0:
            return OFF_BY_REASON[Reason.REFUSED]
        if stats.plan is None or stats.rounds_to_replan <= 0 or self._is_outdated(stats):
            self._decide(stats, num_running)
            self._replan(stats, num_running)
        assert stats.plan is not None
        plan = stats.plan
        if plan.num_speculative_tokens < num_remaining:
            return plan
        return replace(plan, num_speculative_tokens=num_remaining - 1)

    def resting_plan(self, stats: SessionStats) -> Plan | None:
        """The plan of a session without speculation and with nothing due; None: ``plan`` is to be called.

        Cheap: it is asked for each session in each round.
        """
        if stats.fixed_k == 0:
            return OFF_BY_REASON[Reason.FIXED]
        is_resting = stats.plan is OFF and stats.rounds_to_replan > 0 and not self._is_outdated(stats)
        return OFF if is_resting else None

    def is_replan_near(self, stats: SessionStats, num_running: int) -> bool:
        """True if, with the next round, a decision of all or a re-plan of the session would be due."""
        if stats.plan is None or stats.fixed_k == 0:
            return False
        return (
            stats.rounds_to_replan <= 1
            or self._is_outdated(stats)
            or (self._joins(stats) and self.modes.is_due(num_running))
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

    def best_plan(self, plans: Sequence[Plan], stats: SessionStats, num_running: int) -> Plan:
        """The plan of the highest goodput; OFF, which must be among them, where no other gains enough."""
        return self._goodput.best(plans, stats, num_running)

    def goodput(self, plan: Plan, stats: SessionStats, num_running: int) -> float:
        """Predicted tokens per second of one session under ``plan``."""
        return self._goodput.goodput(plan, stats, num_running)

    # Measurements

    def observe_round(
        self, stats: SessionStats, num_drafts: int, num_accepted: int, *, has_ngram: bool = False
    ) -> None:
        """Takes a verdict of a session; ``has_ngram``: on draft tokens that are not counted here.

        Of a tree, that on its first chain.
        """
        stats.rounds_to_replan -= 1
        if stats.rest_rounds:
            stats.rest_rounds -= 1
        self._exploration.add(is_used=num_drafts > 0 and not stats.is_exploring)
        # Without a draft nothing is planned, and nobody would decide and forget. While plain decoding is
        # tried nothing is planned for newcomers: they take part, or the experiment would wait for their end.
        takes_part = stats.plan is not None or self.modes.is_trying_plain
        if takes_part and self._joins(stats):
            self.modes.add(stats, is_drafted=has_ngram or num_drafts > 0)
        if num_drafts == 0:
            stats.rounds_off += 1
            return
        stats.rounds_off = 0
        self._rates.observe_verdict(stats, num_drafts, num_accepted)

    def observe_tree(self, stats: SessionStats, verdict: TreeVerdict) -> None:
        """Takes a verdict on all of a tree."""
        self._rates.observe_tree(stats, verdict)

    def observe_proposal(self, stats: SessionStats, num_asked: int, num_drafts: int) -> None:
        """Takes the length of a proposal under a bound, for which ``num_asked`` tokens were asked at most."""
        self._rates.observe_proposal(stats, num_asked, num_drafts)

    def observe_lookup(self, plan: Plan, *, is_hit: bool) -> None:
        """Takes whether a verdict was among the outcomes asked under ``plan``."""
        if plan.overlap is Overlap.ENUMERATE:
            self.cost_model.observe_lookup(plan.width, self._rates.acceptance.value, is_hit=is_hit)

    def observe_refusal(self, stats: SessionStats, *, is_final: bool = False) -> None:
        """The draft refused the session; ``is_final``: it is not asked again for this session."""
        stats.rest_rounds = _FOR_EVER if is_final else REFUSED_REST_ROUNDS

    def postpone_exploration(self, stats: SessionStats) -> None:
        """The draft could not be asked in this round: an exploration has not begun yet."""
        stats.rounds_to_replan += stats.is_exploring

    # Choice

    def _joins(self, stats: SessionStats) -> bool:
        """The session's speculation is decided for all. Drafts at no cost keep nobody waiting."""
        return self._is_model and stats.fixed_k is None

    def _decide(self, stats: SessionStats, num_running: int) -> None:
        """Decides the mode and the plan of all sessions, if that is due."""
        modes = self.modes
        if not self._joins(stats) or not modes.is_due(num_running):
            return
        predicted = self._goodput.speedup(modes.take_mean(stats), num_running)
        if predicted is None:
            return
        modes.decide(predicted, num_running)
        shares = num_running > 1 and modes.uses_model
        sample = modes.sample or (stats,)
        modes.set_plan(self._goodput.best_for_all(sample, num_running, modes.plan) if shares else None)

    def _joint(self, stats: SessionStats) -> Plan | None:
        """Plan of all; None where each session chooses its own, and for one that is apart."""
        if not self._joins(stats) or stats.is_exploring or not self.modes.uses_model:
            # After an experiment's window with the model its plan stands until the next decision.
            return None
        return self.modes.plan

    def _is_outdated(self, stats: SessionStats) -> bool:
        """Mode or plan of all have changed since the session's last re-plan."""
        return stats.num_changes != self.modes.num_changes and self._joins(stats)

    def _replan(self, stats: SessionStats, num_running: int) -> None:
        stats.num_changes = self.modes.num_changes
        current = OFF if stats.is_exploring else stats.plan
        if current is not None and not self._goodput.allows(current):
            current = None
        stats.is_exploring = (
            stats.fixed_k is None and current == OFF and self._is_exploration_due(stats, num_running)
        )
        plans = self._allowed(stats)
        if stats.is_exploring:
            self._exploration.begin()
            plan = self._goodput.best(plans, stats, num_running)
        else:
            plan = self._choose(plans, current, stats, num_running)
        limit = self._goodput.with_bound if self._joint(stats) is None else self._goodput.share_of
        chain = self._with_reason(limit(plan, stats, num_running), stats, num_running)
        stats.plan = self._trees.with_tree(chain, stats, num_running)
        most = OFF_REPLAN_ROUNDS if plan.is_off else REPLAN_ROUNDS
        stats.rounds_to_replan = EXPLORATION_ROUNDS if stats.is_exploring else min(most, stats.replan_rounds)
        stats.replan_rounds = min(most, 2 * stats.replan_rounds)
        if self._observer is not None:
            self._observer.replanned(
                stats,
                stats.plan,
                source=self._source,
                num_running=num_running,
                predict=lambda: self._predict(stats, num_running),
            )

    def _with_reason(self, plan: Plan, stats: SessionStats, num_running: int) -> Plan:
        if plan.is_off:
            return OFF
        if stats.fixed_k is not None:
            reason = Reason.FIXED
        elif stats.is_exploring:
            reason = Reason.EXPLORATION
        elif self._joins(stats) and self.modes.is_trying_model:
            reason = Reason.EXPERIMENT
        elif self.cost_model.verify_s(num_running, num_running) is None:
            reason = Reason.UNMEASURED
        else:
            reason = Reason.PROFITABLE
        return replace(plan, reason=reason)

    def _allowed(self, stats: SessionStats) -> list[Plan]:
        """Plans that the mode leaves to a session, or to its exploration."""
        if stats.fixed_k is not None:
            return self._goodput.plans(stats)
        is_decided = self._joins(stats) and self.modes.uses_model is not None
        if is_decided and not self.modes.uses_model and not stats.is_exploring:
            return [OFF]
        plans = self._goodput.plans(stats)
        return [plan for plan in plans if not plan.is_off] if is_decided or stats.is_exploring else plans

    def _choose(
        self, plans: Sequence[Plan], current: Plan | None, stats: SessionStats, num_running: int
    ) -> Plan:
        if stats.fixed_k is None or len(plans) > 1:
            self.cost_model.decay(DECAY / max(1, num_running))
            if current is not None and current.num_speculative_tokens != ANY_K:
                stats.bounded.decay(DECAY)
            if current is not None and current.tree is None:
                stats.tree.decay(DECAY)
        joint = self._joint(stats)
        best = plans[0] if joint is None else joint
        if joint is None and len(plans) > 1:
            best = self._goodput.best(plans, stats, num_running)
        if current is None or best in (current, OFF):
            return best
        if current.is_off:
            return best if self._pays_back(stats, num_running) else OFF
        if joint is not None:
            return joint
        # Speculation is left as soon as it promises too little; any other change must be worth it.
        kept, changed = (self.goodput(plan, stats, num_running) for plan in (current, best))
        return best if changed > HYSTERESIS * kept else current

    def _predict(self, stats: SessionStats, num_running: int) -> Mapping[str, float]:
        """Predicted tokens per second of the best plan by overlap label; empty while unmeasured."""
        best: dict[str, float] = {}
        if self.cost_model.verify_s(num_running, num_running) is not None:
            for plan in self._goodput.plans(stats):
                tokens_per_s = self.goodput(plan, stats, num_running)
                best[plan.overlap_label] = max(tokens_per_s, best.get(plan.overlap_label, 0.0))
        return best

    def _is_exploration_due(self, stats: SessionStats, num_running: int) -> bool:
        def num_prefill_steps() -> float:
            step_s = self.cost_model.verify_s(num_running, num_running) or 0.0
            return self._draft_prefill_s(stats) / step_s if step_s > 0 else 0.0

        if self._is_simple:
            return False
        return self._exploration.is_due(
            stats.rounds_off, num_running=num_running, num_prefill_steps=num_prefill_steps
        )

    def _pays_back(self, stats: SessionStats, num_running: int) -> bool:
        """The rest of the session is worth that the draft first reads what it has not been told."""
        prefill_s = self._draft_prefill_s(stats)
        if prefill_s <= 0.0:
            return True
        plain_s = stats.num_remaining / self._goodput.plain_goodput(num_running)
        return plain_s * (1 - 1 / self.modes.calibrated_speedup) > prefill_s

    def _draft_prefill_s(self, stats: SessionStats) -> float:
        """Seconds of the draft to read that: about a step of as many sequences."""
        if not self._is_model or stats.num_unread <= 1 + MAX_SPECULATIVE_TOKENS:
            return 0.0
        return self.cost_model.draft_step_s(stats.num_unread, 0.0)
