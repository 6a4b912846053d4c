"""A session that verifies trees: what a verdict keeps, what is counted, and which outcome it was."""

from __future__ import annotations

import pytest

from specray.draft_tokens import NO_DRAFT, DraftTokens, SparseProbs
from specray.errors import ProtocolError
from specray.requests import FinishReason
from specray.router.session.session import Session
from specray.router.session.values import Commit, Lookup, TreeVerdict
from specray.types import Branch, Outcomes, Proposal, Verification
from tests.unit.router.session.harness import ROOM, decoding, new_session, propose, verdict

#     9
#    /  \
#  10    11
#   |   /  \
#  12  13   14
#            |
#           15
TREE = DraftTokens((10, 11, 12, 13, 14, 15), (-1, -1, 0, 1, 1, 4))


def propose_tree(session: Session, tree: DraftTokens = TREE, *, asked: int = 5) -> None:
    item = session.proposal_item(asked)
    assert session.on_proposal(Proposal("a", item.round_id, item.base_len, tree))


def verifying(**options: object) -> Session:
    session = decoding(**options)
    propose_tree(session)
    assert session.verify_item(ROOM).draft == TREE
    return session


def test_verdict_commits_the_path_to_its_node() -> None:
    session = verifying()
    commit = verdict(session, 2, 50, last_accepted_node=4)
    told = TreeVerdict(num_nodes=6, num_accepted=2, num_chain_nodes=2, num_chain_accepted=0)
    assert commit == Commit((11, 14, 50), (), 6, 2, 2, Lookup.NOT_ASKED, depth=3, tree=told)
    assert session.committed == [1, 2, 3, 4, 9, 11, 14, 50]
    item = session.verify_item(ROOM)
    assert (item.base_len, item.token_ids) == (5, (11, 14, 50))


def test_verdict_without_a_node_keeps_of_the_first_chain() -> None:
    session = verifying()
    commit = verdict(session, 2, 50)
    assert commit is not None and commit.token_ids == (10, 12, 50)
    session = verifying()
    commit = verdict(session, 0, 50)
    assert commit is not None and commit.token_ids == (50,)


@pytest.mark.parametrize(
    ("num_accepted", "node"), [(3, None), (1, 6), (1, 4), (3, 4), (0, 0), (7, 5), (1, 99)]
)
def test_verdict_with_no_such_path_breaks_the_protocol(num_accepted: int, node: int | None) -> None:
    session = verifying()
    with pytest.raises(ProtocolError, match=f"keeps {num_accepted}"):
        verdict(session, num_accepted, 50, last_accepted_node=node)
    assert session.committed == [1, 2, 3, 4, 9]


def test_counters_tell_nodes_from_depths() -> None:
    session = verifying()
    verdict(session, 3, 50, last_accepted_node=5)
    stats = session.tally.stats
    assert (stats.num_spec_steps, stats.num_draft_tokens, stats.num_accepted_draft_tokens) == (1, 6, 3)
    assert stats.acceptance_histogram == (0, 0, 0, 1)


def test_stop_token_on_the_path_ends_the_output() -> None:
    session = verifying(stop_token_ids=(14,))
    commit = verdict(session, 3, 50, last_accepted_node=5)
    assert commit is not None and (commit.token_ids, commit.num_kept_tokens) == ((11, 14), 2)
    assert (session.finish_reason, session.stop_reason) == (FinishReason.STOP, 14)


def test_nodes_deeper_than_the_output_may_grow_are_left_out() -> None:
    """The others stay, however many: none of them is more than the output may still have."""
    session = decoding(max_tokens=4)
    propose_tree(session)
    assert session.verify_item(ROOM).draft == DraftTokens((10, 11, 12, 13, 14), (-1, -1, 0, 1, 1))
    session = decoding(max_tokens=2)
    propose_tree(session)
    assert session.verify_item(ROOM).draft == NO_DRAFT


def test_nodes_that_find_no_room_are_left_out() -> None:
    session = decoding()
    propose_tree(session)
    assert session.verify_item(4).draft == TREE.first(3)


def test_nodes_deeper_than_asked_are_cut() -> None:
    session = decoding()
    propose_tree(session, asked=1)
    assert session.drafted == DraftTokens((10, 11), (-1, -1))


def test_of_a_tree_that_was_sampled_the_first_chain_is_verified() -> None:
    probs = tuple(SparseProbs((token_id,), (1.0,)) for token_id in TREE.token_ids)
    session = decoding(verification=Verification.REJECTION, temperature=1.0)
    propose_tree(session, DraftTokens(TREE.token_ids, TREE.parents, probs))
    assert session.drafted == DraftTokens((10, 12), probs=(probs[0], probs[2]))
    # What was chosen without randomness stays a tree.
    session.take_draft(TREE)
    assert session.verify_item(ROOM).draft == TREE


# Outcomes


