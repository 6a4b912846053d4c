"""A round on the wire: what its messages cost, and what peers from before a field make of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specray.draft_tokens import DraftTokens, TreeBudget
from specray.engine_info import RoutedExperts, StepTime
from specray.errors import ProtocolError
from specray.fakes.engines import fake_info
from specray.rpc.codec import draft as draft_codec
from specray.rpc.codec import target as target_codec
from specray.rpc.codec.values import decode_info, encode_info
from specray.rpc.pb import draft_pb2, target_pb2
from specray.rpc.role import TARGET
from specray.types import (
    Branch,
    DraftReplies,
    Outcomes,
    Proposal,
    SpeculateItem,
    TargetReplies,
    Verdict,
    VerifyItem,
)


def verify_item(**fields: object) -> bytes:
    return target_pb2.VerifyRequest(items=[target_pb2.VerifyItem(**fields)]).SerializeToString()


TREE = DraftTokens(tuple(range(48_000, 48_016)), (-1, -1, 0, 0, 1, 2, 2, 3, 5, 5, 6, 8, 8, 9, 11, 12))
"""Sixteen nodes, with token ids of a large vocabulary."""


def bytes_of_round(
    ask: SpeculateItem, answer: Proposal | Outcomes, item: VerifyItem, verdict: Verdict
) -> int:
    """What a round of one session costs, draft and target, both ways."""
    return (
        len(draft_codec.encode_speculate_request([ask], ()))
        + len(draft_codec.encode_draft_replies(DraftReplies((answer,), 20_000_000)))
        + len(target_codec.encode_verify_request([item], ()))
        + len(target_codec.encode_target_replies(TargetReplies((verdict,), 20_000_000)))
    )


HEAD = ("r" * 36, 1000, 4000)
"""A request of usual length of name, far into its output."""


@pytest.mark.parametrize("draft", [DraftTokens(tuple(range(8))), TREE], ids=["chain", "tree"])
def test_a_round_of_one_coupled_session_fits_the_network_budget(draft: DraftTokens) -> None:
    tokens, last = tuple(range(48_000, 48_009)), None if draft.is_chain else 15
    ask = SpeculateItem(*HEAD, tokens, 8, tree=None if draft.is_chain else TreeBudget(16, (), 0.02))
    verdict = Verdict(*HEAD, 8, 4009, last_accepted_node=last)
    assert bytes_of_round(ask, Proposal(*HEAD, draft), VerifyItem(*HEAD, tokens, draft), verdict) < 1024


def test_outcomes_of_a_tree_fit_the_network_budget() -> None:
    """All branches of a lone request whose tree has sixteen nodes, with the verify that they are about."""
    tokens, tree = tuple(range(48_000, 48_005)), TREE.only(TREE.chain_first)
    asked = {"max_branches": 15, "proposed_parents": tree.parents}
    ask = SpeculateItem(*HEAD, tokens, 4, tree.token_ids, (8,) * 17, **asked)
    branches = tuple(Branch(2, 48_000 + i, DraftTokens((48_001,) * 4), 15) for i in range(15))
    verdict = Verdict(*HEAD, 4, 4009, last_accepted_node=15)
    assert bytes_of_round(ask, Outcomes(*HEAD, branches), VerifyItem(*HEAD, tokens, TREE), verdict) < 1024


def test_draft_that_knows_no_other_nodes_is_asked_for_the_first_chain() -> None:
    """Peers from before outcomes of trees skip the new fields, and read the item of a chain."""
    tree = TREE.only(TREE.chain_first)
    item = SpeculateItem(
        "a", 3, 4, (5,), 4, tree.token_ids, (8,) * 17, max_branches=5, proposed_parents=tree.parents
    )
    message = draft_pb2.SpeculateRequest.FromString(draft_codec.encode_speculate_request([item], ()))
    for name in ("other_token_ids", "other_parents", "other_fanout"):
        message.items[0].ClearField(name)
    assert draft_codec.decode_speculate_request(message.SerializeToString()).items == (item.of_first_chain(),)
    assert draft_codec.encode_speculate_request([item.of_first_chain()], ()) == message.SerializeToString()


@pytest.mark.parametrize(
    "asked",
    [
        {"num_next_draft_tokens": 3, "next_min_acceptance": 0.25, "next_tree": TreeBudget(5, (2, 1), 0.125)},
        {"num_features": 3, "first_feature": 4},
    ],
    ids=["drafter", "features"],
)
def test_peers_that_do_not_know_a_field_understand_and_are_understood(asked: dict[str, Any]) -> None:
    """Without it the bytes are those of before; what a peer does not know it skips."""
    item = VerifyItem("a", 1, 4, (9,))
    asking = replace(item, **asked)
    known = verify_item(request_id="a", round_id=1, base_len=4, token_ids=[9], sample=True)
    assert target_codec.encode_verify_request([item], ()) == known
    message = target_pb2.VerifyRequest.FromString(target_codec.encode_verify_request([asking], ()))
    assert target_codec.decode_verify_request(message.SerializeToString()).items == (asking,)
    for name in asked:
        message.items[0].ClearField(name)
    assert message.SerializeToString() == known


def test_verdict_of_a_peer_that_knows_neither_drafts_nor_features_is_one_without() -> None:
    known = target_pb2.Verdict(request_id="a", round_id=1, base_len=4, next_token_id=7)
    replies = target_pb2.VerifyResponse(replies=[target_pb2.TargetReply(verdict=known)])
    decoded = target_codec.decode_target_replies(replies.SerializeToString()).replies
    assert decoded == (Verdict("a", 1, 4, 0, 7),)


@pytest.mark.parametrize("num_tokens", [0, 1, 8])
def test_a_chain_costs_no_bytes_for_its_parents(num_tokens: int) -> None:
    """A message of a peer that knows no parents is the same, byte by byte."""
    token_ids = tuple(range(num_tokens))
    chain = DraftTokens(token_ids, tuple(range(-1, num_tokens - 1)))
    item = VerifyItem("a", 1, 4, (9,), chain)
    known = verify_item(
        request_id="a", round_id=1, base_len=4, token_ids=[9], draft_token_ids=token_ids, sample=True
    )
    assert target_codec.encode_verify_request([item], ()) == known


@pytest.mark.parametrize("counted", [None, 0, 384])
def test_experts_of_a_step_are_told_or_not(counted: int | None) -> None:
    replies = TargetReplies((), 5, 3, counted)
    assert target_codec.decode_target_replies(target_codec.encode_target_replies(replies)) == replies


@pytest.mark.parametrize("experts", [None, RoutedExperts(1280, 80, 0.25)])
def test_experts_of_a_target_are_told_or_not(experts: RoutedExperts | None) -> None:
    info = replace(fake_info("target"), experts=experts, step_times=(StepTime(1, 0.5, 80),))
    assert decode_info(TARGET.info_message, encode_info(TARGET.info_message, info)) == info


def test_experts_that_cannot_be_are_refused() -> None:
    message = target_pb2.GetTargetInfoResponse(info={"experts": {"num_experts": 4, "num_chosen": 4}})
    with pytest.raises(ProtocolError, match=r"EngineInfo: experts: num_chosen is 4; allowed: 1\.\.3"):
        decode_info(TARGET.info_message, message.SerializeToString())
