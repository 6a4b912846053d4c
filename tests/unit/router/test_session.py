"""The session's state machine: every edge by name, then all of them at once against a sequential oracle."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specray.draft_tokens import NO_DRAFT, DraftTokens, SparseProbs
from specray.errors import ProtocolError
from specray.fakes import FakeDraft, FakeTarget, NoisyGuesser
from specray.requests import FinishReason
from specray.router.session import Session
from specray.router.session_values import Commit, Lookup
from specray.types import (
    Branch,
    ItemFailed,
    Outcomes,
    Proposal,
    TokenLogprobs,
    UnknownSequence,
    Verdict,
    Verification,
)
from tests.unit.router.harness import MODEL, expected, request

PROMPT = (1, 2, 3, 4)
ROOM = 1000


def new_session(matcher: Any = None, **options: Any) -> Session:
    return Session(request("a", PROMPT, **options), matcher, vocab_size=64)


def verdict(session: Session, num_accepted: int, next_token_id: int | None, **options: Any) -> Commit | None:
    """Answers the Verify in flight."""
    item = session.target.in_flight
    assert item is not None
    reply = Verdict("a", item.round_id, item.base_len, num_accepted, next_token_id, **options)
    return session.on_verdict(reply)


def decoding(**options: Any) -> Session:
    """A session that has its first output token, 9, and an idle target that holds the prompt."""
    session = new_session(**options)
    session.verify_item(ROOM)
    verdict(session, 0, 9)
    return session


def propose(session: Session, tokens: Sequence[int], probs: tuple[SparseProbs, ...] = ()) -> bool:
    item = session.proposal_item(len(tokens))
    return session.on_proposal(
        Proposal("a", item.round_id, item.base_len, DraftTokens(tuple(tokens), probs=probs))
    )


class Stops:
    """Matches when the tokens end with what it was given."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)
        self._seen: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str | None:
        self._seen += token_ids
        return "END" if self._seen[-len(self._tokens) :] == self._tokens else None


# Items


def test_prompt_goes_in_chunks_and_only_the_last_samples() -> None:
    session = new_session()
    first = session.verify_item(3)
    assert (first.base_len, first.token_ids, first.sample) == (0, (1, 2, 3), False)
    assert first.sampling == session.request.sampling
    assert verdict(session, 0, None) == Commit((), (), 0, 0, Lookup.NOT_ASKED)
    last = session.verify_item(3)
    assert (last.base_len, last.token_ids, last.sample, last.sampling) == (3, (4,), True, None)


def test_next_item_brings_accepted_and_next_token_after_what_the_target_was_told() -> None:
    session = decoding()
    propose(session, (10, 11, 12))
    item = session.verify_item(ROOM)
    assert (item.base_len, item.token_ids, item.draft.token_ids) == (4, (9,), (10, 11, 12))
    assert verdict(session, 2, 50) == Commit((10, 11, 50), (), 3, 2, Lookup.NOT_ASKED)
    item = session.verify_item(ROOM)
    assert (item.base_len, item.token_ids) == (5, (10, 11, 50))
    assert session.committed == [1, 2, 3, 4, 9, 10, 11, 50]


def test_draft_item_brings_all_that_the_draft_was_not_told() -> None:
    session = decoding()
    item = session.proposal_item(4)
    assert (item.base_len, item.token_ids, item.num_speculative_tokens) == (0, (1, 2, 3, 4, 9), 4)
    assert item.sampling is not None
    session.on_proposal(Proposal("a", item.round_id, 0, DraftTokens((10,))))
    session.verify_item(ROOM)
    verdict(session, 1, 11)
    item = session.proposal_item(4)
    assert (item.base_len, item.token_ids, item.sampling) == (5, (10, 11), None)


def test_draft_tokens_never_reach_max_tokens() -> None:
    session = decoding(max_tokens=4)
    propose(session, (10, 11, 12, 13))
    assert session.verify_item(ROOM).draft.token_ids == (10, 11)


def test_draft_tokens_that_find_no_room_are_left_out() -> None:
    session = decoding()
    propose(session, (10, 11, 12))
    assert session.verify_item(3).draft.token_ids == (10, 11)


# Pieces


def read(session: Session, num_tokens: int, draft_token_ids: tuple[int, ...] = ()) -> bool:
    """Gives the draft a piece, which it has read at once."""
    item = session.prefill_chunk_item(num_tokens)
    return session.on_proposal(Proposal("a", item.round_id, item.base_len, DraftTokens(draft_token_ids)))


