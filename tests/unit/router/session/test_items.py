"""What a session sends: the next item for each engine, and the pieces that its draft reads."""

from __future__ import annotations

from specray.draft_tokens import NO_DRAFT, DraftTokens
from specray.router.session.session import Session
from specray.router.session.values import Commit, Lookup
from specray.types import Proposal
from tests.unit.router.session.harness import BRANCHES, ROOM, ahead, decoding, new_session, propose, verdict

# Items


def test_prompt_goes_in_chunks_and_only_the_last_samples() -> None:
    session = new_session()
    first = session.verify_item(3)
    assert (first.base_len, first.token_ids, first.sample) == (0, (1, 2, 3), False)
    assert first.sampling == session.request.sampling
    assert verdict(session, 0, None) == Commit((), (), 0, 0, 0, Lookup.NOT_ASKED)
    last = session.verify_item(3)
    assert (last.base_len, last.token_ids, last.sample, last.sampling) == (3, (4,), True, None)


def test_next_item_brings_accepted_and_next_token_after_what_the_target_was_told() -> None:
    session = decoding()
    propose(session, (10, 11, 12))
    item = session.verify_item(ROOM)
    assert (item.base_len, item.token_ids, item.draft.token_ids) == (4, (9,), (10, 11, 12))
    assert verdict(session, 2, 50) == Commit((10, 11, 50), (), 3, 2, 2, Lookup.NOT_ASKED, depth=3)
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
