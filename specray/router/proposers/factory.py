"""Makes the proposers of each session that need no draft model, in the router's process.

Their draft tokens are there in microseconds, so nothing is asked, sent or waited for. A session has a local
proposer when its request is drafted for by ``ngram``, ``suffix``, ``lookahead`` or ``features``; with a draft
model it may have one as its *n-gram fallback*, which proposes where the model has nothing to offer. Tokens
that a grammar forces go first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from specray.control.controller import Controller
from specray.control.draft_length import SessionLength
from specray.control.estimators import Rate
from specray.drafting import OutputStores, PredictionProposer, make_proposer
from specray.requests import GenerateRequest
from specray.router.proposers.features import FeatureProposer
from specray.router.proposers.local import LocalProposer
from specray.router.proposers.lookahead import LookaheadControl
from specray.router.proposers.prediction import PlaceLength, SessionPrediction
from specray.router.session.values import FALLBACK, GRAMMAR, PREDICTION
from specray.router.settings import Settings
from specray.types import DraftKind

PRIOR_ACCEPTANCE: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        DraftKind.NGRAM: (0.5, 0.9),
        DraftKind.SUFFIX: (0.5, 0.9),
        DraftKind.LOOKAHEAD: (0.5, 0.9),
        DraftKind.FEATURES: (0.6, 0.6),
        FALLBACK: (0.3, 0.9),
        GRAMMAR: (0.95, 0.95),
        PREDICTION: (0.6, 0.97),
    }
)
"""Acceptance per token by source: before any was verified, after a short match and after a long one, which
most often means that a repetition goes on; of a prediction, where the place is unsure and where it is sure
(about that of texts that are edited every 30 to 60 tokens, the shape of ``specray bench prediction``)."""
LOOK_S: Final = 12e-6
"""Seconds of the router to look for a repetition in one round of a session.

A round of 64 sessions that do not speculate takes 20 us each without the fallback, and 31 to 36 with it (2
cores, Zen 4; engines of no cost)."""
LOOKS_FADING = 0.9998
"""Forgetting factor per look: some thousand looks, so that the rate is of many sessions."""
SESSIONS_PER_EXPLORATION = 32
"""Number of sessions of which one has a fallback while it does not pay, to see whether that has changed: two
of 64, whose looks take a few thousandths of a small target's step."""


class ProposerFactory:
    """Makes each session's local proposer and the proposer of its prediction."""

    def __init__(self, controller: Controller, settings: Settings, *, has_model: bool) -> None:
        self._controller = controller
        self._settings = settings
        self._has_model = has_model
        self._lengths = {
            source: tuple(controller.length_of(source, prior_acceptance=prior) for prior in priors)
            for source, priors in PRIOR_ACCEPTANCE.items()
        }
        self._stores = OutputStores(settings.speculation.past_output_tokens)
        self._lookahead = LookaheadControl(controller.cost_model, settings.speculation.lookahead_budget)
        self._looks = Rate(0.1, 200.0, fading=LOOKS_FADING)
        """Accepted draft tokens per look of all sessions' fallbacks."""
        self._num_without = 0
        """Sessions that had no fallback, since it did not pay."""

    def local(
        self, request: GenerateRequest, draft: DraftKind, *, num_sessions: int = 1
    ) -> LocalProposer | None:
        """The local proposer of a new session.

        Args:
            draft: what drafts for the request.
            num_sessions: there are now, with this one.

        Returns:
            None when only a model drafts for it, or nothing does. A request with a grammar has one.
        """
        self._follow_settings()
        is_fallback = draft is DraftKind.MODEL
        kind = self._fallback if is_fallback else draft
        if self._controller.fixed_k(request) == 0:
            return None
        if is_fallback and kind is not None and not self._may_pay(num_sessions):
            kind = None
        if kind is None and request.sampling.grammar is None:
            return None
        source = FALLBACK if is_fallback else draft.value
        # A fallback is there to add speed, so it must be free to propose nothing, whatever K is configured.
        short, long = self._started(source, request, is_auto=is_fallback)
        forced, _ = self._started(GRAMMAR, request, is_auto=True)
        if kind is DraftKind.FEATURES:
            return FeatureProposer(source, make_proposer(None), short, long, forced)
        store = self._stores.of(_author(request)) if kind is DraftKind.SUFFIX else None
        return LocalProposer(
            source,
            make_proposer(kind, store),
            short,
            long,
            forced,
            store,
            self._looks if is_fallback else None,
            self._lookahead if kind is DraftKind.LOOKAHEAD else None,
        )

    def prediction(self, request: GenerateRequest) -> SessionPrediction | None:
        """The proposer of a new session's prediction; None: it has none, or does not speculate."""
        prediction = request.speculation.prediction
        if not prediction or self._controller.fixed_k(request) == 0:
            return None
        unsure, sure = map(PlaceLength, self._started(PREDICTION, request, is_auto=True))
        return SessionPrediction(PredictionProposer(prediction), sure, unsure, len(request.prompt_token_ids))

    def _started(
        self, source: str, request: GenerateRequest, *, is_auto: bool
    ) -> tuple[SessionLength, SessionLength]:
        short, long = self._lengths[source]
        return (
            SessionLength.start(short, request, is_auto=is_auto),
            SessionLength.start(long, request, is_auto=is_auto),
        )

    @property
    def _fallback(self) -> DraftKind | None:
        fallback = self._settings.speculation.fallback
        return DraftKind(fallback) if self._has_model and fallback != "none" else None

    def _follow_settings(self) -> None:
        """Another bound of past outputs forgets them; another window is measured anew."""
        config = self._settings.speculation
        if self._stores.max_tokens != config.past_output_tokens:
            self._stores = OutputStores(config.past_output_tokens)
        if self._lookahead.budget != config.lookahead_budget:
            self._lookahead = LookaheadControl(self._controller.cost_model, config.lookahead_budget)

    def _may_pay(self, num_sessions: int) -> bool:
        """What the fallback brought lately is worth more than its looks take, or it is time to look again.

        With many sessions a token of one is little of a step's time, and there are as many looks as sessions.
        """
        step_s = self._controller.cost_model.usual_verify_s(num_sessions, num_sessions)
        if step_s is None or self._looks.value * step_s / num_sessions >= LOOK_S:
            return True
        self._num_without += 1
        return self._num_without % SESSIONS_PER_EXPLORATION == 0


def _author(request: GenerateRequest) -> str:
    """Whose past outputs are like this one's: the tenant's, by the same adapter; empty: nobody's."""
    tenant, adapter = request.speculation.tenant, request.sampling.adapter
    return f"{tenant} {adapter.hex()}" if tenant and adapter else tenant