def asked(session: Session, *branches: Branch) -> None:
    """Outcomes of the first chain of the tree in flight, and the draft's answer."""
    item = session.outcomes_item(3, (1, 1, 1))
    assert item.proposed_token_ids == (10, 12)
    assert session.on_outcomes(Outcomes("a", item.round_id, item.base_len, branches))


def test_outcome_on_the_first_chain_is_a_hit() -> None:
    session = verifying()
    asked(session, Branch(0, 40, DraftTokens((41,))), Branch(2, 50, DraftTokens((51, 52))))
    commit = verdict(session, 2, 50, last_accepted_node=2)
    assert commit is not None and commit.lookup is Lookup.HIT
    assert session.drafted == DraftTokens((51, 52))


def test_as_many_tokens_on_another_path_are_no_hit() -> None:
    session = verifying()
    asked(session, Branch(2, 50, DraftTokens((51, 52))))
    commit = verdict(session, 2, 50, last_accepted_node=4)
    assert commit is not None and commit.lookup is Lookup.MISS_COUNT
    assert session.drafted is None


def test_outcomes_that_come_late_are_looked_up_by_node_too() -> None:
    for node, drafted in ((2, DraftTokens((51, 52))), (3, None)):
        session = verifying()
        item = session.outcomes_item(3, (1, 1, 1))
        commit = verdict(session, 2, 50, last_accepted_node=node)
        assert commit is not None and commit.lookup is Lookup.PENDING
        branch = Branch(2, 50, DraftTokens((51, 52)))
        assert session.on_outcomes(Outcomes("a", item.round_id, item.base_len, (branch,)))
        assert session.drafted == drafted


# Nodes of TREE, those of its first chain (10, 12) first: 0, 2, 1, 3, 4, 5.
FANOUT_OF_ALL = (1,) * 7


def test_draft_is_told_the_first_chain_before_the_other_nodes() -> None:
    session = verifying()
    item = session.outcomes_item(3, FANOUT_OF_ALL, 5)
    assert item.proposed_token_ids == (10, 12, 11, 13, 14, 15)
    assert item.proposed_parents == (-1, 0, -1, 2, 2, 4)
    assert (item.fanout, item.max_branches) == (FANOUT_OF_ALL, 5)
    chain = item.of_first_chain()
    assert (chain.proposed_token_ids, chain.fanout, chain.proposed_parents) == ((10, 12), (1, 1, 1), None)


@pytest.mark.parametrize(
    ("num_accepted", "node", "next_token_id", "lookup", "drafted"),
    [
        (2, 4, 50, Lookup.HIT, DraftTokens((51, 52))),
        (3, 5, 60, Lookup.HIT, DraftTokens((61,))),
        (2, 2, 40, Lookup.HIT, DraftTokens((41,))),
        (0, None, 30, Lookup.HIT, DraftTokens((31,))),
        (2, 4, 51, Lookup.MISS_TOKEN, None),
        (2, 3, 50, Lookup.MISS_COUNT, None),
        (2, 2, 50, Lookup.MISS_TOKEN, None),
    ],
)
def test_verdict_is_looked_up_by_its_node_and_next_token(
    num_accepted: int, node: int | None, next_token_id: int, lookup: Lookup, drafted: DraftTokens | None
) -> None:
    session = verifying()
    item = session.outcomes_item(3, FANOUT_OF_ALL)
    branches = (
        Branch(0, 30, DraftTokens((31,))),
        Branch(2, 40, DraftTokens((41,))),
        Branch(2, 50, DraftTokens((51, 52)), last_accepted_node=4),
        Branch(3, 60, DraftTokens((61,)), last_accepted_node=5),
    )
    assert session.on_outcomes(Outcomes("a", item.round_id, item.base_len, branches))
    commit = verdict(session, num_accepted, next_token_id, last_accepted_node=node)
    assert commit is not None and commit.lookup is lookup
    assert session.drafted == drafted


def test_branches_behind_nodes_that_were_not_asked_for_are_dropped() -> None:
    session = verifying()
    item = session.outcomes_item(3, FANOUT_OF_ALL)
    branches = (Branch(3, 50, DraftTokens((51,))), Branch(2, 50, DraftTokens((51,)), last_accepted_node=6))
    assert session.on_outcomes(Outcomes("a", item.round_id, item.base_len, branches))
    commit = verdict(session, 3, 50, last_accepted_node=5)
    assert commit is not None and commit.lookup is Lookup.MISS_COUNT


@pytest.mark.parametrize(("node", "lookup"), [(4, Lookup.HIT), (2, Lookup.MISS_TOKEN)])
def test_proposal_beside_a_tree_is_the_branch_where_it_leaves_it(node: int, lookup: Lookup) -> None:
    """As an n-gram tree for the prompt's end, with the draft's proposal on its way."""
    session = new_session()
    session.take_draft(TREE)
    session.verify_item(ROOM)
    assert propose(session, (11, 14, 20, 21))
    commit = verdict(session, 2, 20, last_accepted_node=node)
    assert commit is not None and commit.lookup is lookup
    assert session.drafted == (DraftTokens((21,)) if lookup is Lookup.HIT else None)
