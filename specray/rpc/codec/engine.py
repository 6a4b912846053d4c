"""Engine messages between domain types and protobuf bytes.

Hand-written and flat, because every round passes here four times: attributes are set rather than passed as
keyword arguments, and packed repeated fields are extended from tuples and read by one slice (both about
twice as fast). Decoding checks what the wire format cannot say and raises ProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget, TreeBudget
from specray.errors import ProtocolError
from specray.rpc.codec.values import (
    decode_draft_tokens,
    decode_engine_info,
    decode_features,
    decode_item_failed,
    decode_sampling,
    decode_token_logprobs,
    decode_unknown_sequence,
    encode_draft_tokens,
    encode_engine_info,
    encode_features,
    encode_item_failed,
    encode_sampling,
    encode_token_logprobs,
    encode_unknown_sequence,
    parse,
)
from specray.rpc.pb import draft_pb2, target_pb2, types_pb2
from specray.types import (
    Branch,
    DraftReplies,
    DraftReply,
    EngineInfo,
    ItemFailed,
    Outcomes,
    Proposal,
    SpeculateItem,
    TargetReplies,
    TargetReply,
    UnknownSequence,
    Verdict,
    VerifyItem,
)

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class RequestBatch(Generic[ItemT]):
    """One message of a router's stream: sequences to free, then items to compute, in this order."""

    items: tuple[ItemT, ...]
    release_request_ids: tuple[str, ...] = ()


# Draft


def encode_speculate_request(items: Sequence[SpeculateItem], release_request_ids: Sequence[str]) -> bytes:
    message = draft_pb2.SpeculateRequest()
    if release_request_ids:
        message.release_request_ids.extend(release_request_ids)
    add = message.items.add
    for item in items:
        out = add()
        out.request_id = item.request_id
        out.round_id = item.round_id
        out.base_len = item.base_len
        out.token_ids.extend(item.token_ids)
        out.num_speculative_tokens = item.num_speculative_tokens
        if item.proposed_parents is not None:
            _encode_other_nodes(out, item)
            item = item.of_first_chain()
        if item.proposed_token_ids:
            out.proposed_token_ids.extend(item.proposed_token_ids)
        if item.fanout:
            out.fanout.extend(item.fanout)
            out.max_branches = item.max_branches
        out.min_acceptance = item.min_acceptance
        if item.tree is not None:
            _encode_tree(out.tree, item.tree)
        if item.sampling is not None:
            encode_sampling(out.sampling, item.sampling)
        if item.features is not None:
            encode_features(out.features, item.features)
    return message.SerializeToString()


def _encode_other_nodes(out: draft_pb2.SpeculateItem, item: SpeculateItem) -> None:
    """Sets what there is beside the first chain of the tree under verification."""
    assert item.proposed_parents is not None
    num_chain = len(item.proposed.first_path)
    out.other_token_ids.extend(item.proposed_token_ids[num_chain:])
    out.other_parents.extend(item.proposed_parents[num_chain:])
    out.other_fanout.extend(item.fanout[num_chain + 1 :])


def decode_speculate_request(data: bytes) -> RequestBatch[SpeculateItem]:
    """Raises ProtocolError for broken bytes or a broken item."""
    message = parse(draft_pb2.SpeculateRequest, data)
    items = tuple(map(_decode_speculate_item, message.items))
    return RequestBatch(items, tuple(message.release_request_ids[:]))


def _decode_speculate_item(item: draft_pb2.SpeculateItem) -> SpeculateItem:
    proposed_token_ids = tuple(item.proposed_token_ids[:])
    fanout = tuple(item.fanout[:])
    if fanout and len(fanout) != len(proposed_token_ids) + 1:
        raise ProtocolError(
            f"SpeculateItem.fanout has {len(fanout)} entries for {len(proposed_token_ids)} proposed tokens; "
            f"allowed: none or {len(proposed_token_ids) + 1}"
        )
    parents = None
    if item.other_token_ids:
        fanout, parents = fanout + tuple(item.other_fanout[:]), _decode_other_parents(item)
        proposed_token_ids += tuple(item.other_token_ids[:])
    return SpeculateItem(
        item.request_id,
        item.round_id,
        item.base_len,
        tuple(item.token_ids[:]),
        item.num_speculative_tokens,
        proposed_token_ids,
        fanout,
        decode_sampling(item.sampling) if item.HasField("sampling") else None,
        item.max_branches,
        item.min_acceptance,
        _decode_tree(item.tree, "SpeculateItem") if item.HasField("tree") else None,
        decode_features(item.features, "SpeculateItem") if item.HasField("features") else None,
        parents,
    )