def test_piece_brings_the_next_unread_tokens_and_asks_nothing() -> None:
    session = decoding()
    first = session.prefill_chunk_item(3)
    assert (first.base_len, first.token_ids, first.is_prefill_chunk) == (0, (1, 2, 3), True)
    assert (first.num_speculative_tokens, first.fanout, first.sampling) == (0, (), session.request.sampling)
    assert session.on_proposal(Proposal("a", first.round_id, 0, NO_DRAFT))
    assert (session.draft.synced_len, session.draft.in_flight, session.drafted) == (3, None, None)
    rest = session.proposal_item(4)
    assert (rest.base_len, rest.token_ids, rest.is_prefill_chunk, rest.sampling) == (3, (4, 9), False, None)


def test_empty_answer_to_a_piece_decides_nothing_even_if_it_brought_all_there_is() -> None:
    session = decoding()
    assert read(session, 5)
    assert session.draft.synced_len == 5
    assert session.drafted is None


def test_draft_tokens_that_were_not_asked_for_are_not_taken_from_a_piece() -> None:
    session = new_session()
    session.verify_item(ROOM)
    assert read(session, 4, (9, 10, 11))
    commit = verdict(session, 0, 9)
    assert commit is not None and commit.lookup is Lookup.NOT_ASKED
    assert session.drafted is None


def test_next_round_does_not_wait_for_a_piece() -> None:
    session = decoding()
    session.prefill_chunk_item(3)
    assert session.draft.is_prefilling
    assert not session.is_waiting_for_draft


def test_verdict_is_not_looked_up_while_the_draft_reads_a_piece() -> None:
    session = new_session()
    session.verify_item(ROOM)
    item = session.prefill_chunk_item(3)
    commit = verdict(session, 0, 9)
    assert commit is not None and commit.lookup is Lookup.NOT_ASKED
    assert not session.has_open_verdict
    assert session.on_proposal(Proposal("a", item.round_id, 0, NO_DRAFT))
    assert (session.draft.synced_len, session.drafted) == (3, None)


def test_hit_among_branches_of_a_lost_draft_leaves_the_piece_for_the_next_one_in_flight() -> None:
    session = decoding()
    session.on_outcomes(ahead(session, BRANCHES))
    session.lose_draft()
    item = session.prefill_chunk_item(4)
    commit = verdict(session, 2, 50)
    assert commit is not None and commit.lookup is Lookup.HIT
    assert session.on_proposal(Proposal("a", item.round_id, 0, NO_DRAFT))
    assert session.draft.synced_len == 4


def test_answer_to_a_piece_that_was_lost_with_its_draft_is_late() -> None:
    session = decoding()
    item = session.prefill_chunk_item(3)
    session.lose_draft()
    assert not session.on_proposal(Proposal("a", item.round_id, 0, NO_DRAFT))
    assert session.draft.synced_len == 0
    assert session.prefill_chunk_item(3).base_len == 0


# Outcomes


def ahead(session: Session, branches: Sequence[Branch], *, fanout: tuple[int, ...] = (1, 1, 1)) -> Outcomes:
    """Sends 10, 11 to the target, asks for outcomes; returns the draft's answer, not yet delivered."""
    propose(session, (10, 11))
    session.verify_item(ROOM)
    item = session.outcomes_item(3, fanout)
    assert (item.proposed_token_ids, item.fanout) == ((10, 11), fanout)
    return Outcomes("a", item.round_id, item.base_len, tuple(branches))


BRANCHES = (Branch(1, 40, DraftTokens((41, 42))), Branch(2, 50, DraftTokens((51, 52, 53))))


def test_hit_gives_the_next_verify_at_once() -> None:
    session = decoding()
    assert session.on_outcomes(ahead(session, BRANCHES))
    commit = verdict(session, 2, 50)
    assert commit is not None and commit.lookup is Lookup.HIT
    assert session.verify_item(ROOM).draft.token_ids == (51, 52, 53)


def test_miss_of_the_token_and_miss_of_the_count_are_told_apart() -> None:
    """A draft that may choose its branches leaves unlikely numbers of accepted tokens out."""
    for branches, cause in ((BRANCHES, Lookup.MISS_TOKEN), (BRANCHES[1:], Lookup.MISS_COUNT)):
        session = decoding()
        session.on_outcomes(ahead(session, branches))
        commit = verdict(session, 1, 39)
        assert commit is not None and commit.lookup is cause
        assert session.drafted is None and session.draft.in_flight is None


