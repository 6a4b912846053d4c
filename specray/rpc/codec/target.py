"""Messages between Router and target: domain types and protobuf bytes.

Hand-written and flat, because every round passes here twice: attributes are set rather than passed as
keyword arguments, and packed repeated fields are extended from tuples and read by one slice (both about
twice as fast). Decoding checks what the wire format cannot say and raises ProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.draft_tokens import NO_DRAFT, LookaheadBudget
from specray.errors import ProtocolError
from specray.rpc.codec.values import (
    RequestBatch,
    decode_draft_tokens,
    decode_features,
    decode_refusal,
    decode_sampling,
    decode_token_logprobs,
    decode_tree,
    encode_draft_tokens,
    encode_features,
    encode_refusal,
    encode_sampling,
    encode_token_logprobs,
    encode_tree,
    parse,
)
from specray.rpc.pb import target_pb2
from specray.types import (
    TargetReplies,
    TargetReply,
    Verdict,
    VerifyItem,
)


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
                encode_tree(out.next_tree, item.next_tree)
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
        decode_tree(item.next_tree, "VerifyItem") if item.HasField("next_tree") else None,
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
    if replies.num_experts is not None:
        message.num_experts = replies.num_experts
    add = message.replies.add
    for reply in replies.replies:
        out = add()
        match reply:
            case Verdict():
                _encode_verdict(out.verdict, reply)
            case _:
                encode_refusal(out, reply)
    return message.SerializeToString()


def decode_target_replies(data: bytes) -> TargetReplies:
    """Raises ProtocolError for broken bytes or a broken reply."""
    message = parse(target_pb2.VerifyResponse, data)
    return TargetReplies(
        tuple(map(_decode_target_reply, message.replies)),
        message.forward_ns,
        message.num_rows if message.HasField("num_rows") else None,
        message.num_experts if message.HasField("num_experts") else None,
    )


def _decode_target_reply(reply: target_pb2.TargetReply) -> TargetReply:
    match reply.WhichOneof("reply"):
        case "verdict":
            return _decode_verdict(reply.verdict)
        case _:
            return decode_refusal(reply)


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
