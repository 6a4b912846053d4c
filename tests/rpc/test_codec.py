"""Every message of the engines survives the wire; every malformed one is refused with ProtocolError."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf.message import Message
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget, SparseProbs, TreeBudget
from specray.errors import ProtocolError
from specray.feature_rows import FeatureRows
from specray.rpc.codec import engine as codec
from specray.rpc.codec.engine import RequestBatch
from specray.rpc.pb import draft_pb2, target_pb2, types_pb2
from specray.types import (
    Branch,
    DraftReplies,
    EngineInfo,
    Grammar,
    GrammarKind,
    GrammarStats,
    ItemFailed,
    Outcomes,
    Proposal,
    SamplingParams,
    SpeculateItem,
    StepTime,
    TargetReplies,
    UnknownSequence,
    Verdict,
    Verification,
    VerifyItem,
)
from tests.rpc.strategies import F32, IDS, TEXT, U32, U64, token_logprobs, tuples_of

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


SAMPLING = st.builds(
    SamplingParams,
    temperature=F32,
    top_k=U32,
    top_p=F32,
    min_p=F32,
    repetition_penalty=F32,
    presence_penalty=F32,
    frequency_penalty=F32,
    logit_bias=tuples_of(st.tuples(U32, F32)),
    seed=U64,
    min_tokens=U32,
    stop_token_ids=IDS,
    num_prompt_tokens=U32,
    num_logprobs=st.none() | U32,
    num_prompt_logprobs=st.none() | U32,
    verification=st.sampled_from(Verification),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), TEXT),
    allowed_token_ids=IDS,
    bad_words=tuples_of(IDS),
    cache_salt=TEXT,
)


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
FAILED = st.builds(ItemFailed, *HEAD, TEXT, st.booleans(), st.booleans())
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
INFOS = st.builds(
    EngineInfo,
    *(TEXT, TEXT, U32, TEXT, U32, U32, U32, U32, U32, U32),
    dtype=TEXT,
    tensor_parallel_size=U32,
    num_blocks_in_use=U32,
    num_prefix_cache_queries=U64,
    num_prefix_cache_hits=U64,
    step_times=tuples_of(st.builds(StepTime, U32, st.floats(allow_nan=False))),
    context_token_s=st.floats(allow_nan=False),
    drafter=TEXT,
    feature_drafter=TEXT,
    feature_size=U32,
    grammar=st.builds(GrammarStats, st.floats(allow_nan=False), st.floats(allow_nan=False), U64, U64, U64),
)


@pytest.mark.slow
@example(
    (SpeculateItem("", 0, 0, (), 0, (), (0,), SamplingParams(0.0, top_p=0.0, repetition_penalty=0.0)),), ()
)
@MANY_ITEMS
@given(tuples_of(speculate_items()), tuples_of(TEXT))
def test_speculate_request_round_trip(items: tuple[SpeculateItem, ...], releases: tuple[str, ...]) -> None:
    data = codec.encode_speculate_request(items, releases)
    assert codec.decode_speculate_request(data) == RequestBatch(items, releases)


@example((Proposal("", 0, 0, NO_DRAFT), Outcomes("", 0, 0, ()), UnknownSequence("", 0, 0)), 0)
@MANY_ITEMS
@given(tuples_of(PROPOSALS | OUTCOMES | UNKNOWN | FAILED), U64)
def test_draft_replies_round_trip(replies: tuple, forward_ns: int) -> None:
    batch = DraftReplies(replies, forward_ns)
    assert codec.decode_draft_replies(codec.encode_draft_replies(batch)) == batch


@pytest.mark.slow
@MANY_ITEMS
@given(tuples_of(verify_items()), tuples_of(TEXT))
def test_verify_request_round_trip(items: tuple[VerifyItem, ...], releases: tuple[str, ...]) -> None:
    data = codec.encode_verify_request(items, releases)
    assert codec.decode_verify_request(data) == RequestBatch(items, releases)


@example((Verdict("", 0, 0, 0, 0), Verdict("", 0, 0, 0, None, held_len=0)), 0, 0)
@MANY_ITEMS
@given(tuples_of(VERDICTS | UNKNOWN | FAILED), U64, st.none() | U32)
def test_target_replies_round_trip(replies: tuple, forward_ns: int, num_rows: int | None) -> None:
    batch = TargetReplies(replies, forward_ns, num_rows)
    assert codec.decode_target_replies(codec.encode_target_replies(batch)) == batch


@given(INFOS)
def test_info_round_trip_in_both_services(info: EngineInfo) -> None:
    assert codec.decode_draft_info(codec.encode_draft_info(info)) == info
    assert codec.decode_target_info(codec.encode_target_info(info)) == info


def draft_reply(**reply: Message) -> bytes:
    return draft_pb2.SpeculateResponse(replies=[draft_pb2.DraftReply(**reply)]).SerializeToString()


def target_reply(**reply: Message) -> bytes:
    return target_pb2.VerifyResponse(replies=[target_pb2.TargetReply(**reply)]).SerializeToString()


def verify_item(**fields: object) -> bytes:
    return target_pb2.VerifyRequest(items=[target_pb2.VerifyItem(**fields)]).SerializeToString()


def speculate_item(**fields: object) -> bytes:
    return draft_pb2.SpeculateRequest(items=[draft_pb2.SpeculateItem(**fields)]).SerializeToString()


PROBS = types_pb2.SparseProbs(token_ids=[1], probs=[1.0])
UNPAIRED_PROBS = types_pb2.SparseProbs(token_ids=[1, 2], probs=[1.0])
UNPAIRED_LOGPROBS = types_pb2.TokenLogprobs(top_token_ids=[1], top_logprobs=[-0.1, -0.2])


@pytest.mark.parametrize(
    ("decode", "data", "says"),
    [
        (codec.decode_draft_replies, draft_reply(), "DraftReply without a reply"),
        (codec.decode_target_replies, target_reply(), "TargetReply without a reply"),
        (codec.decode_draft_info, b"", "without info"),
        (codec.decode_target_info, b"", "without info"),
        (codec.decode_speculate_request, b"\xff\xff", "specray.v1.SpeculateRequest"),
        (codec.decode_draft_replies, b"\xff\xff", "specray.v1.SpeculateResponse"),
        (codec.decode_verify_request, b"\xff\xff", "specray.v1.VerifyRequest"),
        (codec.decode_target_replies, b"\xff\xff", "specray.v1.VerifyResponse"),
        # Field 1 (an item) of field 1 (its request_id) holding a byte that is not UTF-8.
        (codec.decode_speculate_request, b"\x0a\x03\x0a\x01\xff", "specray.v1.SpeculateRequest"),
        (
            codec.decode_speculate_request,
            speculate_item(tree=types_pb2.TreeBudget(num_nodes=65)),
            "SpeculateItem: tree.num_nodes is 65; allowed: 1..64",
        ),
        (
            codec.decode_verify_request,
            verify_item(next_tree=types_pb2.TreeBudget(num_nodes=65)),
            "VerifyItem: tree.num_nodes is 65; allowed: 1..64",
        ),
        (
            codec.decode_speculate_request,
            speculate_item(proposed_token_ids=[1, 2], fanout=[1, 1]),
            "fanout has 2 entries for 2 proposed tokens; allowed: none or 3",
        ),
        (
            codec.decode_speculate_request,
            speculate_item(proposed_token_ids=[1], fanout=[1, 1], other_token_ids=[2], other_parents=[-1]),
            "1 other_token_ids, 1 other_parents, 0 other_fanout and 2 fanout; allowed: as many",
        ),
        (
            codec.decode_speculate_request,
            speculate_item(proposed_token_ids=[1], other_token_ids=[2], other_parents=[-1], other_fanout=[1]),
            "1 other_token_ids, 1 other_parents, 1 other_fanout and 0 fanout; allowed: as many",
        ),
        (
            codec.decode_speculate_request,
            speculate_item(
                proposed_token_ids=[1],
                fanout=[1, 1],
                other_token_ids=[2],
                other_parents=[1],
                other_fanout=[1],
            ),
            "SpeculateItem: draft.parents[1] is 1; allowed: -1..0",
        ),
        (
            codec.decode_speculate_request,
            speculate_item(
                proposed_token_ids=[1, 2],
                fanout=[1, 1, 1],
                other_token_ids=[3, 4],
                other_parents=[-1, 1],
                other_fanout=[1, 1],
            ),
            "SpeculateItem.other_parents is [-1, 1] behind 2 proposed tokens; allowed: parents by which",
        ),
        (
            codec.decode_speculate_request,
            speculate_item(sampling=types_pb2.SamplingParams(top_p=1.0)),
            "verification is 0; allowed: 1 (coupled), 2 (rejection)",
        ),
        (
            codec.decode_verify_request,
            verify_item(sampling=types_pb2.SamplingParams(verification=9)),
            "verification is 9",
        ),
        (
            codec.decode_verify_request,
            verify_item(draft_token_ids=[1, 2], draft_probs=[PROBS]),
            "draft.probs has 1 entries for 2 draft tokens",
        ),
        (
            codec.decode_verify_request,
            verify_item(draft_token_ids=[1], draft_probs=[UNPAIRED_PROBS]),
            "SparseProbs has 2 token_ids and 1 probs",
        ),
        (
            codec.decode_draft_replies,
            draft_reply(proposal=draft_pb2.Proposal(draft_token_ids=[1], draft_probs=[PROBS, PROBS])),
            "draft.probs has 2 entries for 1 draft tokens",
        ),
        (
            codec.decode_draft_replies,
            draft_reply(outcomes=draft_pb2.Outcomes(branches=[draft_pb2.Branch(draft_probs=[PROBS])])),
            "draft.probs has 1 entries for 0 draft tokens",
        ),
        (
            codec.decode_verify_request,
            verify_item(draft_token_ids=[1, 2, 3], draft_parents=[-1, 0]),
            "draft.parents has 2 entries for 3 draft tokens; allowed: none or 3",
        ),
        (
            codec.decode_draft_replies,
            draft_reply(proposal=draft_pb2.Proposal(draft_token_ids=[1, 2, 3], draft_parents=[-1, 2, 0])),
            "draft.parents[1] is 2; allowed: -1..0",
        ),
        (
            codec.decode_draft_replies,
            draft_reply(proposal=draft_pb2.Proposal(draft_token_ids=[1] * 65)),
            "draft.token_ids has 65 entries; allowed: at most 64",
        ),
        (
            codec.decode_target_replies,
            target_reply(verdict=target_pb2.Verdict(logprobs=[UNPAIRED_LOGPROBS])),
            "TokenLogprobs has 1 top_token_ids and 2 top_logprobs",
        ),
        (
            codec.decode_target_replies,
            target_reply(
                verdict=target_pb2.Verdict(features=types_pb2.FeatureRows(num_rows=2, data=b"1" * 6))
            ),
            "Verdict: features.data has 6 bytes for 2 rows; allowed: a multiple of 4, above 0",
        ),
        (
            codec.decode_speculate_request,
            speculate_item(features=types_pb2.FeatureRows(first=3, data=b"12")),
            "SpeculateItem: features has first 3 and num_rows 0; allowed: 0 or more, 1 or more",
        ),
    ],
)
def test_malformed_peer_message_is_a_protocol_error(decode: object, data: bytes, says: str) -> None:
    assert callable(decode)
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    assert says in str(caught.value)


TREE = DraftTokens(tuple(range(48_000, 48_016)), (-1, -1, 0, 0, 1, 2, 2, 3, 5, 5, 6, 8, 8, 9, 11, 12))
"""Sixteen nodes, with token ids of a large vocabulary."""


@pytest.mark.parametrize("draft", [DraftTokens(tuple(range(8))), TREE], ids=["chain", "tree"])
def test_a_round_of_one_coupled_session_fits_the_network_budget(draft: DraftTokens) -> None:
    """A request of usual length of name, far into its output: draft and target, both ways."""
    name, told = "r" * 36, tuple(range(48_000, 48_009))
    ask = SpeculateItem(name, 1000, 4000, told, 8, tree=None if draft.is_chain else TreeBudget(16, (), 0.02))
    proposal = Proposal(name, 1000, 4000, draft)
    item = VerifyItem(name, 1000, 4000, told, draft)
    last = None if draft.is_chain else 15
    reply = Verdict(name, 1000, 4000, 8, 4009, last_accepted_node=last)
    size = (
        len(codec.encode_speculate_request([ask], ()))
        + len(codec.encode_draft_replies(DraftReplies((proposal,), 20_000_000)))
        + len(codec.encode_verify_request([item], ()))
        + len(codec.encode_target_replies(TargetReplies((reply,), 20_000_000)))
    )
    assert size < 1024


def test_outcomes_of_a_tree_fit_the_network_budget() -> None:
    """All branches of a lone request whose tree has sixteen nodes, with the verify that they are about."""
    name, told = "r" * 36, tuple(range(48_000, 48_005))
    tree = TREE.only(TREE.chain_first)
    fanout, parents = (8,) * 17, tree.parents
    ask = SpeculateItem(
        name, 1000, 4000, told, 4, tree.token_ids, fanout, max_branches=15, proposed_parents=parents
    )
    branches = tuple(Branch(2, 48_000 + i, DraftTokens((48_001,) * 4), 15) for i in range(15))
    outcomes = Outcomes(name, 1000, 4000, branches)
    item = VerifyItem(name, 1000, 4000, told, TREE)
    reply = Verdict(name, 1000, 4000, 4, 4009, last_accepted_node=15)
    size = (
        len(codec.encode_speculate_request([ask], ()))
        + len(codec.encode_draft_replies(DraftReplies((outcomes,), 20_000_000)))
        + len(codec.encode_verify_request([item], ()))
        + len(codec.encode_target_replies(TargetReplies((reply,), 20_000_000)))
    )
    assert size < 1024


def test_draft_that_knows_no_other_nodes_is_asked_for_the_first_chain() -> None:
    """Peers from before outcomes of trees skip the new fields, and read the item of a chain."""
    tree = TREE.only(TREE.chain_first)
    item = SpeculateItem(
        "a", 3, 4, (5,), 4, tree.token_ids, (8,) * 17, max_branches=5, proposed_parents=tree.parents
    )
    message = draft_pb2.SpeculateRequest.FromString(codec.encode_speculate_request([item], ()))
    for name in ("other_token_ids", "other_parents", "other_fanout"):
        message.items[0].ClearField(name)
    assert codec.decode_speculate_request(message.SerializeToString()).items == (item.of_first_chain(),)
    assert codec.encode_speculate_request([item.of_first_chain()], ()) == message.SerializeToString()


def test_a_budget_that_the_engine_could_not_keep_is_refused() -> None:
    wide = {"width": 7, "ngram_len": 5, "num_guesses": 10}
    message = target_pb2.VerifyRequest(items=[target_pb2.VerifyItem(sample=True, lookahead=wide)])
    with pytest.raises(ProtocolError, match="VerifyItem: lookahead 7x5x10 takes 67 rows; allowed: "):
        codec.decode_verify_request(message.SerializeToString())


@given(draft_tokens(), st.integers(), st.data())
def test_invalid_parents_are_refused_by_name(draft: DraftTokens, foreign: int, data: st.DataObject) -> None:
    """Whichever node has a parent that does not come before it."""
    index = data.draw(st.integers(0, len(draft)))
    parents = [*(draft.parents or range(-1, len(draft) - 1)), -1]
    parents[index] = foreign if not -1 <= foreign < index else index
    with pytest.raises(ValueError, match=rf"draft\.parents\[{index}\] is {parents[index]}; allowed: -1"):
        DraftTokens((*draft.token_ids, 1), tuple(parents))


def test_peers_that_know_no_drafter_understand_and_are_understood() -> None:
    """Without a drafter the bytes are those of before; what a peer does not know it skips."""
    item = VerifyItem("a", 1, 4, (9,))
    asking = replace(
        item, num_next_draft_tokens=3, next_min_acceptance=0.25, next_tree=TreeBudget(5, (2, 1), 0.125)
    )
    known = verify_item(request_id="a", round_id=1, base_len=4, token_ids=[9], sample=True)
    assert codec.encode_verify_request([item], ()) == known
    message = target_pb2.VerifyRequest.FromString(codec.encode_verify_request([asking], ()))
    assert codec.decode_verify_request(message.SerializeToString()).items == (asking,)
    for name in ("num_next_draft_tokens", "next_min_acceptance", "next_tree"):
        message.items[0].ClearField(name)
    assert message.SerializeToString() == known
    verdict = Verdict("a", 1, 4, 0, 7, draft=DraftTokens((5, 6)))
    plain = target_reply(verdict=target_pb2.Verdict(request_id="a", round_id=1, base_len=4, next_token_id=7))
    assert codec.decode_target_replies(plain).replies == (replace(verdict, draft=NO_DRAFT),)
    data = codec.encode_target_replies(TargetReplies((verdict,), 0))
    assert codec.decode_target_replies(data).replies == (verdict,)


@pytest.mark.parametrize("num_tokens", [0, 1, 8])
def test_a_chain_costs_no_bytes_for_its_parents(num_tokens: int) -> None:
    """A message of a peer that knows no parents is the same, byte by byte."""
    token_ids = tuple(range(num_tokens))
    chain = DraftTokens(token_ids, tuple(range(-1, num_tokens - 1)))
    item = VerifyItem("a", 1, 4, (9,), chain)
    known = verify_item(
        request_id="a", round_id=1, base_len=4, token_ids=[9], draft_token_ids=token_ids, sample=True
    )
    assert codec.encode_verify_request([item], ()) == known


@pytest.mark.parametrize("kind", GrammarKind)
def test_a_grammar_survives_the_wire(kind: GrammarKind) -> None:
    sampling = SamplingParams(grammar=Grammar(kind, 'source "ä"'))
    item = VerifyItem("a", 1, 0, (1, 2), sampling=sampling)
    [received] = codec.decode_verify_request(codec.encode_verify_request([item], ())).items
    assert received == item


def test_an_unknown_kind_of_grammar_is_refused() -> None:
    message = target_pb2.VerifyRequest.FromString(
        codec.encode_verify_request([VerifyItem("a", 1, 0, (1,), sampling=SamplingParams())], ())
    )
    message.items[0].sampling.grammar.kind = 9  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match=r"grammar\.kind is 9"):
        codec.decode_verify_request(message.SerializeToString())
