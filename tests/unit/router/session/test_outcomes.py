"""Verdicts are looked up among the outcomes that the draft foresaw: hits, misses, and late ones."""

from __future__ import annotations

import pytest

from specray.draft_tokens import DraftTokens
from specray.router.session.values import Lookup
from specray.types import Branch, Outcomes, Proposal
from tests.unit.router.session.harness import BRANCHES, ROOM, ahead, decoding, new_session, propose, verdict


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