@pytest.mark.parametrize(("next_token", "drafted"), [(40, DraftTokens((41, 42))), (39, None)])
def test_verdict_before_its_outcomes_waits_for_them(next_token: int, drafted: DraftTokens | None) -> None:
    session = decoding()
    outcomes = ahead(session, BRANCHES)
    commit = verdict(session, 1, next_token)
    assert commit is not None and commit.lookup is Lookup.PENDING
    assert session.is_waiting_for_draft
    assert session.on_outcomes(outcomes)
    assert session.drafted == drafted
    assert not session.is_waiting_for_draft


def test_outcomes_may_come_in_several_messages_before_the_verdict() -> None:
    session = decoding()
    whole = ahead(session, BRANCHES)
    for branch in BRANCHES:
        assert session.on_outcomes(Outcomes("a", whole.round_id, whole.base_len, (branch,)))
    commit = verdict(session, 1, 40)
    assert commit is not None and commit.lookup is Lookup.HIT
    assert session.drafted == DraftTokens((41, 42))


def test_branches_die_with_their_round() -> None:
    session = decoding()
    session.on_outcomes(
        ahead(session, (Branch(0, 40, DraftTokens((41,))), Branch(0, 30, DraftTokens((31,)))))
    )
    verdict(session, 0, 40)
    session.verify_item(ROOM)
    commit = verdict(session, 0, 30)
    assert commit is not None and commit.lookup is Lookup.NOT_ASKED
    assert session.drafted is None


def test_proposal_for_the_prompt_is_the_one_branch_of_the_first_token() -> None:
    session = new_session()
    session.verify_item(ROOM)
    assert propose(session, (9, 10, 11))
    commit = verdict(session, 0, 9)
    assert commit is not None and commit.lookup is Lookup.HIT
    assert session.drafted == DraftTokens((10, 11))


def test_proposal_for_the_prompt_that_comes_after_the_first_token_still_counts() -> None:
    session = new_session()
    session.verify_item(ROOM)
    item = session.proposal_item(3)
    commit = verdict(session, 0, 9)
    assert commit is not None and commit.lookup is Lookup.PENDING
    session.on_proposal(Proposal("a", item.round_id, 0, DraftTokens((9, 10, 11))))
    assert session.drafted == DraftTokens((10, 11))


def test_proposal_that_comes_between_prefill_chunks_rides_with_the_last() -> None:
    session = new_session()
    session.verify_item(3)
    propose(session, (9, 10))
    verdict(session, 0, None)
    item = session.verify_item(ROOM)
    assert (item.token_ids, item.draft.token_ids) == ((4,), (9, 10))


# Late replies


def test_reply_to_an_earlier_round_is_dropped() -> None:
    session = decoding()
    late = Verdict("a", 1, 0, 0, 33)
    assert session.on_verdict(late) is None
    session.verify_item(ROOM)
    assert session.on_verdict(late) is None
    assert not session.on_target_unknown(UnknownSequence("a", 1, 0))
    assert not session.on_target_failed(ItemFailed("a", 1, 0, "no", is_retriable=False))
    assert session.committed == [*PROMPT, 9]


def test_doubled_verdict_commits_once() -> None:
    session = decoding()
    item = session.verify_item(ROOM)
    reply = Verdict("a", item.round_id, item.base_len, 0, 33)
    assert session.on_verdict(reply) is not None
    assert session.on_verdict(reply) is None
    assert session.committed == [*PROMPT, 9, 33]


def test_proposal_to_a_replaced_question_is_dropped() -> None:
    session = decoding()
    old = session.proposal_item(2)
    new = session.proposal_item(2)
    assert not session.on_proposal(Proposal("a", old.round_id, 0, DraftTokens((30, 31))))
    assert session.drafted is None
    assert session.on_proposal(Proposal("a", new.round_id, 0, DraftTokens((40, 41))))
    assert session.drafted == DraftTokens((40, 41))


def test_round_ids_go_on_after_an_engine_was_lost() -> None:
    session = decoding()
    session.verify_item(ROOM)
    session.proposal_item(2)
    session.lose_target()
    session.lose_draft()
    assert session.verify_item(ROOM).round_id == 3
    assert session.proposal_item(2).round_id == 2


