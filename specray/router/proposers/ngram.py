"""Local proposers, which need no draft model: one per session, in the router's process.

Their draft tokens are there in microseconds, so nothing is asked, sent or waited for. A session has one when
its request is drafted for by ``ngram`` or ``suffix``; with a draft model it may have one as its *n-gram
fallback*, which proposes where the model has nothing to offer. Tokens that a grammar forces go first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from specray.config import SpeculationConfig
from specray.control.controller import Controller
from specray.control.estimators import Rate
from specray.drafting import OutputStores, make_proposer
from specray.requests import GenerateRequest
from specray.router.proposers.features import FeatureProposer
from specray.router.proposers.local import LocalProposer, Track
from specray.router.proposers.lookahead import Windows
from specray.router.session.values import FALLBACK, GRAMMAR
from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind

PRIOR_ACCEPTANCE: Final[Mapping[str, float]] = MappingProxyType(
    {
        DraftKind.NGRAM: 0.5,
        DraftKind.SUFFIX: 0.5,
        DraftKind.LOOKAHEAD: 0.5,
        DraftKind.FEATURES: 0.6,
        FALLBACK: 0.3,
        GRAMMAR: 0.95,
    }
)
PRIOR_LONG_MATCH_ACCEPTANCE = 0.9
LOOK_S: Final = 12e-6
"""Seconds of the router to look for a repetition in one round of a session.

A round of 64 sessions that do not speculate takes 20 us each without the fallback, and 31 to 36 with it (2
cores, Zen 4; engines of no cost)."""
PRIOR_ACCEPTED, PRIOR_LOOKS = 0.1, 200.0
LOOKS_FADING = 0.9998
"""Forgetting factor per look: some thousand looks, so that the rate is of many sessions."""
SESSIONS_PER_EXPLORATION = 32
"""Number of sessions of which one has a fallback while it does not pay, to see whether that has changed: two
of 64, whose looks take a few thousandths of a small target's step."""


class LocalProposers:
    """Makes each session's local proposer.

    Args:
        config: the ``speculation`` section.
        controller: of the draft model; target times are shared with it.
        has_model: there is a draft model, which the fallback stands in for.
    """

    def __init__(self, config: SpeculationConfig, controller: Controller, *, has_model: bool) -> None:
        self._has_model = has_model
        self._controllers = {
            source: tuple(
                controller.beside(source, prior_acceptance=acceptance)
                for acceptance in (prior, PRIOR_LONG_MATCH_ACCEPTANCE)
            )
            for source, prior in PRIOR_ACCEPTANCE.items()
        }
        self._stores = OutputStores(config.past_output_tokens)
        self._controller = controller
        self._windows = Windows(controller.cost_model, config.lookahead_budget)
        self._set(config)
        self._looks = Rate(PRIOR_ACCEPTED, PRIOR_LOOKS, fading=LOOKS_FADING)
        self._num_without = 0
        """Sessions that had no fallback, since it did not pay."""

    def configure(self, config: SpeculationConfig) -> None:
        """Makes the next sessions' proposers by other settings. Another bound of outputs forgets them."""
        self._set(config)
        for controllers in self._controllers.values():
            for controller in controllers:
                controller.configure(config.without_overlap)

    def _set(self, config: SpeculationConfig) -> None:
        has_fallback = self._has_model and config.fallback != "none"
        self._fallback = DraftKind(config.fallback) if has_fallback else None
        if self._stores.max_tokens != config.past_output_tokens:
            self._stores = OutputStores(config.past_output_tokens)
        if self._windows.budget != config.lookahead_budget:
            self._windows = Windows(self._controller.cost_model, config.lookahead_budget)

    def of(
        self, request: GenerateRequest, draft: DraftKind, *, num_sessions: int = 1
    ) -> LocalProposer | None:
        """The local proposer of a new session.

        Args:
            draft: what drafts for the request.
            num_sessions: there are now, with this one.

        Returns:
            None when only a model drafts for it, or nothing does. A request with a grammar has one.
        """
        kind = self._fallback if draft is DraftKind.MODEL else draft
        fixed_k = self._controller.fixed_k(request)
        if fixed_k == 0:
            return None
        if draft is DraftKind.MODEL and kind is not None and not self._may_pay(num_sessions):
            kind = None
        if kind is None and request.sampling.grammar is None:
            return None
        source = FALLBACK if draft is DraftKind.MODEL else draft.value
        is_fallback = source == FALLBACK
        # A fallback is there to add speed, so it must be free to propose nothing, whatever K is configured.
        short, long = (
            Track(controller, controller.start_session(request, is_auto=is_fallback))
            for controller in self._controllers[source]
        )
        by_grammar = self._controllers[GRAMMAR][0]
        forced = Track(by_grammar, by_grammar.start_session(request, is_auto=True))
        store = self._stores.of(request.speculation.tenant) if kind is DraftKind.SUFFIX else None
        most = fixed_k or MAX_SPECULATIVE_TOKENS
        looks = self._looks if is_fallback else None
        if kind is DraftKind.FEATURES:
            return FeatureProposer(source, make_proposer(None), short, long, forced, most)
        windows = self._windows if kind is DraftKind.LOOKAHEAD else None
        return LocalProposer(
            source,
            make_proposer(kind, store),
            short,
            long,
            forced,
            most,
            store,
            looks,
            windows,
            has_fixed_k=fixed_k is not None,
        )

    def _may_pay(self, num_sessions: int) -> bool:
        """What the fallback brought lately is worth more than its looks take, or it is time to look again.

        With many sessions a token of one is little of a step's time, and there are as many looks as sessions.
        """
        step_s = self._controller.cost_model.usual_verify_s(num_sessions, num_sessions)
        if step_s is None or self._looks.value * step_s / num_sessions >= LOOK_S:
            return True
        self._num_without += 1
        return self._num_without % SESSIONS_PER_EXPLORATION == 0
