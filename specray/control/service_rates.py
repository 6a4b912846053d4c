"""Rates of all sessions of a service together: new sessions start from them."""

from __future__ import annotations

from specray.control.estimators import Rate, chain_trials
from specray.control.goodput import ANY_K
from specray.control.state import BoundedProposalStats, SessionStats, TreeStats, TreeVerdict
from specray.requests import GenerateRequest

PRIOR_ACCEPTANCE = 0.7
"""Acceptance per draft token before any was verified."""
ACCEPTANCE_FADING = 0.998
"""Forgetting factor per round of the rates that new sessions start from: no single session makes them."""
PRIOR_CONTINUATION = 0.95
"""P(the draft continues after a token) before any proposal."""
PRIOR_BOUNDED_DRAFTS, PRIOR_BOUNDED_ACCEPTED = 8.0, 4.0
"""Tokens per proposal that only the draft ends: drafted, accepted."""
PRIOR_WEIGHT = 4.0
"""Weight of a prior, in trials."""
PRIOR_TREE_WEIGHT = 16.0
"""Weight of the prior of trees, in tokens of their first chains."""


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
        self._continuation = _service_rate(PRIOR_CONTINUATION)
        self._bounded = BoundedProposalStats(
            _service_rate(PRIOR_BOUNDED_DRAFTS), _service_rate(PRIOR_BOUNDED_ACCEPTED)
        )

    def start_session(self, request: GenerateRequest, fixed_k: int | None) -> SessionStats:
        """Statistics of a new session; these rates are its prior.

        Args:
            fixed_k: K that is set for it; None: it is chosen by measurement.
        """
        return SessionStats(
            Rate(self.acceptance.value, PRIOR_WEIGHT),
            Rate(self._continuation.value, PRIOR_WEIGHT),
            self._bounded.start(PRIOR_WEIGHT),
            self._tree.start(PRIOR_TREE_WEIGHT),
            request.request_id,
            fixed_k,
            draft_knows_acceptance=not request.sampling.draws_by_rejection,
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
    return Rate(prior, PRIOR_WEIGHT, fading=ACCEPTANCE_FADING)
