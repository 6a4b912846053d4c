"""The life of one request as a pure state machine: no I/O, no clock.

Inputs are verdicts, proposals, outcomes and bad news; outputs are the items to send next. Intervals of the
committed tokens, for each engine::

    [0, synced_len)              known to be held by the engine
    [synced_len, len(committed)) goes with the next item as ``token_ids``

An item in flight changes nothing here until its reply arrives: lengths are planned in the item and done in
``synced_len``. Losing an engine's state is ``synced_len = 0`` and nothing else.
"""

from __future__ import annotations

from functools import partial

from specray.draft_tokens import MAX_DRAFT_NODES, NO_DRAFT, DraftTokens, TreeBudget
from specray.errors import InvalidRequestError, ProtocolError, SpecrayError
from specray.interfaces import StopMatcher
from specray.requests import FinishReason, GenerateRequest
from specray.router.session.branches import Branches
from specray.router.session.guide import Guide
from specray.router.session.stops import StopConditions
from specray.router.session.sync import DraftSync, TargetSync
from specray.router.session.values import (
    NOTHING_NEXT,
    Commit,
    Lookup,
    NextDraft,
    PromptScores,
    RequestCounts,
    fitting_draft,
    kept_of,
    usable_draft,
    verdict_on_tree,
)
from specray.types import (
    MAX_SPECULATIVE_TOKENS,
    DraftKind,
    ItemFailed,
    Outcomes,
    Proposal,
    SpeculateItem,
    UnknownSequence,
    Verdict,
    VerifyItem,
)


