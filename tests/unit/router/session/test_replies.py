"""Replies that are late, doubled, lost or broken: what a session drops, sends again, or ends with."""

from __future__ import annotations

import math

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens, SparseProbs
from specray.errors import ProtocolError
from specray.requests import FinishReason
from specray.router.session.values import Lookup
from specray.types import ItemFailed, Proposal, UnknownSequence, Verdict, Verification
from tests.unit.router.session.harness import BRANCHES, PROMPT, ROOM, ahead, decoding, propose, verdict

# Late replies


def test_reply_to_an_earlier_round_is_dropped() -> None:
    session = decoding()
    late = Verdict("a", 1, 0, 0, 33)
    assert session.on_verdict(late) is None
    session.verify_item(ROOM)
    assert session.on_verdict(late) is None
    assert not session.on_target_refused(UnknownSequence("a", 1, 0))
    assert not session.on_target_refused(ItemFailed("a", 1, 0, "no", is_retriable=False))
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
    assert session.on_target_refused(UnknownSequence("a", item.round_id, item.base_len))
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
    session.on_target_refused(ItemFailed("a", item.round_id, item.base_len, "too long", is_retriable=False))
    assert (session.finish_reason, str(session.error)) == (FinishReason.ERROR, "too long")


def test_retriable_failure_starts_over() -> None:
    session = decoding()
    item = session.verify_item(ROOM)
    session.on_target_refused(ItemFailed("a", item.round_id, item.base_len, "no room", is_retriable=True))
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
    """A draft whose vocabulary is padded further than the target's may have them."""
    session = decoding()
    propose(session, (10, token, 11))
    assert session.drafted == DraftTokens((10,))
    propose(session, (token,))
    assert session.drafted == NO_DRAFT


def test_tree_loses_foreign_tokens_and_what_follows_them() -> None:
    session = decoding()
    item = session.proposal_item(3)
    tree = DraftTokens((10, 64, 11, 12, 13), (-1, -1, 0, 1, 0))
    session.on_proposal(Proposal("a", item.round_id, 0, tree))
    assert session.drafted == DraftTokens((10, 11, 13), (-1, 0, 0))


@pytest.mark.parametrize(("drawn", "foreign"), [(11, 64), (64, 64), (11, -1), (-1, -1)])
def test_chain_drawn_for_rejection_ends_where_a_foreign_token_could_be_drawn(
    drawn: int, foreign: int
) -> None:
    """Whether or not it was: else what was drawn would decide what is verified."""
    probs = (
        SparseProbs((10, 9), (0.5, 0.5)),
        SparseProbs((11, foreign), (0.5, 0.5)),
        SparseProbs((12,), (1.0,)),
    )
    session = decoding(verification=Verification.REJECTION, temperature=1.0)
    propose(session, (10, drawn, 12), probs)
    assert session.drafted == DraftTokens((10,), probs=probs[:1])


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
