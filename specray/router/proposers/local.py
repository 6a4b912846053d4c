"""One session's local proposer: what drafts for it without a draft model, with statistics of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specray.control.draft_length import SessionLength
from specray.control.estimators import Rate
from specray.control.expectations import expected_tokens
from specray.control.goodput import MAX_ACCEPTANCE
from specray.control.trees import with_branches
from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.drafting import LONG_MATCH_LEN, LookaheadProposer, OutputStore, SessionProposer
from specray.router.proposers.base import Budget
from specray.router.proposers.lookahead import LookaheadControl
from specray.router.session.session import Session
from specray.router.session.values import FALLBACK, GRAMMAR, NOTHING_NEXT, Commit, NextDraft
from specray.types import DraftKind

SHADOW_TOKENS: Final = 8
"""Tokens of a chain that is followed without being verified."""
IN_TARGET: Final = (DraftKind.LOOKAHEAD, DraftKind.FEATURES)
"""What drafts in the target's steps, and finds nothing where it is not asked."""


@dataclass(slots=True)
class Shadow:
    """A chain that was found and not verified, led along the output: what of it the target writes.

    So acceptance is measured in every round, at no cost, as if the chain had been verified.
    """

    length: SessionLength
    """Statistics that learn from it."""
    start: int
    """Committed tokens that it follows."""
    chain: tuple[int, ...]
    num_followed: int = 0

    def follow(self, committed: Sequence[int]) -> bool:
        """Takes what was committed since. True: it has ended, at its end or at a token that differs."""
        num_known = min(len(committed) - self.start, len(self.chain))
        num_new = num_right = 0
        for index in range(self.num_followed, num_known):
            num_new += 1
            if committed[self.start + index] != self.chain[index]:
                break
            num_right += 1
        self.num_followed += num_right
        self.length.observe(num_new, num_right)
        return num_right < num_new or self.num_followed == len(self.chain)


@dataclass(slots=True, eq=False)
class LocalProposer:
    """One session's proposer and its own statistics, apart from those of a draft model."""

    kind: str
    """ngram, suffix, lookahead, features or FALLBACK: what proposes where no grammar forces a token."""
    proposer: SessionProposer
    short: SessionLength
    long: SessionLength
    """Statistics after a long match, which most often means that a repetition goes on."""
    forced: SessionLength
    """Statistics of tokens that the grammar forces; the model may spell them in other tokens."""
    store: OutputStore | None = None
    looks: Rate | None = None
    """Accepted draft tokens per look of all sessions; None: the draft is no fallback."""
    lookahead: LookaheadControl | None = None
    """Chooses where the target looks ahead; None: nowhere."""
    is_long: bool = False
    """Last match was long, or forced."""
    shadow: Shadow | None = None
    """What it would have proposed where another drafted; None: nothing is followed."""
    is_forced: bool = False
    """The grammar forced the last proposal."""
    following: NextDraft = NOTHING_NEXT
    """What the target's own drafter is asked for after the next verdict."""

    @property
    def source(self) -> str:
        """See Proposer: of the last proposal."""
        return GRAMMAR if self.is_forced else self.kind

    @property
    def max_tokens(self) -> int:
        """Most draft tokens of a proposal."""
        return self.short.stats.max_k

    @property
    def is_fallback(self) -> bool:
        return self.kind == FALLBACK

    @property
    def is_in_target(self) -> bool:
        """It drafts in the target's steps."""
        return self.kind in IN_TARGET

    def propose_forced(self, session: Session) -> DraftTokens:
        """What the grammar forces; each such token is worth its row, whatever else would pay."""
        forced = session.guide.forced(self.max_tokens)
        self.is_forced = len(forced) > 0
        return forced

    def propose(self, session: Session, budget: Budget) -> DraftTokens:
        """See Proposer; none when nothing was found, or when it would not pay."""
        if self.lookahead is not None:
            is_fixed = self.short.stats.fixed_k is not None
            session.target.lookahead = self.lookahead.choose(budget.num_running, is_fixed=is_fixed)
        forced = self.propose_forced(session)
        if self.is_forced:
            self.is_long = True
            return forced
        self.proposer.extend(session.committed[self.proposer.num_tokens :])
        match_len = self.proposer.match_len
        self.is_long = match_len >= LONG_MATCH_LEN
        if match_len == 0 and self.store is None:
            return NO_DRAFT
        plan = self._length.plan(num_remaining=session.num_remaining, num_running=budget.num_running)
        if self.shadow is None and not self.is_in_target:
            chain = self.proposer.propose(min(SHADOW_TOKENS, self.max_tokens)).token_ids
            self.shadow = Shadow(self._length, len(session.committed), chain) if chain else None
        if plan.is_off:
            return NO_DRAFT
        return self.proposer.propose(plan.num_speculative_tokens, plan.num_tree_nodes)

    def observe(self, session: Session, commit: Commit) -> None:
        """Learns from a verdict on its own draft tokens, none included; others' are not its own."""
        if self.lookahead is not None and commit.had_window and isinstance(self.proposer, LookaheadProposer):
            self.proposer.offer(commit.offered, len(session.committed))
            self.lookahead.observe(len(commit.token_ids), commit.num_draft_tokens)
        if self.shadow is not None and (commit.source != self.source or not commit.num_draft_tokens):
            if self.shadow.follow(session.committed):
                self.shadow = None
            return
        self.shadow = None
        if commit.source != self.source:
            return
        self._length.observe(commit.num_chain_tokens, commit.num_chain_accepted, commit.tree)
        if self.looks is not None and not self.is_forced:
            self.looks.add(commit.num_accepted_tokens, 1)

    def pass_over(self) -> None:
        """What it found, if anything, is not verified: a look that brought nothing."""
        if self.looks is not None and not self.is_forced:
            self.looks.add(0, 1)

    def expect(self, draft: DraftTokens, *, num_running: int) -> tuple[float, float]:
        """Returns the tokens that a round commits in which every session has such draft tokens, and its
        seconds."""
        stats, cost_model = self._length.stats, self._length.length.cost_model
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
    def _length(self) -> SessionLength:
        if self.is_forced:
            return self.forced
        return self.long if self.is_long else self.short