def test_skipped_draft_is_not_heard_any_more() -> None:
    session = decoding()
    item = session.proposal_item(2)
    session.skip_draft()
    assert not session.is_waiting_for_draft
    assert not session.on_proposal(Proposal("a", item.round_id, 0, DraftTokens((30, 31))))
    assert session.verify_item(ROOM).draft.token_ids == ()


# Losses


def test_unknown_sequence_sends_everything_again_with_the_same_draft_tokens() -> None:
    session = decoding()
    propose(session, (10, 11))
    item = session.verify_item(ROOM)
    assert session.on_target_unknown(UnknownSequence("a", item.round_id, item.base_len))
    again = session.verify_item(ROOM)
    assert (again.base_len, again.token_ids, again.draft.token_ids) == (0, (*PROMPT, 9), (10, 11))
    assert again.sampling == session.request.sampling


def test_unknown_sequence_on_the_draft_sends_everything_again() -> None:
    session = decoding()
    propose(session, (10, 11))
    session.verify_item(ROOM)
    item = session.outcomes_item(2, (1, 1, 1))
    assert session.on_draft_refused(UnknownSequence("a", item.round_id, item.base_len))
    again = session.outcomes_item(2, (1, 1, 1))
    assert (again.base_len, again.token_ids) == (0, (*PROMPT, 9))
    assert again.sampling is not None


def test_draft_lost_while_its_outcomes_are_awaited_ends_the_wait() -> None:
    session = decoding()
    ahead(session, BRANCHES)
    verdict(session, 1, 40)
    session.lose_draft()
    assert not session.is_waiting_for_draft
    assert session.drafted is None


def test_outcomes_that_came_before_the_draft_was_lost_still_hit() -> None:
    session = decoding()
    session.on_outcomes(ahead(session, BRANCHES))
    session.lose_draft()
    commit = verdict(session, 1, 40)
    assert commit is not None and commit.lookup is Lookup.HIT
    session.verify_item(ROOM)
    commit = verdict(session, 0, 7)
    assert commit is not None and commit.lookup is Lookup.NOT_ASKED


def test_failure_that_is_not_retriable_ends_with_an_error() -> None:
    session = decoding()
    item = session.verify_item(ROOM)
    session.on_target_failed(ItemFailed("a", item.round_id, item.base_len, "too long", is_retriable=False))
    assert (session.finish_reason, session.message) == (FinishReason.ERROR, "too long")


def test_retriable_failure_starts_over() -> None:
    session = decoding()
    item = session.verify_item(ROOM)
    session.on_target_failed(ItemFailed("a", item.round_id, item.base_len, "no room", is_retriable=True))
    assert not session.is_finished
    assert session.verify_item(ROOM).base_len == 0


@pytest.mark.parametrize(("num_accepted", "next_token"), [(3, 5), (-1, 5), (1, None)])
def test_verdict_that_does_not_fit_is_a_protocol_error(num_accepted: int, next_token: int | None) -> None:
    session = decoding()
    propose(session, (10, 11))
    session.verify_item(ROOM)
    with pytest.raises(ProtocolError):
        verdict(session, num_accepted, next_token)
    assert session.committed == [*PROMPT, 9]


# What a broken draft must not do


@pytest.mark.parametrize("token", [-1, 64])
def test_foreign_draft_tokens_do_not_reach_the_target(token: int) -> None:
    session = decoding()
    propose(session, (10, token))
    assert session.drafted == NO_DRAFT


def test_more_draft_tokens_than_asked_are_cut() -> None:
    session = decoding()
    item = session.proposal_item(2)
    session.on_proposal(Proposal("a", item.round_id, 0, DraftTokens((10, 11, 12))))
    assert session.drafted == DraftTokens((10, 11))


def test_rejection_needs_a_distribution_for_each_draft_token() -> None:
    probs = (SparseProbs((10,), (1.0,)), SparseProbs((11,), (1.0,)))
    for given, kept in ((probs, DraftTokens((10, 11), probs=probs)), ((), NO_DRAFT)):
        session = decoding(verification=Verification.REJECTION, temperature=1.0)
        propose(session, (10, 11), given)
        assert session.drafted == kept