def _decode_other_parents(item: draft_pb2.SpeculateItem) -> tuple[int, ...]:
    """Parents of all nodes of the tree under verification, those of its first chain included."""
    num_others, num_chain = len(item.other_token_ids), len(item.proposed_token_ids)
    if not num_others == len(item.other_parents) == len(item.other_fanout) or not item.fanout:
        raise ProtocolError(
            f"SpeculateItem has {num_others} other_token_ids, {len(item.other_parents)} other_parents, "
            f"{len(item.other_fanout)} other_fanout and {len(item.fanout)} fanout; allowed: as many "
            "other_parents and other_fanout as other_token_ids, with fanout"
        )
    try:
        tree = DraftTokens(
            (*item.proposed_token_ids, *item.other_token_ids),
            (*range(-1, num_chain - 1), *item.other_parents),
        )
    except ValueError as error:
        raise ProtocolError(f"SpeculateItem: {error}") from None
    if tree.parents is None or tree.first_path != tuple(range(num_chain)):
        raise ProtocolError(
            f"SpeculateItem.other_parents is {list(item.other_parents)} behind {num_chain} proposed tokens; "
            "allowed: parents by which these are the first chain"
        )
    return tree.parents


def _encode_tree(out: types_pb2.TreeBudget, tree: TreeBudget) -> None:
    out.num_nodes = tree.num_nodes
    out.widths.extend(tree.widths)
    out.min_chance = tree.min_chance


def _decode_tree(tree: types_pb2.TreeBudget, of: str) -> TreeBudget:
    try:
        return TreeBudget(tree.num_nodes, tuple(tree.widths[:]), tree.min_chance)
    except ValueError as error:
        raise ProtocolError(f"{of}: {error}") from None


def encode_draft_replies(replies: DraftReplies) -> bytes:
    message = draft_pb2.SpeculateResponse()
    message.forward_ns = replies.forward_ns
    message.is_draining = replies.is_draining
    add = message.replies.add
    for reply in replies.replies:
        out = add()
        match reply:
            case Proposal():
                _encode_proposal(out.proposal, reply)
            case Outcomes():
                _encode_outcomes(out.outcomes, reply)
            case UnknownSequence():
                encode_unknown_sequence(out.unknown_sequence, reply)
            case ItemFailed():
                encode_item_failed(out.item_failed, reply)
    return message.SerializeToString()


def decode_draft_replies(data: bytes) -> DraftReplies:
    """Raises ProtocolError for broken bytes or a broken reply."""
    message = parse(draft_pb2.SpeculateResponse, data)
    replies = tuple(map(_decode_draft_reply, message.replies))
    return DraftReplies(replies, message.forward_ns, message.is_draining)


def _decode_draft_reply(reply: draft_pb2.DraftReply) -> DraftReply:
    match reply.WhichOneof("reply"):
        case "proposal":
            return _decode_proposal(reply.proposal)
        case "outcomes":
            return _decode_outcomes(reply.outcomes)
        case "unknown_sequence":
            return decode_unknown_sequence(reply.unknown_sequence)
        case "item_failed":
            return decode_item_failed(reply.item_failed)
        case _:
            raise ProtocolError("a DraftReply without a reply")


def _encode_proposal(out: draft_pb2.Proposal, proposal: Proposal) -> None:
    out.request_id = proposal.request_id
    out.round_id = proposal.round_id
    out.base_len = proposal.base_len
    encode_draft_tokens(out, proposal.draft)


def _decode_proposal(proposal: draft_pb2.Proposal) -> Proposal:
    draft = decode_draft_tokens(proposal)
    return Proposal(proposal.request_id, proposal.round_id, proposal.base_len, draft)


