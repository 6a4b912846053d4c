"""Messages between Router and draft: domain types and protobuf bytes.

Hand-written and flat, because every round passes here twice: attributes are set rather than passed as
keyword arguments, and packed repeated fields are extended from tuples and read by one slice (both about
twice as fast). Decoding checks what the wire format cannot say and raises ProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.draft_tokens import DraftTokens
from specray.errors import ProtocolError
from specray.rpc.codec.values import (
    RequestBatch,
    decode_draft_tokens,
    decode_features,
    decode_refusal,
    decode_sampling,
    decode_tree,
    encode_draft_tokens,
    encode_features,
    encode_refusal,
    encode_sampling,
    encode_tree,
    parse,
)
from specray.rpc.pb import draft_pb2
from specray.types import (
    Branch,
    DraftReplies,
    DraftReply,
    Outcomes,
    Proposal,
    SpeculateItem,
)


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
            encode_tree(out.tree, item.tree)
        if item.sampling is not None:
            encode_sampling(out.sampling, item.sampling)
        if item.features is not None:
            encode_features(out.features, item.features)
    return message.SerializeToString()


def _encode_other_nodes(out: draft_pb2.SpeculateItem, item: SpeculateItem) -> None:
    """Sets the tree under verification without its first chain."""
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
        decode_tree(item.tree, "SpeculateItem") if item.HasField("tree") else None,
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
            f"SpeculateItem.other_parents is {list(item.other_parents)} after {num_chain} proposed tokens; "
            "allowed: parents by which these are the first chain"
        )
    return tree.parents


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
            case _:
                encode_refusal(out, reply)
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
        case _:
            return decode_refusal(reply)


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
