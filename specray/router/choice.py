"""The choice of a proposer for every round: nothing, a prediction, a local proposer, or the draft model.

What a request predicts of its output goes first, where the output follows it. A session whose request is
drafted for by ``ngram`` or ``suffix`` has a local proposer alone. One with a draft model may have a local
proposer as its fallback, which goes first where that promises more.
"""

from __future__ import annotations

from specray.control.controller import Controller
from specray.control.state import OFF, OFF_BY_REASON, Reason
from specray.draft_tokens import NO_DRAFT
from specray.router.admission.sessions import Sessions
from specray.router.deferred import Later
from specray.router.draft_model.prefill import are_prompts_first
from specray.router.draft_model.proposer import ModelProposer
from specray.router.fallback import NgramFallback
from specray.router.live_session import LiveSession
from specray.router.proposers.base import PENDING, Budget, Proposer
from specray.router.session.values import GRAMMAR, PREDICTION, Commit, Lookup
from specray.router.transport.links import DraftLink
from specray.types import DraftReplies

QUIET_STEP_S, MAX_QUIET_ROUNDS = 0.012, 3
"""Seconds of a target step for each of which the only session has to be without draft tokens for one round,
and most such rounds, before its next round is settled ahead. A repetition that begins meanwhile is found one
round late, which costs a step; the way between two steps takes a millisecond, however long they are."""


