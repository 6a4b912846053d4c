"""The length of a proposal: K, or none, and whether it is a tree, for one source of draft tokens.

Drafts without a model cost nothing but their rows in the target's step, so acceptance and the times of target
steps decide. ``Controller`` adds what a draft model needs: its own time, and decisions of all sessions
together. This is the one place where K is clamped to what a session can still use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specray.config import SpeculationConfig
from specray.control.cost_model import CostModel
from specray.control.estimators import Rate, chain_trials
from specray.control.experiments import EXPLORATION_INTERVAL_ROUNDS, EXPLORATION_ROUNDS
from specray.control.goodput import ANY_K, HYSTERESIS, GoodputModel
from specray.control.state import (
    OFF,
    OFF_BY_REASON,
    OFF_REPLAN_ROUNDS,
    REPLAN_ROUNDS,
    BoundedProposalStats,
    Observer,
    Plan,
    Reason,
    SessionStats,
    TreeStats,
    TreeVerdict,
)
from specray.control.trees import PRIORS_BY_KIND, TreeChoice
from specray.requests import GenerateRequest
from specray.types import DraftKind

PRIOR_ACCEPTANCE = 0.7
"""Acceptance per draft token before any was verified."""
PRIOR_WEIGHT = 4.0
"""Weight of a prior, in trials."""
FADING = 0.998
"""Forgetting factor per round: no single session makes the rates that new ones start from."""
MAX_ADAPTERS = 256
"""Adapters whose rates are known at a time."""


class ServiceRates:
    """Takes each measurement for its session and for the service.

    Args:
        prior_acceptance: per token, until some have been verified; in (0, 1).
        prior_gain, prior_growth: of trees, until some have been verified: see ``TreeStats``.

    Attributes:
        acceptance: P(a draft token is accepted), given that those before it are.
    """

    def __init__(self, prior_acceptance: float, prior_gain: float, prior_growth: float) -> None:
        self.acceptance = _service_rate(prior_acceptance)
        self._tree = TreeStats(_service_rate(prior_gain), _service_rate(prior_growth))
        # Before any proposal; of one that only the draft ends, 4 tokens, 3 of them accepted.
        self._continuation = _service_rate(0.95)
        self._bounded = BoundedProposalStats(_service_rate(4.0), _service_rate(3.0))

    def copy(self) -> ServiceRates:
        """Rates that start from these, as far as priors count."""
        copied = ServiceRates(self.acceptance.value, self._tree.gain.value, self._tree.growth.value)
        copied._continuation = _service_rate(self._continuation.value)
        copied._bounded = self._bounded.start(PRIOR_WEIGHT, fading=FADING)
        return copied

    def start_session(self, request: GenerateRequest, fixed_k: int | None) -> SessionStats:
        """Statistics of a new session; these rates are its prior.

        Args:
            fixed_k: K that is set for it; None: it is chosen by measurement.
        """
        return SessionStats(
            Rate(self.acceptance.value, PRIOR_WEIGHT),
            Rate(self._continuation.value, PRIOR_WEIGHT),
            self._bounded.start(PRIOR_WEIGHT),
            self._tree.start(16.0),
            request.request_id,
            fixed_k,
            draft_knows_acceptance=not request.sampling.draws_by_rejection,
            adapter=request.sampling.adapter,
        )

    def observe_verdict(self, stats: SessionStats, num_drafts: int, num_accepted: int) -> None:
        """Takes a verdict on draft tokens of a session."""
        trials = chain_trials(num_drafts, num_accepted)
        stats.acceptance.add(num_accepted, trials)
        self.acceptance.add(num_accepted, trials)
        if stats.num_asked == ANY_K:
            stats.bounded.add(num_drafts, num_accepted)
            self._bounded.add(num_drafts, num_accepted)
        stats.num_asked = 0

    def observe_tree(self, stats: SessionStats, verdict: TreeVerdict) -> None:
        stats.tree.add(verdict)
        self._tree.add(verdict)

    def observe_proposal(self, stats: SessionStats, num_asked: int, num_drafts: int) -> None:
        """Takes the length of a proposal under a bound, for which ``num_asked`` tokens were asked at most."""
        stats.num_asked = num_asked
        num_further = max(0, num_drafts - 1)
        num_trials = num_further + (0 < num_drafts < num_asked)
        for rate in (stats.continuation, self._continuation):
            rate.add(num_further, num_trials)


def _service_rate(prior: float) -> Rate:
    return Rate(prior, PRIOR_WEIGHT, fading=FADING)


DECAY = 0.05
"""Share of measurements forgotten in the time in which one session is re-planned once, however many are:
what was left once is tried again after some twenty re-plans."""


class DraftLength:
    """Chooses plans of one source for all sessions. Holds no session.

    Args:
        prior_acceptance: per token, until some have been verified; in (0, 1).
    """

    def __init__(
        self,
        config: SpeculationConfig,
        source: str,
        cost_model: CostModel,
        *,
        prior_acceptance: float,
        observer: Observer | None = None,
    ) -> None:
        self._source = source
        self._observer = observer
        self._rates = ServiceRates(prior_acceptance, *PRIORS_BY_KIND[source == DraftKind.MODEL])
        self._rates_by_adapter: OrderedDict[bytes, ServiceRates] = OrderedDict()
        """Rates of adapters, the least recently begun one first: what one accepts says little of others."""
        self.cost_model = cost_model
        self._set(config)

    def configure(self, config: SpeculationConfig) -> None:
        """Plans by other settings from now on; what was measured stays. Sessions that run keep their K."""
        self._set(config)

    def _set(self, config: SpeculationConfig) -> None:
        fixed = config.num_speculative_tokens
        self._config = config
        self._fixed_k = None if fixed == "auto" else fixed
        self._goodput = GoodputModel(config, self._source, self.cost_model)
        self._trees = TreeChoice(config, self._goodput, self.cost_model, source=self._source)

    def fixed_k(self, request: GenerateRequest) -> int | None:
        """K that the request or the configuration sets; None: it is chosen by measurement."""
        wanted = request.speculation
        if not wanted.enabled:
            return 0
        return self._fixed_k if wanted.num_speculative_tokens is None else wanted.num_speculative_tokens

    def start_session(self, request: GenerateRequest, *, is_auto: bool = False) -> SessionStats:
        """Statistics of a new session; its acceptance starts from the service's.

        Args:
            is_auto: a K that is fixed, unless it is 0, only bounds the K that is chosen by measurement.
        """
        fixed_k = self.fixed_k(request)
        rates = self._rates_of(request.sampling.adapter, is_new=True)
        stats = rates.start_session(request, None if is_auto and fixed_k else fixed_k)
        stats.max_k = fixed_k or ANY_K
        return stats

    # Plans

    def plan(self, stats: SessionStats, *, num_remaining: int, num_running: int) -> Plan:
        """The plan of the next round.

        Args:
            num_remaining: output tokens that may still come; K stays below.
            num_running: sessions that share the steps.
        """
        if stats.fixed_k == 0:
            return OFF_BY_REASON[Reason.FIXED]
        if num_remaining <= 1:
            return OFF_BY_REASON[Reason.LAST_TOKEN]
        if stats.plan is None or stats.rounds_to_replan <= 0 or self._is_outdated(stats):
            self._replan(stats, num_running)
        assert stats.plan is not None
        return stats.plan.within(min(num_remaining - 1, stats.max_k))

    def best_plan(self, plans: Sequence[Plan], stats: SessionStats, num_running: int) -> Plan:
        """The plan of the highest goodput; OFF, which must be among them, where no other gains enough."""
        return self._goodput.best(plans, stats, num_running)

    def goodput(self, plan: Plan, stats: SessionStats, num_running: int) -> float:
        """Predicted tokens per second of one session under ``plan``."""
        return self._goodput.goodput(plan, stats, num_running)

    # Measurements

    def observe_round(self, stats: SessionStats, num_drafts: int, num_accepted: int) -> None:
        """Takes a verdict of a session; of a tree, that on its first chain."""
        stats.rounds_to_replan -= 1
        if num_drafts == 0:
            stats.rounds_off += 1
            return
        stats.rounds_off = 0
        self._rates_of(stats.adapter).observe_verdict(stats, num_drafts, num_accepted)

    def observe_tree(self, stats: SessionStats, verdict: TreeVerdict) -> None:
        """Takes a verdict on all of a tree."""
        self._rates_of(stats.adapter).observe_tree(stats, verdict)

    def _rates_of(self, adapter: bytes, *, is_new: bool = False) -> ServiceRates:
        """Rates of an adapter, which start from the base's; of one that is forgotten, the base's own."""
        if not adapter:
            return self._rates
        rates = self._rates_by_adapter.get(adapter)
        if is_new:
            rates = self._rates_by_adapter[adapter] = rates or self._rates.copy()
            self._rates_by_adapter.move_to_end(adapter)
            if len(self._rates_by_adapter) > MAX_ADAPTERS:
                self._rates_by_adapter.popitem(last=False)
        return rates or self._rates

    # Choice

    def _replan(self, stats: SessionStats, num_running: int) -> None:
        current = OFF if stats.is_exploring else stats.plan
        if current is not None and not self._goodput.allows(current):
            current = None
        stats.is_exploring = stats.fixed_k is None and current == OFF and self._explores(stats, num_running)
        plans = self._allowed(stats, num_running)
        if stats.is_exploring:
            plan = self._goodput.best(plans, stats, num_running)
        else:
            plan = self._choose(plans, current, stats, num_running)
        limit = (
            self._goodput.with_bound if self._joint(stats, num_running) is None else self._goodput.share_of
        )
        chain = limit(plan, stats, num_running)
        chain = OFF if plan.is_off else replace(chain, reason=self._reason(stats, num_running))
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

    def _choose(
        self, plans: Sequence[Plan], current: Plan | None, stats: SessionStats, num_running: int
    ) -> Plan:
        if current is not None and (stats.fixed_k is None or len(plans) > 1):
            if current.num_speculative_tokens != ANY_K:
                stats.bounded.decay(DECAY)
            if current.tree is None:
                stats.tree.decay(DECAY)
        joint = self._joint(stats, num_running)
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
        best: dict[str, float] = {}
        if self.cost_model.verify_s(num_running, num_running) is not None:
            for plan in self._goodput.plans(stats):
                tokens_per_s = self.goodput(plan, stats, num_running)
                best[plan.overlap_label] = max(tokens_per_s, best.get(plan.overlap_label, 0.0))
        return best

    def _allowed(self, stats: SessionStats, num_running: int) -> list[Plan]:
        """Plans of which a session, or its exploration, may have one."""
        plans = self._goodput.plans(stats)
        return [plan for plan in plans if not plan.is_off] if stats.is_exploring else plans

    def _reason(self, stats: SessionStats, num_running: int) -> Reason:
        if stats.fixed_k is not None:
            return Reason.FIXED
        if stats.is_exploring:
            return Reason.EXPLORATION
        is_measured = self.cost_model.verify_s(num_running, num_running) is not None
        return Reason.PROFITABLE if is_measured else Reason.UNMEASURED

    # What a draft model adds

    def _is_outdated(self, stats: SessionStats) -> bool:
        """The plan was made for what does not hold any more."""
        return False

    def _explores(self, stats: SessionStats, num_running: int) -> bool:
        """Begins an exploration if one is due. Of drafts at no cost nobody else knows."""
        return stats.rounds_off >= EXPLORATION_INTERVAL_ROUNDS

    def _joint(self, stats: SessionStats, num_running: int) -> Plan | None:
        """Shared plan; None if the session plans alone."""
        return None

    def _pays_back(self, stats: SessionStats, num_running: int) -> bool:
        """What is left of the session is worth the cost of switching speculation on."""
        return True


@dataclass(frozen=True, slots=True)
class SessionLength:
    """One session's statistics under one ``DraftLength``."""

    length: DraftLength
    stats: SessionStats

    @classmethod
    def start(cls, length: DraftLength, request: GenerateRequest, *, is_auto: bool = False) -> SessionLength:
        """A new session's; ``is_auto`` as for ``DraftLength.start_session``."""
        return cls(length, length.start_session(request, is_auto=is_auto))

    def plan(self, *, num_remaining: int, num_running: int) -> Plan:
        return self.length.plan(self.stats, num_remaining=num_remaining, num_running=num_running)

    def observe(self, num_drafts: int, num_accepted: int, tree: TreeVerdict | None = None) -> None:
        """Takes a verdict: on a chain, or on a tree and its first chain."""
        self.length.observe_round(self.stats, num_drafts, num_accepted)
        if tree is not None:
            self.length.observe_tree(self.stats, tree)