class Session:
    """Committed tokens of one request, and the round in flight.

    Args:
        vocab_size: draft tokens outside of it are cut off, they must not reach the target.
    """

    def __init__(self, request: GenerateRequest, matcher: StopMatcher | None, *, vocab_size: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.committed: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.committed)
        self.target = TargetSync()
        self.draft = DraftSync(request)
        self.features = self.draft.features
        """Features for a draft that uses them."""
        self.drafted: DraftTokens | None = None
        """Draft tokens of the next Verify; None: not decided yet. Set by ``take_draft`` and by replies."""
        self._next = NOTHING_NEXT
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: SpecrayError | None = None
        """What the caller gets in place of an end; only with finish_reason ``error``."""
        self.num_cached_tokens = 0
        """Prompt tokens that the target did not compute but found in its prefix cache."""
        self.tally = RequestCounts()
        self.guide = Guide(self.committed, self.num_prompt_tokens)
        self.prompt_scores = PromptScores()
        self._stops = StopConditions(request, matcher)
        if request.resumed is not None:
            # Another router's session ended here, where the output itself may have ended.
            token_ids = request.resumed.token_ids
            cut = self._stops.cut(token_ids, 0)
            self.committed.extend(token_ids[: cut.num_kept])
            self.finish_reason, self.stop_reason = cut.finish_reason, cut.stop_reason
        # A model's draft tokens are samples; those of anything else were chosen without randomness.
        needs_probs = request.sampling.draws_by_rejection
        self._usable = partial(usable_draft, vocab_size=vocab_size, needs_probs=needs_probs)
        self._vocab_size = vocab_size
        self._source = DraftKind.MODEL.value
        """Source of ``drafted``: a DraftKind's value, FALLBACK, GRAMMAR or PREDICTION."""
        self._branches = Branches()
        self._verified = NO_DRAFT
        """Draft tokens of the last sampled round; its verdict may be known already."""
        self._verified_source = self._source

    # What is known

    @property
    def num_output_tokens(self) -> int:
        return len(self.committed) - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        return self.request.max_tokens - self.num_output_tokens

    @property
    def num_missing(self) -> int:
        """Committed tokens that the target does not hold yet; at least 1 while the session runs."""
        return len(self.committed) - self.target.synced_len

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_prefilling(self) -> bool:
        """The target fills its cache (prompt, or everything after a loss): nothing waits for the draft."""
        # Asked several times a round, so it asks no other property.
        length, held = len(self.committed), self.target.synced_len
        return length == self.num_prompt_tokens or held == 0 or length - held > 1 + MAX_SPECULATIVE_TOKENS

    @property
    def is_waiting_for_draft(self) -> bool:
        """The next Verify is held back until the draft answers, or the wait is given up."""
        return (
            self.drafted is None
            and self.draft.asked is not None
            and self.target.in_flight is None
            and not self.is_prefilling
        )

    @property
    def has_features(self) -> bool:
        """A draft that uses features can draft: those of all tokens but the last have come."""
        return self.features.end >= len(self.committed) - 1 > 0

    @property
    def has_open_verdict(self) -> bool:
        return self._branches.has_open_verdict

    # Items to send

    def verify_item(self, max_new_tokens: int, *, is_plain_next: bool = False) -> VerifyItem:
        """Sends the session to the target: the next chunk of a prefill, or a round.

        Args:
            max_new_tokens: room in the step, >= 1. Draft tokens that do not fit are left out.
            is_plain_next: the round after this one is to have no draft tokens.
        """
        assert self.target.in_flight is None and not self.is_finished and max_new_tokens >= 1
        view = self.target
        view.round_id += 1
        start, missing = view.synced_len, self.num_missing
        is_chunk = missing > max_new_tokens
        end = start + max_new_tokens if is_chunk else len(self.committed)
        is_first_chunk = is_chunk and start == 0
        if is_first_chunk:
            # It carries all but the last token: what the target has in its prefix cache takes no room.
            end = len(self.committed) - 1
        drafted = NO_DRAFT if is_chunk or self.drafted is None else self.drafted
        if drafted.probs and not all(row.is_distribution(self._vocab_size) for row in drafted.probs):
            # The target would refuse them, and the request would end for its draft's fault.
            drafted = NO_DRAFT
        drafted = fitting_draft(drafted, room=max_new_tokens - missing, depth=self.num_remaining - 1)
        self._verified = self.guide.without_illegal(drafted)
        self._verified_source = self._source
        following = NOTHING_NEXT if is_chunk else self._next
        is_plain = not is_chunk and not self._verified.token_ids and view.lookahead is None
        num_features = self.features.num_wanted
        item = VerifyItem(
            self.request_id,
            view.round_id,
            start,
            tuple(self.committed[start:end]),
            self._verified,
            sample=not is_chunk,
            sampling=self.request.sampling if start == 0 else None,
            max_new_tokens=max_new_tokens if is_first_chunk else None,
            lookahead=None if is_chunk else view.lookahead,
            num_next_draft_tokens=following.num_tokens,
            next_min_acceptance=following.min_acceptance,
            next_tree=following.tree,
            num_features=num_features,
            first_feature=self.features.end if num_features else 0,
            runs_on=is_plain and is_plain_next and following.num_tokens == 0 and self.num_remaining > 1,
        )
        view.in_flight, view.lookahead = item, view.lookahead if is_chunk else None
        return item

    def proposal_item(
        self, num_speculative_tokens: int, min_acceptance: float = 0.0, tree: TreeBudget | None = None
    ) -> SpeculateItem:
        """Asks the draft what may follow the committed tokens; replaces what it was asked before."""
        self._branches.ask_proposal()
        most = num_speculative_tokens
        return self.draft.next_item(self.committed, most, min_acceptance=min_acceptance, tree=tree)

    def outcomes_item(
        self, num_speculative_tokens: int, fanout: tuple[int, ...], max_branches: int = 0
    ) -> SpeculateItem:
        """Asks the draft for continuations of the round that the target is verifying now.

        Args:
            fanout: of no draft token, then of each of the first chain; of a tree, then of each other node.
                Where that ends with the first chain, a verdict that leaves it is a miss.
        """
        verifying = self.target.in_flight
        assert verifying is not None and verifying.sample
        draft = verifying.draft
        nodes, num_chain = draft.chain_first, len(draft.first_path)
        assert len(fanout) in (num_chain + 1, len(nodes) + 1)
        nodes = nodes[: len(fanout) - 1]
        self._branches.ask(nodes, num_chain)
        asked = draft if draft.is_chain else draft.only(nodes)
        most = num_speculative_tokens
        return self.draft.next_item(self.committed, most, asked, fanout=fanout, max_branches=max_branches)

    def prefill_chunk_item(self, num_tokens: int) -> SpeculateItem:
        """Lets the draft prefill the next unread tokens; it is asked nothing.

        Args:
            num_tokens: 0: it is given features alone.
        """
        assert self.draft.in_flight is None and (num_tokens >= 1 or self.features.waiting is not None)
        return self.draft.next_item(self.committed, 0, end=self.draft.synced_len + num_tokens)

    # Replies of the target

    def on_verdict(self, verdict: Verdict) -> Commit | None:
        """Commits what the target kept. None: a late reply, nothing changed.

        Raises:
            ProtocolError: the verdict does not fit the item; nothing changed but that it is answered.
        """
        item = self.target.accept(verdict)
        if item is None:
            return None
        self.target.in_flight = None
        if verdict.features is not None:
            self.features.add(verdict.features)
        if verdict.prompt_logprobs:
            self.prompt_scores.add(item.base_len, verdict.prompt_logprobs)
        sent_len = item.base_len + len(item.token_ids)
        if self.num_output_tokens == 0:
            self.num_cached_tokens += verdict.num_cached_tokens
        if item.sample:
            return self._commit(item, verdict, sent_len)
        held_len = sent_len if verdict.held_len is None else verdict.held_len
        if not item.base_len < held_len <= sent_len:
            raise ProtocolError(f"{held_len} tokens are held of {sent_len}, after {item.base_len}")
        self.target.synced_len = held_len
        return Commit()

    def _commit(self, item: VerifyItem, verdict: Verdict, sent_len: int) -> Commit:
        draft, num_accepted, next_token_id = item.draft, verdict.num_accepted_tokens, verdict.next_token_id
        if next_token_id is None:
            raise ProtocolError("a verdict without a next token")
        kept = kept_of(draft, num_accepted, verdict.last_accepted_node)
        self.target.synced_len = sent_len
        token_ids = (*kept.token_ids, next_token_id)
        cut = self._stops.cut(token_ids, self.num_output_tokens)
        token_ids = token_ids[: cut.num_kept]
        num_kept = min(num_accepted, cut.num_kept)
        self.tally.observe(len(draft), draft.depth, num_accepted, num_kept)
        self.committed.extend(token_ids)
        self.finish_reason, self.stop_reason = cut.finish_reason, cut.stop_reason
        asks_next, looked_ahead, offered = item.max_next_nodes > 0, item.lookahead is not None, NO_DRAFT
        if looked_ahead:
            # Looking ahead draws nothing, so it needs no distributions.
            most, vocab_size = MAX_DRAFT_NODES, self._vocab_size
            offered = usable_draft(verdict.draft, most=most, vocab_size=vocab_size, needs_probs=False)
        return Commit(
            token_ids,
            verdict.logprobs[: cut.num_kept],
            num_draft_tokens=len(draft),
            num_accepted_tokens=num_accepted,
            num_kept_tokens=num_kept,
            lookup=self._look_up((kept.last_node, next_token_id)),
            source=self._verified_source,
            depth=draft.depth,
            tree=verdict_on_tree(draft, kept.last_node),
            offered=offered,
            had_window=looked_ahead,
            next_draft=self._usable(verdict.draft, most=item.max_next_nodes) if asks_next else NO_DRAFT,
        )

    def _look_up(self, outcome: tuple[int, int]) -> Lookup:
        """Takes what the draft has answered for the verdict as what is verified next."""
        asked = self.draft.asked
        has_fanout = asked is not None and len(asked.fanout) > 0
        found = self._branches.look_up(outcome, is_asked=asked is not None, has_fanout=has_fanout)
        self.drafted, self._source = found.draft, DraftKind.MODEL.value
        if asked is not None and found.lookup is not Lookup.PENDING:
            self.draft.in_flight = None
        return found.lookup

    def on_target_refused(self, reply: UnknownSequence | ItemFailed) -> bool:
        """The target lost the sequence, or failed: the next item carries everything, unless the failure is
        not retriable and ends the request. False: a late reply."""
        if self.target.accept(reply) is None:
            return False
        self.lose_target()
        if isinstance(reply, ItemFailed) and not reply.is_retriable:
            invalid = InvalidRequestError(reply.message, field=reply.field or None)
            self.fail(invalid if reply.is_invalid else SpecrayError(reply.message))
        return True

    def lose_target(self) -> None:
        """The target holds nothing of this session any more. What was drafted for the next round still fits.

        Branches for the round that was lost stay: when the same draft tokens are verified again, under a new
        round id, they answer it.
        """
        self.target.lose()
        if self.num_output_tokens == 0:
            self.num_cached_tokens = 0

    # Replies of the draft

    def on_proposal(self, proposal: Proposal) -> bool:
        """Takes a proposal. False: a late reply.

        While the target verifies something else after the same prefix (nothing for the first token, or a
        fallback), a proposal is one branch: the tokens that both have in common, then its next one.
        """
        item = self.draft.take(proposal)
        if item is None:
            return False
        if item.is_prefill_chunk:
            self.draft.in_flight = None
            return True
        drafted = self._usable(proposal.draft, most=item.max_draft_nodes)
        is_current = self.draft.synced_len == len(self.committed)
        verifying = self.target.in_flight
        if is_current and (verifying is None or not verifying.sample):
            self.draft.in_flight = None
            self.take_draft(drafted)
            return True
        self._branches.add_proposal(self._verified, drafted.first_chain())
        self._settle()
        return True

    def on_outcomes(self, outcomes: Outcomes) -> bool:
        """Takes branches of the round in flight, or of the verdict that came before them. False: late."""
        item = self.draft.take(outcomes)
        if item is None:
            return False
        for branch in outcomes.branches:
            draft = self._usable(branch.draft, most=item.num_speculative_tokens)
            self._branches.add(branch, draft)
        self._settle()
        return True

    def on_draft_refused(self, reply: UnknownSequence | ItemFailed) -> bool:
        """The draft lost the sequence, or cannot serve it; the next item carries all. False: a late reply."""
        if self.draft.accept(reply) is None:
            return False
        self.lose_draft()
        return True

    def lose_draft(self) -> None:
        """The draft holds nothing of this session and owes nothing. What it had answered is kept."""
        self.draft.lose()
        self._branches.give_up()

    # What to verify next

    def take_draft(
        self,
        drafted: DraftTokens,
        source: str = DraftKind.MODEL.value,
        following: NextDraft = NOTHING_NEXT,
    ) -> None:
        """Decides what the next Verify carries, and how much it asks of the target's own drafter."""
        self.drafted, self._source, self._next = drafted, source, following

    def skip_draft(self) -> None:
        """Goes on without the draft in this round: what it was asked is forgotten."""
        self.draft.in_flight = None
        self._branches.give_up()
        self.take_draft(NO_DRAFT)

    # Ends

    def abort(self) -> None:
        if not self.is_finished:
            self.finish_reason = FinishReason.ABORT

    def fail(self, error: SpecrayError) -> None:
        if not self.is_finished:
            self.finish_reason, self.error = FinishReason.ERROR, error

    def _settle(self) -> None:
        """The draft has answered, which settles a verdict that waited for it."""
        found = self._branches.settle()
        if found is not None:
            self.drafted, self._source, self.draft.in_flight = found.draft, DraftKind.MODEL.value, None
