"""Tests of what a grammar cuts from a session's draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

from specray.draft_tokens import DraftTokens, SparseProbs
from specray.types import Verification
from tests.unit.router.session.harness import ROOM, decoding, propose


class OnlySmall:
    """A grammar of the tokens below 20, in which 7 follows 9."""

    def count_legal(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        assert tuple(output_ids) == (9,), "the prompt is no part of it"
        return next((i for i, token in enumerate(token_ids) if token >= 20), len(token_ids))

    def forced(self, output_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        return (7,)[:limit] if output_ids[-1] == 9 else ()


def test_chain_ends_before_its_first_illegal_token() -> None:
    session = decoding()
    session.guide.grammar = OnlySmall()
    propose(session, (10, 11, 40, 12))
    assert session.verify_item(ROOM).draft.token_ids == (10, 11)


def test_sampled_chain_keeps_its_illegal_token_for_the_target_to_reject() -> None:
    session = decoding(temperature=1.0, verification=Verification.REJECTION)
    session.guide.grammar = OnlySmall()
    tokens = (10, 11, 40, 12)
    propose(session, tokens, tuple(SparseProbs((token,), (1.0,)) for token in tokens))
    assert session.verify_item(ROOM).draft.token_ids == (10, 11, 40)


def test_legal_chain_stays_whole() -> None:
    session = decoding()
    session.guide.grammar = OnlySmall()
    propose(session, (10, 11))
    assert session.verify_item(ROOM).draft.token_ids == (10, 11)


def test_tree_is_left_to_the_target() -> None:
    session = decoding()
    session.guide.grammar = OnlySmall()
    tree = DraftTokens((10, 40, 41), (-1, -1, 1))
    session.take_draft(tree)
    assert session.verify_item(ROOM).draft == tree


def test_without_a_grammar_nothing_is_cut_or_forced() -> None:
    session = decoding()
    propose(session, (10, 40))
    assert session.guide.forced(8) == DraftTokens()
    assert session.verify_item(ROOM).draft.token_ids == (10, 40)


def test_forced_tokens_follow_the_output() -> None:
    session = decoding()
    session.guide.grammar = OnlySmall()
    assert session.guide.forced(8).token_ids == (7,)
    assert session.guide.forced(0).token_ids == ()