def _encode_outcomes(out: draft_pb2.Outcomes, outcomes: Outcomes) -> None:
    out.request_id = outcomes.request_id
    out.round_id = outcomes.round_id
    out.base_len = outcomes.base_len
    add = out.branches.add
    for branch in outcomes.branches:
        message = add()
        message.num_accepted_tokens = branch.num_accepted_tokens
        message.next_token_id = branch.next_token_id
        if branch.last_accepted_node is not None:
            message.last_accepted_node = branch.last_accepted_node
        encode_draft_tokens(message, branch.draft)


def _decode_outcomes(outcomes: draft_pb2.Outcomes) -> Outcomes:
    branches = tuple(map(_decode_branch, outcomes.branches))
    return Outcomes(outcomes.request_id, outcomes.round_id, outcomes.base_len, branches)


def _decode_branch(branch: draft_pb2.Branch) -> Branch:
    return Branch(
        branch.num_accepted_tokens,
        branch.next_token_id,
        decode_draft_tokens(branch),
        branch.last_accepted_node if branch.HasField("last_accepted_node") else None,
    )


# Target


def encode_verify_request(items: Sequence[VerifyItem], release_request_ids: Sequence[str]) -> bytes:
    message = target_pb2.VerifyRequest()
    if release_request_ids:
        message.release_request_ids.extend(release_request_ids)
    add = message.items.add
    for item in items:
        out = add()
        out.request_id = item.request_id
        out.round_id = item.round_id
        out.base_len = item.base_len
        out.token_ids.extend(item.token_ids)
        if item.draft.token_ids:
            encode_draft_tokens(out, item.draft)
        out.sample = item.sample
        if item.sampling is not None:
            encode_sampling(out.sampling, item.sampling)
        if item.max_new_tokens is not None:
            out.max_new_tokens = item.max_new_tokens
        if item.lookahead is not None:
            out.lookahead.width = item.lookahead.width
            out.lookahead.ngram_len = item.lookahead.ngram_len
            out.lookahead.num_guesses = item.lookahead.num_guesses
        if item.num_next_draft_tokens:
            out.num_next_draft_tokens = item.num_next_draft_tokens
            out.next_min_acceptance = item.next_min_acceptance
            if item.next_tree is not None:
                _encode_tree(out.next_tree, item.next_tree)
        if item.num_features:
            out.num_features, out.first_feature = item.num_features, item.first_feature
        if item.runs_on:
            out.runs_on = True
    return message.SerializeToString()


def decode_verify_request(data: bytes) -> RequestBatch[VerifyItem]:
    """Raises ProtocolError for broken bytes or a broken item."""
    message = parse(target_pb2.VerifyRequest, data)
    items = tuple(map(_decode_verify_item, message.items))
    return RequestBatch(items, tuple(message.release_request_ids[:]))


def _decode_verify_item(item: target_pb2.VerifyItem) -> VerifyItem:
    return VerifyItem(
        item.request_id,
        item.round_id,
        item.base_len,
        tuple(item.token_ids[:]),
        decode_draft_tokens(item),
        item.sample,
        decode_sampling(item.sampling) if item.HasField("sampling") else None,
        item.max_new_tokens if item.HasField("max_new_tokens") else None,
        _decode_lookahead(item.lookahead) if item.HasField("lookahead") else None,
        item.num_next_draft_tokens,
        item.next_min_acceptance,
        _decode_tree(item.next_tree, "VerifyItem") if item.HasField("next_tree") else None,
        item.num_features,
        item.first_feature,
        item.runs_on,
    )


def _decode_lookahead(budget: target_pb2.LookaheadBudget) -> LookaheadBudget:
    try:
        return LookaheadBudget(budget.width, budget.ngram_len, budget.num_guesses)
    except ValueError as error:
        raise ProtocolError(f"VerifyItem: {error}") from None


