"""Every message of the engines survives the wire; every malformed one is refused with ProtocolError."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from google.protobuf.message import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget, SparseProbs, TreeBudget
from specray.engine_info import EngineInfo, GrammarStats, RoutedExperts, StepTime
from specray.errors import ProtocolError
from specray.feature_rows import FeatureRows
from specray.rpc.codec import draft as draft_codec
from specray.rpc.codec import target as target_codec
from specray.rpc.codec.values import RequestBatch, decode_info, encode_info
from specray.rpc.pb import draft_pb2, target_pb2, types_pb2
from specray.rpc.role import DRAFT, TARGET
from specray.types import (
    Branch,
    DraftReplies,
    ItemFailed,
    Outcomes,
    Proposal,
    SamplingParams,
    SpeculateItem,
    TargetReplies,
    UnknownSequence,
    Verdict,
    VerifyItem,
)
from tests.rpc.strategies import F32, IDS, TEXT, U32, U64, built, token_logprobs, tuples_of

HEAD = (TEXT, U64, U32)
MANY_ITEMS = settings(max_examples=40)
"""An example has several items, each with all its fields drawn."""


@st.composite
def sparse_probs(draw: st.DrawFn) -> SparseProbs:
    token_ids = draw(IDS)
    return SparseProbs(token_ids, draw(tuples_of(F32, size=len(token_ids))))


@st.composite
def draft_tokens(draw: st.DrawFn) -> DraftTokens:
    """A chain or a tree, with distributions or without any."""
    token_ids = draw(IDS)
    is_tree, has_probs = draw(st.booleans()), draw(st.booleans())
    parents = tuple(draw(st.integers(-1, index - 1)) for index in range(len(token_ids))) if is_tree else None
    probs = draw(tuples_of(sparse_probs(), size=len(token_ids))) if has_probs else ()
    return DraftTokens(token_ids, parents, probs)


SAMPLING = built(SamplingParams, seed=U64)
TREES = st.builds(
    TreeBudget, st.integers(1, 64), tuples_of(st.integers(1, 64)), st.floats(0, 1, exclude_max=True)
)


@st.composite
def feature_rows(draw: st.DrawFn) -> FeatureRows:
    num_rows, size = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3))
    data = draw(st.binary(min_size=num_rows * size, max_size=num_rows * size))
    return FeatureRows(draw(U32), num_rows, data)


LOOKAHEADS = (LookaheadBudget(), LookaheadBudget(1, 2, 1), LookaheadBudget(3, 4, 5))


@st.composite
def speculate_items(draw: st.DrawFn) -> SpeculateItem:
    tree = DraftTokens(draw(IDS))
    fanout = draw(st.just(()) | tuples_of(U32, size=len(tree) + 1))
    if fanout and len(tree) > 1 and draw(st.booleans()):
        parents = tuple(draw(st.integers(-1, node - 1)) for node in range(len(tree)))
        tree = DraftTokens(tree.token_ids, parents)
        tree = tree.only(tree.chain_first)
    proposed = tree.token_ids
    sampling = draw(st.none() | SAMPLING)
    max_branches = draw(U32) if fanout else 0
    head = (draw(TEXT), draw(U64), draw(U32), draw(IDS), draw(U32))
    return SpeculateItem(
        *head,
        proposed,
        fanout,
        sampling,
        max_branches,
        tree=draw(st.none() | TREES),
        features=draw(st.none() | feature_rows()),
        proposed_parents=tree.parents,
    )


@st.composite
def verify_items(draw: st.DrawFn) -> VerifyItem:
    head = [draw(part) for part in HEAD]
    sampling, limit = draw(st.none() | SAMPLING), draw(st.none() | U32)
    lookahead = draw(st.none() | st.sampled_from(LOOKAHEADS))
    drawn = draw(IDS), draw(draft_tokens()), draw(st.booleans())
    asked = draw(st.integers(1, 1 << 31)), draw(st.sampled_from((0.0, 0.25))), draw(st.none() | TREES)
    item = VerifyItem(*head, *drawn, sampling, limit, lookahead, *(asked if draw(st.booleans()) else ()))
    if draw(st.booleans()):
        return replace(item, runs_on=draw(st.booleans()))
    return replace(item, num_features=draw(st.integers(1, 1 << 31)), first_feature=draw(U32))


UNKNOWN = st.builds(UnknownSequence, *HEAD)
FAILED = st.builds(ItemFailed, *HEAD, TEXT, st.booleans(), st.booleans(), TEXT)
PROPOSALS = st.builds(Proposal, *HEAD, draft_tokens())
BRANCHES = st.builds(Branch, U32, U32, draft_tokens(), st.none() | U32)
OUTCOMES = st.builds(Outcomes, *HEAD, tuples_of(BRANCHES))
LOGPROBS = tuples_of(token_logprobs())
VERDICTS = st.builds(
    Verdict,
    *HEAD,
    U32,
    st.none() | U32,
    LOGPROBS,
    st.none() | U32,
    U32,
    prompt_logprobs=LOGPROBS,
    last_accepted_node=st.none() | U32,
    draft=draft_tokens(),
    features=st.none() | feature_rows(),
)
EXPERTS = st.builds(
    lambda chosen, others, share: RoutedExperts(chosen + others, chosen, share),
    st.integers(1, 1 << 30),
    st.integers(1, 1 << 30),
    st.floats(0.0, 1.0, exclude_max=True),
)
INFOS = built(
    EngineInfo,
    num_prefix_cache_queries=U64,
    num_prefix_cache_hits=U64,
    num_snapshots_evicted=U64,
    step_times=tuples_of(built(StepTime)),
    experts=st.none() | EXPERTS,
    grammar=built(GrammarStats),
)


@pytest.mark.slow
@example(
    (SpeculateItem("", 0, 0, (), 0, (), (0,), SamplingParams(0.0, top_p=0.0, repetition_penalty=0.0)),), ()
)
@MANY_ITEMS
@given(tuples_of(speculate_items()), tuples_of(TEXT))
def test_speculate_request_round_trip(items: tuple[SpeculateItem, ...], releases: tuple[str, ...]) -> None:
    data = draft_codec.encode_speculate_request(items, releases)
    assert draft_codec.decode_speculate_request(data) == RequestBatch(items, releases)


@pytest.mark.slow
@example((Proposal("", 0, 0, NO_DRAFT), Outcomes("", 0, 0, ()), UnknownSequence("", 0, 0)), 0)
@MANY_ITEMS
@given(tuples_of(PROPOSALS | OUTCOMES | UNKNOWN | FAILED), U64)
def test_draft_replies_round_trip(replies: tuple, forward_ns: int) -> None:
    batch = DraftReplies(replies, forward_ns)
    assert draft_codec.decode_draft_replies(draft_codec.encode_draft_replies(batch)) == batch


@pytest.mark.slow
@MANY_ITEMS
@given(tuples_of(verify_items()), tuples_of(TEXT))
def test_verify_request_round_trip(items: tuple[VerifyItem, ...], releases: tuple[str, ...]) -> None:
    data = target_codec.encode_verify_request(items, releases)
    assert target_codec.decode_verify_request(data) == RequestBatch(items, releases)


@pytest.mark.slow
@example((Verdict("", 0, 0, 0, 0), Verdict("", 0, 0, 0, None, held_len=0)), 0, 0, 0)
@MANY_ITEMS
@given(tuples_of(VERDICTS | UNKNOWN | FAILED), U64, st.none() | U32, st.none() | U32)
def test_target_replies_round_trip(
    replies: tuple, forward_ns: int, num_rows: int | None, num_experts: int | None
) -> None:
    batch = TargetReplies(replies, forward_ns, num_rows, num_experts)
    assert target_codec.decode_target_replies(target_codec.encode_target_replies(batch)) == batch


@pytest.mark.slow
@given(INFOS)
def test_info_round_trip_in_both_services(info: EngineInfo) -> None:
    for role in (DRAFT, TARGET):
        assert decode_info(role.info_message, encode_info(role.info_message, info)) == info


def draft_reply(**reply: Message) -> Message:
    return draft_pb2.SpeculateResponse(replies=[draft_pb2.DraftReply(**reply)])


def target_reply(**reply: Message) -> Message:
    return target_pb2.VerifyResponse(replies=[target_pb2.TargetReply(**reply)])


def verify_item(**fields: object) -> Message:
    return target_pb2.VerifyRequest(items=[target_pb2.VerifyItem(**fields)])


def speculate_item(**fields: object) -> Message:
    return draft_pb2.SpeculateRequest(items=[draft_pb2.SpeculateItem(**fields)])


def proposal(*parents: int, **fields: object) -> Message:
    return draft_reply(proposal=draft_pb2.Proposal(draft_parents=parents, **fields))


DECODERS = {
    draft_pb2.SpeculateRequest: draft_codec.decode_speculate_request,
    draft_pb2.SpeculateResponse: draft_codec.decode_draft_replies,
    target_pb2.VerifyRequest: target_codec.decode_verify_request,
    target_pb2.VerifyResponse: target_codec.decode_target_replies,
    draft_pb2.GetDraftInfoResponse: partial(decode_info, DRAFT.info_message),
    target_pb2.GetTargetInfoResponse: partial(decode_info, TARGET.info_message),
}
PROBS = types_pb2.SparseProbs(token_ids=[1], probs=[1.0])
UNPAIRED_PROBS = types_pb2.SparseProbs(token_ids=[1, 2], probs=[1.0])
UNPAIRED_LOGPROBS = types_pb2.TokenLogprobs(top_token_ids=[1], top_logprobs=[-0.1, -0.2])
WIDE = types_pb2.TreeBudget(num_nodes=65)
CHAIN = {"proposed_token_ids": [1, 2], "fanout": [1, 1, 1]}
NO_VERIFICATION = types_pb2.SamplingParams(top_p=1.0)
UNKNOWN_VERIFICATION = types_pb2.SamplingParams(verification=9)  # type: ignore[arg-type]
UNKNOWN_GRAMMAR = types_pb2.SamplingParams(verification=1, grammar=types_pb2.Grammar(kind=9))  # type: ignore[arg-type]
HALF_A_NUMBER = types_pb2.FeatureRows(num_rows=2, data=b"123456")
LOOKAHEAD = {"width": 7, "ngram_len": 5, "num_guesses": 10}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (draft_reply(), "DraftReply without a reply"),
        (target_reply(), "TargetReply without a reply"),
        (draft_pb2.GetDraftInfoResponse(), "without info"),
        (target_pb2.GetTargetInfoResponse(), "without info"),
        (speculate_item(tree=WIDE), "SpeculateItem: tree.num_nodes is 65; allowed: 1..64"),
        (verify_item(next_tree=WIDE), "VerifyItem: tree.num_nodes is 65; allowed: 1..64"),
        (
            speculate_item(proposed_token_ids=[1, 2], fanout=[1, 1]),
            "fanout has 2 entries for 2 proposed tokens; allowed: none or 3",
        ),
        (
            speculate_item(proposed_token_ids=[1], fanout=[1, 1], other_token_ids=[2], other_parents=[-1]),
            "1 other_token_ids, 1 other_parents, 0 other_fanout and 2 fanout; allowed: as many",
        ),
        (
            speculate_item(proposed_token_ids=[1], other_token_ids=[2], other_parents=[-1], other_fanout=[1]),
            "1 other_token_ids, 1 other_parents, 1 other_fanout and 0 fanout; allowed: as many",
        ),
        (
            speculate_item(**CHAIN, other_token_ids=[3], other_parents=[2], other_fanout=[1]),
            "SpeculateItem: draft.parents[2] is 2; allowed: -1..1",
        ),
        (
            speculate_item(**CHAIN, other_token_ids=[3, 4], other_parents=[-1, 1], other_fanout=[1, 1]),
            "SpeculateItem.other_parents is [-1, 1] after 2 proposed tokens; allowed: parents by which",
        ),
        (
            speculate_item(sampling=NO_VERIFICATION),
            "verification is 0; allowed: 1 (coupled), 2 (rejection)",
        ),
        (verify_item(sampling=UNKNOWN_VERIFICATION), "verification is 9"),
        (verify_item(sampling=UNKNOWN_GRAMMAR), "grammar.kind is 9"),
        (
            verify_item(draft_token_ids=[1, 2], draft_probs=[PROBS]),
            "draft.probs has 1 entries for 2 draft tokens",
        ),
        (
            verify_item(draft_token_ids=[1], draft_probs=[UNPAIRED_PROBS]),
            "SparseProbs has 2 token_ids and 1 probs",
        ),
        (
            proposal(draft_token_ids=[1], draft_probs=[PROBS, PROBS]),
            "draft.probs has 2 entries for 1 draft tokens",
        ),
        (
            draft_reply(outcomes=draft_pb2.Outcomes(branches=[draft_pb2.Branch(draft_probs=[PROBS])])),
            "draft.probs has 1 entries for 0 draft tokens",
        ),
        (
            verify_item(draft_token_ids=[1, 2, 3], draft_parents=[-1, 0]),
            "draft.parents has 2 entries for 3 draft tokens; allowed: none or 3",
        ),
        (proposal(-1, 2, 0, draft_token_ids=[1, 2, 3]), "draft.parents[1] is 2; allowed: -1..0"),
        (proposal(draft_token_ids=[1] * 65), "draft.token_ids has 65 entries; allowed: at most 64"),
        (
            target_reply(verdict=target_pb2.Verdict(logprobs=[UNPAIRED_LOGPROBS])),
            "TokenLogprobs has 1 top_token_ids and 2 top_logprobs",
        ),
        (
            target_reply(
                verdict=target_pb2.Verdict(features=types_pb2.FeatureRows(num_rows=2, data=b"123456"))
            ),
            "Verdict: features.data has 6 bytes for 2 rows; allowed: a multiple of 4, above 0",
        ),
        (
            speculate_item(features=types_pb2.FeatureRows(first=3, data=b"12")),
            "SpeculateItem: features has first 3 and num_rows 0; allowed: 0 or more, 1 or more",
        ),
        (
            verify_item(sample=True, lookahead=LOOKAHEAD),
            "VerifyItem: lookahead 7x5x10 takes 67 rows; allowed: ",
        ),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else type(value).__name__,
)
def test_malformed_peer_message_is_a_protocol_error(message: Message, says: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        DECODERS[type(message)](message.SerializeToString())
    assert says in str(caught.value)


NOT_UTF8 = b"\x0a\x03\x0a\x01\xff"
"""Field 1 (an item) of field 1 (its request_id) holding a byte that is not UTF-8."""


@pytest.mark.parametrize("kind", list(DECODERS)[:4])
def test_bytes_that_are_no_message_are_a_protocol_error(kind: type[Message]) -> None:
    for data in (b"\xff\xff", NOT_UTF8) if "Request" in kind.__name__ else (b"\xff\xff",):
        with pytest.raises(ProtocolError, match=f"specray.v1.{kind.__name__}"):
            DECODERS[kind](data)


@pytest.mark.slow
@given(draft_tokens(), st.integers(), st.data())
def test_invalid_parents_are_refused_by_name(draft: DraftTokens, foreign: int, data: st.DataObject) -> None:
    """Whichever node has a parent that does not come before it."""
    index = data.draw(st.integers(0, len(draft)))
    parents = [*(draft.parents or range(-1, len(draft) - 1)), -1]
    parents[index] = foreign if not -1 <= foreign < index else index
    with pytest.raises(ValueError, match=rf"draft\.parents\[{index}\] is {parents[index]}; allowed: -1"):
        DraftTokens((*draft.token_ids, 1), tuple(parents))