class ProposerChoice:
    """Decides what every session verifies next, and passes each verdict to its proposers."""

    def __init__(
        self, model: ModelProposer, sessions: Sessions, controller: Controller, later: Later
    ) -> None:
        self.model = model
        running = self._running = sessions.running
        self._controller = controller
        self._later = later
        self._levels = sessions.levels
        self._fallback = NgramFallback(running, controller)

    # Proposals

    def propose(self, now: float) -> None:
        """Settles what every idle session verifies next: asks the draft, or decides to go without."""
        self.model.begin_questions()
        is_draft_idle = are_prompts_first(self._running)
        for live in self._running.values():
            session = live.session
            if session.drafted is not None or session.target.in_flight is not None:
                continue
            if session.is_prefilling:
                live.plan = OFF_BY_REASON[Reason.PREFILL]
                if not self._propose_predicted(live, now) and live.local is not None:
                    self._go_without_model(live, now)
            elif is_draft_idle:
                live.plan = OFF_BY_REASON[Reason.PROMPTS_FIRST]
                session.take_draft(NO_DRAFT)
            elif self._levels.is_without_draft(live):
                live.plan = OFF_BY_REASON[Reason.SERVICE_LEVEL]
                session.take_draft(NO_DRAFT)
            elif self._propose_predicted(live, now):
                live.plan = OFF_BY_REASON[Reason.PREDICTION]
            elif live.is_drafted_locally:
                live.plan = OFF_BY_REASON[Reason.LOCAL]
                self._go_without_model(live, now)
            elif session.draft.asked is None:
                self._propose_with_model(live, now)

    def is_plain_next(self, live: LiveSession) -> bool:
        """Whether the round after the one that is about to be verified is to have no draft tokens, either.

        The target computes it at once, and it stays plain whatever is found for it meanwhile: to look a round
        later costs less than to wait for the Router between all plain rounds.
        """
        if not live.plan.is_off or (live.prediction is not None and live.prediction.may_propose_next):
            return False
        # What a grammar forces is proposed whatever the mode.
        has_grammar = live.session.request.sampling.grammar is not None
        is_settled = self.model.is_resting(live) and not live.is_drafted_locally
        if live.local is not None:
            is_settled = is_settled and self._is_plain and not has_grammar
        return is_settled or (not has_grammar and self._is_quiet(live))

    def _is_quiet(self, live: LiveSession) -> bool:
        """The only session has had rounds for which nothing was worth proposing, and needs no features."""
        is_in_target = live.local is not None and live.local.is_in_target
        if len(self._running) > 1 or is_in_target or live.session.features.feature_size:
            return False
        step_s = self._controller.cost_model.verify_s(1, 1)
        return step_s is not None and live.num_quiet >= min(MAX_QUIET_ROUNDS, step_s / QUIET_STEP_S)

    @property
    def _is_plain(self) -> bool:
        """All sessions go without draft tokens; the only one looks for repetitions all the same."""
        return self._controller.modes.is_plain and len(self._running) > 1

    def _propose_predicted(self, live: LiveSession, now: float) -> bool:
        """Takes draft tokens from the request's prediction. False: it has none to offer."""
        session = live.session
        if live.prediction is None or session.draft.asked is not None or self._levels.is_without_draft(live):
            return False
        if live.local is not None and len(live.local.propose_forced(session)):
            # What the grammar forces is surer.
            return False
        drafted = live.prediction.propose(session, Budget(now, len(self._running)))
        if not len(drafted):
            return False
        session.take_draft(drafted, PREDICTION)
        return True

    def _propose_with_model(self, live: LiveSession, now: float) -> None:
        plan = live.plan = self.model.plan_question(live, now)
        if plan.is_off:
            self._go_without_model(live, now)
            return
        if live.runs_on:
            live.num_quiet, live.plan = 0, OFF
            live.session.take_draft(NO_DRAFT)
            return
        instead = self._fallback.propose_instead(live, plan, now)
        if instead is not None and live.local is not None:
            live.plan = OFF_BY_REASON[Reason.GRAMMAR if live.local.is_forced else Reason.NGRAM]
            live.session.take_draft(instead, live.local.source)
            return
        answer = self.model.propose(live.session, Budget(now, len(self._running), plan))
        assert answer is PENDING, "a draft that was planned for is asked"

    def _go_without_model(self, live: LiveSession, now: float) -> None:
        """Decides what is verified without asking the draft."""
        if self._is_plain and self.model.link is not None and not live.is_drafted_locally:
            forced = NO_DRAFT if live.local is None else live.local.propose_forced(live.session)
            live.session.take_draft(forced, GRAMMAR)
        else:
            self._propose_locally(live, now)

    def _propose_locally(self, live: LiveSession, now: float) -> None:
        if live.local is None:
            live.session.take_draft(NO_DRAFT)
        else:
            draft = live.local.propose(live.session, Budget(now, len(self._running)))
            if live.runs_on and draft:
                live.num_quiet, draft = 0, NO_DRAFT
            live.session.take_draft(draft, live.local.source, following=live.local.following)

    def _extend(self, live: LiveSession, now: float) -> None:
        foreseen = live.session.drafted
        if foreseen is None:
            return
        if not live.ahead.is_off:
            live.plan = live.ahead
        longer = self._fallback.extend(live, foreseen, now)
        if longer is not None and live.local is not None:
            live.session.take_draft(longer, live.local.source)

    # Verdicts and replies

    def on_commit(self, live: LiveSession, commit: Commit) -> None:
        """Passes a verdict to the session's proposers; each counts its own draft tokens."""
        session = live.session
        live.num_quiet = 0 if commit.num_draft_tokens else live.num_quiet + 1
        if live.local is not None and session.is_finished:
            self._later.add(live.local.keep_output, session)
        proposers: tuple[Proposer | None, ...] = (live.prediction, live.local, self.model)
        for proposer in proposers:
            if proposer is not None:
                proposer.observe(session, commit)

    def on_lookup(self, live: LiveSession, lookup: Lookup, now: float) -> None:
        """Takes what the outcomes said of a verdict that has just been committed."""
        self.model.on_lookup(live, lookup, now)
        if lookup in (Lookup.PENDING, Lookup.NOT_ASKED):
            return
        if lookup is Lookup.HIT and self._propose_predicted(live, now):
            live.plan = OFF_BY_REASON[Reason.PREDICTION]
        else:
            self._extend(live, now)

    def on_replies(self, link: DraftLink, replies: DraftReplies, now: float) -> None:
        for live in self.model.on_replies(link, replies, now):
            self._extend(live, now)

    def expire(self, now: float) -> None:
        """Gives up waits for the draft that took too long."""
        for live in self.model.expire(now):
            self._propose_locally(live, now)