def encode_target_replies(replies: TargetReplies) -> bytes:
    message = target_pb2.VerifyResponse()
    message.forward_ns = replies.forward_ns
    if replies.num_rows is not None:
        message.num_rows = replies.num_rows
    add = message.replies.add
    for reply in replies.replies:
        out = add()
        match reply:
            case Verdict():
                _encode_verdict(out.verdict, reply)
            case UnknownSequence():
                encode_unknown_sequence(out.unknown_sequence, reply)
            case ItemFailed():
                encode_item_failed(out.item_failed, reply)
    return message.SerializeToString()


def decode_target_replies(data: bytes) -> TargetReplies:
    """Raises ProtocolError for broken bytes or a broken reply."""
    message = parse(target_pb2.VerifyResponse, data)
    return TargetReplies(
        tuple(map(_decode_target_reply, message.replies)),
        message.forward_ns,
        message.num_rows if message.HasField("num_rows") else None,
    )


def _decode_target_reply(reply: target_pb2.TargetReply) -> TargetReply:
    match reply.WhichOneof("reply"):
        case "verdict":
            return _decode_verdict(reply.verdict)
        case "unknown_sequence":
            return decode_unknown_sequence(reply.unknown_sequence)
        case "item_failed":
            return decode_item_failed(reply.item_failed)
        case _:
            raise ProtocolError("a TargetReply without a reply")


def _encode_verdict(out: target_pb2.Verdict, verdict: Verdict) -> None:
    out.request_id = verdict.request_id
    out.round_id = verdict.round_id
    out.base_len = verdict.base_len
    out.num_accepted_tokens = verdict.num_accepted_tokens
    if verdict.next_token_id is not None:
        out.next_token_id = verdict.next_token_id
    for logprobs in verdict.logprobs:
        encode_token_logprobs(out.logprobs.add(), logprobs)
    if verdict.held_len is not None:
        out.held_len = verdict.held_len
    if verdict.num_cached_tokens:
        out.num_cached_tokens = verdict.num_cached_tokens
    for logprobs in verdict.prompt_logprobs:
        encode_token_logprobs(out.prompt_logprobs.add(), logprobs)
    if verdict.last_accepted_node is not None:
        out.last_accepted_node = verdict.last_accepted_node
    if verdict.draft.token_ids:
        encode_draft_tokens(out, verdict.draft)
    if verdict.features is not None:
        encode_features(out.features, verdict.features)


def _decode_verdict(verdict: target_pb2.Verdict) -> Verdict:
    return Verdict(
        verdict.request_id,
        verdict.round_id,
        verdict.base_len,
        verdict.num_accepted_tokens,
        verdict.next_token_id if verdict.HasField("next_token_id") else None,
        tuple(map(decode_token_logprobs, verdict.logprobs)) if verdict.logprobs else (),
        verdict.held_len if verdict.HasField("held_len") else None,
        verdict.num_cached_tokens,
        tuple(map(decode_token_logprobs, verdict.prompt_logprobs)) if verdict.prompt_logprobs else (),
        verdict.last_accepted_node if verdict.HasField("last_accepted_node") else None,
        decode_draft_tokens(verdict) if verdict.draft_token_ids else NO_DRAFT,
        decode_features(verdict.features, "Verdict") if verdict.HasField("features") else None,
    )


# Info


def encode_draft_info(info: EngineInfo) -> bytes:
    message = draft_pb2.GetDraftInfoResponse()
    encode_engine_info(message.info, info)
    return message.SerializeToString()


def decode_draft_info(data: bytes) -> EngineInfo:
    """Raises ProtocolError for broken bytes or an absent info."""
    message = parse(draft_pb2.GetDraftInfoResponse, data)
    if not message.HasField("info"):
        raise ProtocolError("a GetDraftInfoResponse without info")
    return decode_engine_info(message.info)


def encode_target_info(info: EngineInfo) -> bytes:
    message = target_pb2.GetTargetInfoResponse()
    encode_engine_info(message.info, info)
    return message.SerializeToString()


def decode_target_info(data: bytes) -> EngineInfo:
    """Raises ProtocolError for broken bytes or an absent info."""
    message = parse(target_pb2.GetTargetInfoResponse, data)
    if not message.HasField("info"):
        raise ProtocolError("a GetTargetInfoResponse without info")
    return decode_engine_info(message.info)
