"""Local proposers, which need no draft model: one per session, in the router's process.

Their draft tokens are there in microseconds, so nothing is asked, sent or waited for. A session has one when
its request is drafted for by ``ngram`` or ``suffix``; with a draft model it may have one as its *n-gram
fallback*, which proposes where the model has nothing to offer. Tokens that a grammar forces go first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from specray.config import SpeculationConfig
from specray.control.controller import Controller
from specray.control.estimators import Rate
from specray.control.expectations import expected_tokens
from specray.control.goodput import MAX_ACCEPTANCE
from specray.control.state import SessionStats
from specray.control.trees import with_branches
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting import (
    LONG_MATCH_LEN,
    LookaheadProposer,
    OutputStore,
    OutputStores,
    SessionProposer,
    make_proposer,
)
from specray.requests import GenerateRequest
from specray.router.proposers.base import Budget
from specray.router.proposers.lookahead import Windows
from specray.router.session import Session
from specray.router.session_values import FALLBACK, GRAMMAR, Commit
from specray.types import MAX_SPECULATIVE_TOKENS, DraftKind

PRIOR_ACCEPTANCE: Final[Mapping[str, float]] = MappingProxyType(
    {DraftKind.NGRAM: 0.5, DraftKind.SUFFIX: 0.5, DraftKind.LOOKAHEAD: 0.5, FALLBACK: 0.3, GRAMMAR: 0.95}
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


@dataclass(frozen=True, slots=True)
class Track:
    """What is known of one kind of match, and the plan that follows from it."""

    controller: Controller
    """Chooses plans for all sessions."""
    stats: SessionStats
    """Statistics of this session."""


@dataclass(slots=True, eq=False)
class LocalProposer:
    """One session's proposer and its own statistics, apart from those of a draft model."""

    kind: str
    """ngram, suffix, lookahead or FALLBACK: what proposes where no grammar forces a token."""
    proposer: SessionProposer
    short: Track
    long: Track
    """Statistics after a long match, which most often means that a repetition goes on."""
    forced: Track
    """Statistics of tokens that the grammar forces; the model may spell them in other tokens."""
    max_tokens: int
    """Most draft tokens of a proposal."""
    store: OutputStore | None = None
    looks: Rate | None = None
    """Accepted draft tokens per look of all sessions; None: the draft is no fallback."""
    windows: Windows | None = None
    """Chooses where the target looks ahead; None: nowhere."""
    has_fixed_k: bool = False
    """K is set."""
    is_long: bool = False
    """So was the match of the last proposal, or it was forced."""
    is_forced: bool = False
    """The grammar forced the last proposal."""

    @property
    def source(self) -> str:
        """See Proposer: of the last proposal."""
        return GRAMMAR if self.is_forced else self.kind

    @property
    def is_fallback(self) -> bool:
        return self.kind == FALLBACK

    def propose_forced(self, session: Session) -> DraftTokens:
        """What the grammar forces; each such token is worth its row, whatever else would pay."""
        forced = session.guide.forced(self.max_tokens)
        self.is_forced = len(forced) > 0
        return forced

    def propose(self, session: Session, budget: Budget) -> DraftTokens:
        """See Proposer; none when nothing was found, or when it would not pay."""
        if self.windows is not None:
            session.target.lookahead = self.windows.choose(budget.num_running, is_fixed=self.has_fixed_k)
        forced = self.propose_forced(session)
        if self.is_forced:
            self.is_long = True
            return forced
        self.proposer.extend(session.committed[self.proposer.num_tokens :])
        match_len = self.proposer.match_len
        self.is_long = match_len >= LONG_MATCH_LEN
        if match_len == 0 and self.store is None:
            return NO_DRAFT
        controller, stats = self._track.controller, self._track.stats
        if controller.resting_plan(stats) is not None:
            return NO_DRAFT
        plan = controller.plan(stats, num_remaining=session.num_remaining, num_running=budget.num_running)
        if plan.is_off:
            return NO_DRAFT
        return self.proposer.propose(min(plan.num_speculative_tokens, self.max_tokens), plan.num_tree_nodes)

    def observe(self, session: Session, commit: Commit) -> None:
        """Learns from a verdict on its own draft tokens, none included; others' are not its own."""
        if self.windows is not None and commit.had_window and isinstance(self.proposer, LookaheadProposer):
            self.proposer.offer(commit.offered, len(session.committed))
            self.windows.observe(len(commit.token_ids), commit.num_draft_tokens)
        if commit.source != self.source:
            return
        track = self._track
        track.controller.observe_round(track.stats, commit.num_chain_tokens, commit.num_chain_accepted)
        if commit.tree is not None:
            track.controller.observe_tree(track.stats, commit.tree)
        if self.looks is not None and not self.is_forced:
            self.looks.add(commit.num_accepted_tokens, 1)

    def pass_over(self) -> None:
        """What it found, if anything, is not verified: a look that brought nothing."""
        if self.looks is not None and not self.is_forced:
            self.looks.add(0, 1)

    def expect(self, draft: DraftTokens, *, num_running: int) -> tuple[float, float]:
        """Returns the tokens that a round commits in which every session has such draft tokens, and its
        seconds."""
        stats, cost_model = self._track.stats, self._track.controller.cost_model
        tokens = expected_tokens(min(stats.acceptance.value, MAX_ACCEPTANCE), len(draft.first_path))
        if not draft.is_chain:
            tokens = with_branches(tokens, stats)
        return tokens, cost_model.usual_verify_s(num_running * (1 + len(draft)), num_running) or 0.0

    def keep_output(self, session: Session) -> None:
        """Adds a finished output to the tenant's past ones, where they are kept.

        Not those that rejection has drawn: which tokens these are depends on the noise that tests whether a
        draft token is accepted, and a request of the same seed draws that noise again. A draft that knows
        the outcome of its own test is no draft, and the output would not be the target's.
        """
        if self.store is not None and not session.request.sampling.draws_by_rejection:
            self.store.add(session.committed[session.num_prompt_tokens :])

    @property
    def _track(self) -> Track:
        if self.is_forced:
            return self.forced
        return self.long if self.is_long else self.short


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