@pytest.mark.parametrize(
    "row",
    [
        SparseProbs((), ()),
        SparseProbs((11,), (0.0,)),
        SparseProbs((11, 12), (1.0,)),
        SparseProbs((11, 11), (0.5, 0.5)),
        SparseProbs((11, 64), (0.5, 0.5)),
        SparseProbs((-1, 11), (0.5, 0.5)),
        SparseProbs((11, 12), (1.5, -0.5)),
        SparseProbs((11, 12), (0.5, math.nan)),
        SparseProbs((11, 12), (0.5, math.inf)),
    ],
)
def test_rows_that_are_no_distribution_do_not_reach_the_target(row: SparseProbs) -> None:
    """It would refuse the request for them."""
    session = decoding(verification=Verification.REJECTION, temperature=1.0)
    propose(session, (10, 11), (SparseProbs((10,), (1.0,)), row))
    item = session.verify_item(ROOM)
    assert (item.token_ids, item.draft.token_ids, item.draft.probs) == ((9,), (), ())


# Ends


def test_stop_inside_accepted_tokens_drops_what_follows_and_its_logprobs() -> None:
    session = decoding(stop_token_ids=(11,), num_logprobs=0)
    propose(session, (10, 11, 12))
    session.verify_item(ROOM)
    logprobs = tuple(TokenLogprobs(token, -1.0) for token in (10, 11, 12, 13))
    commit = verdict(session, 3, 13, logprobs=logprobs)
    assert commit is not None
    assert (commit.token_ids, commit.logprobs) == ((10, 11), logprobs[:2])
    assert (session.finish_reason, session.stop_reason) == (FinishReason.STOP, 11)
    assert session.committed == [*PROMPT, 9, 10, 11]
    assert session.tally.num_verified_tokens == 1 + 4
    assert session.tally.stats.num_accepted_draft_tokens == 3


def test_end_of_sequence_gives_no_stop_reason() -> None:
    session = decoding(stop_token_ids=(11,), eos=(11,))
    session.verify_item(ROOM)
    verdict(session, 0, 11)
    assert (session.finish_reason, session.stop_reason) == (FinishReason.STOP, None)


def test_stop_string_ends_with_the_token_that_completes_it() -> None:
    session = Session(request("a", PROMPT, stop=("END",)), Stops(10, 11), vocab_size=64)
    session.verify_item(ROOM)
    verdict(session, 0, 9)
    propose(session, (10, 11, 12))
    session.verify_item(ROOM)
    commit = verdict(session, 3, 13)
    assert commit is not None and commit.token_ids == (10, 11)
    assert (session.finish_reason, session.stop_reason) == (FinishReason.STOP, "END")


@pytest.mark.parametrize(("min_tokens", "is_finished"), [(2, True), (3, False)])
def test_stop_string_counts_from_min_tokens_on(min_tokens: int, is_finished: bool) -> None:
    given = request("a", PROMPT, stop=("END",), min_tokens=min_tokens)
    session = Session(given, Stops(9, 10, 11), vocab_size=64)
    session.verify_item(ROOM)
    verdict(session, 0, 9)
    propose(session, (10, 11))
    session.verify_item(ROOM)
    verdict(session, 2, 12)
    assert session.is_finished == is_finished
    assert session.num_output_tokens == (3 if is_finished else 4)


def test_length_cut() -> None:
    session = decoding(max_tokens=3)
    propose(session, (10,))
    session.verify_item(ROOM)
    commit = verdict(session, 1, 11)
    assert commit is not None and commit.token_ids == (10, 11)
    assert (session.finish_reason, session.stop_reason) == (FinishReason.LENGTH, None)


def test_stop_token_at_the_last_place_is_a_stop() -> None:
    session = decoding(max_tokens=2, stop_token_ids=(11,))
    session.verify_item(ROOM)
    verdict(session, 0, 11)
    assert session.finish_reason is FinishReason.STOP


def test_histogram_is_as_long_as_the_longest_proposal_plus_one() -> None:
    session = decoding()
    for tokens, num_accepted in (((10, 11, 12), 2), ((10,), 0), ((), 0)):
        propose(session, tokens)
        session.verify_item(ROOM)
        verdict(session, num_accepted, 20)
    stats = session.tally.stats
    assert stats.acceptance_histogram == (1, 0, 1, 0)
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (2, 4, 2)
    assert session.tally.num_rounds == 4


