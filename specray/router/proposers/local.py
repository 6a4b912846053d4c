"""One session's local proposer: what drafts for it without a draft model, with statistics of its own."""

from __future__ import annotations

from dataclasses import dataclass

from specray.control.controller import Controller
from specray.control.estimators import Rate
from specray.control.expectations import expected_tokens
from specray.control.goodput import MAX_ACCEPTANCE
from specray.control.state import SessionStats
from specray.control.trees import with_branches
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting import LONG_MATCH_LEN, LookaheadProposer, OutputStore, SessionProposer
from specray.router.proposers.base import Budget
from specray.router.proposers.lookahead import Windows
from specray.router.session.session import Session
from specray.router.session.values import FALLBACK, GRAMMAR, NOTHING_NEXT, Commit, NextDraft


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
    """ngram, suffix, lookahead, features or FALLBACK: what proposes where no grammar forces a token."""
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
    following: NextDraft = NOTHING_NEXT
    """What the target's own drafter is asked for behind the next verdict."""

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