class SessionMachine(RuleBasedStateMachine):
    """Any order of sends, answers, losses and doubles: the output is the oracle's."""

    def __init__(self) -> None:
        super().__init__()
        self.request = request("a", PROMPT, 20, temperature=1.0, seed=77)
        self.oracle = expected(self.request)
        self.session = Session(self.request, None, vocab_size=64)
        self.target = FakeTarget(MODEL)
        self.draft = FakeDraft(NoisyGuesser(MODEL, agreement=0.5))
        self.target_replies: list[Any] = []
        self.draft_replies: list[Any] = []

    @property
    def can_verify(self) -> bool:
        return self.session.target.in_flight is None and not self.session.is_finished

    @precondition(lambda self: self.can_verify)
    @rule(room=st.integers(min_value=1, max_value=12))
    def verify(self, room: int) -> None:
        self.target_replies += self.target.verify([self.session.verify_item(room)]).replies

    @precondition(lambda self: self.can_verify and self.session.drafted is None)
    @rule(k=st.integers(min_value=0, max_value=5))
    def propose(self, k: int) -> None:
        self.draft_replies += self.draft.speculate([self.session.proposal_item(k)]).replies

    @precondition(
        lambda self: (
            self.session.draft.in_flight is None
            and self.session.draft.synced_len < len(self.session.committed)
        )
    )
    @rule(num_tokens=st.integers(min_value=1, max_value=12))
    def read(self, num_tokens: int) -> None:
        self.draft_replies += self.draft.speculate([self.session.prefill_chunk_item(num_tokens)]).replies

    @precondition(
        lambda self: self.session.target.in_flight is not None and self.session.target.in_flight.sample
    )
    @rule(k=st.integers(min_value=0, max_value=5), width=st.integers(min_value=0, max_value=3))
    def speculate_ahead(self, k: int, width: int) -> None:
        verifying = self.session.target.in_flight
        assert verifying is not None
        fanout = (width,) * len(verifying.draft.token_ids) + (1,)
        self.draft_replies += self.draft.speculate([self.session.outcomes_item(k, fanout)]).replies

    @precondition(lambda self: self.target_replies)
    @rule(pick=st.randoms(use_true_random=False), is_doubled=st.booleans())
    def target_answers(self, pick: random.Random, is_doubled: bool) -> None:
        reply = pick.choice(self.target_replies)
        if not is_doubled:
            self.target_replies.remove(reply)
        if isinstance(reply, Verdict):
            self.session.on_verdict(reply)
        else:
            self.session.on_target_unknown(reply)

    @precondition(lambda self: self.draft_replies)
    @rule(pick=st.randoms(use_true_random=False), is_doubled=st.booleans(), is_lost=st.booleans())
    def draft_answers(self, pick: random.Random, is_doubled: bool, is_lost: bool) -> None:
        reply = pick.choice(self.draft_replies)
        if not is_doubled:
            self.draft_replies.remove(reply)
        if is_lost:
            return
        if isinstance(reply, Proposal):
            self.session.on_proposal(reply)
        elif isinstance(reply, Outcomes):
            self.session.on_outcomes(reply)
        else:
            self.session.on_draft_refused(reply)

    @precondition(lambda self: self.session.is_waiting_for_draft)
    @rule()
    def patience_ends(self) -> None:
        self.session.skip_draft()

    @rule()
    def target_forgets(self) -> None:
        self.target.forget()

    @rule()
    def draft_forgets(self) -> None:
        self.draft.forget()

    @rule()
    def target_is_lost(self) -> None:
        self.target.forget()
        self.session.lose_target()

    @rule()
    def draft_is_lost(self) -> None:
        self.draft.forget()
        self.session.lose_draft()

    @invariant()
    def output_is_the_oracles(self) -> None:
        session = self.session
        output = session.committed[session.num_prompt_tokens :]
        assert tuple(output) == self.oracle[: len(output)]
        assert session.is_finished == (len(output) == self.request.max_tokens)
        tally = session.tally
        assert tally.num_verified_tokens == tally.num_accepted_tokens + tally.num_rounds == len(output)
        assert session.target.synced_len <= len(session.committed)
        assert session.draft.synced_len <= len(session.committed)

    def teardown(self) -> None:
        """From any state the session can be driven to its end: nothing is awaited for ever."""
        self.target.forget()
        self.session.lose_target()
        self.session.lose_draft()
        for _ in range(2 * self.request.max_tokens + 8):
            if self.session.is_finished:
                break
            for reply in self.target.verify([self.session.verify_item(ROOM)]).replies:
                assert isinstance(reply, Verdict)
                self.session.on_verdict(reply)
        assert self.session.finish_reason is FinishReason.LENGTH


TestSessionAgainstOracle = SessionMachine.TestCase
TestSessionAgainstOracle.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
