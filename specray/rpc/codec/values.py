"""The parts of messages that several services share, between domain types and protobuf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from specray.draft_tokens import DraftTokens, SparseProbs, TreeBudget
from specray.errors import ProtocolError
from specray.feature_rows import FeatureRows
from specray.rpc.pb import draft_pb2, target_pb2, types_pb2
from specray.types import (
    EngineInfo,
    Grammar,
    GrammarKind,
    GrammarStats,
    ItemFailed,
    SamplingParams,
    StepTime,
    TokenLogprobs,
    UnknownSequence,
    Verification,
)

SAMPLING_SCALARS: Final = tuple(
    scalar.name for scalar in fields(SamplingParams) if type(scalar.default) in (int, float)
)
"""Names of the fields of SamplingParams, and of its message, that are a number and never absent."""
_GRAMMAR_KINDS: Final = {
    GrammarKind.JSON_SCHEMA: types_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.LARK: types_pb2.GRAMMAR_KIND_LARK,
    GrammarKind.REGEX: types_pb2.GRAMMAR_KIND_REGEX,
}
ItemT = TypeVar("ItemT")
MessageT = TypeVar("MessageT", bound=Message)
DraftMessage = draft_pb2.Proposal | draft_pb2.Branch | target_pb2.VerifyItem | target_pb2.Verdict
"""Messages with draft tokens in fields of their own: a message inside would cost bytes per round."""


@dataclass(frozen=True, slots=True)
class RequestBatch(Generic[ItemT]):
    """One message of a router's stream: sequences to free, then items to compute, in this order."""

    items: tuple[ItemT, ...]
    release_request_ids: tuple[str, ...] = ()


def parse(message_type: type[MessageT], data: bytes) -> MessageT:
    """The message in ``data``. Raises ProtocolError when the bytes are no such message."""
    try:
        return message_type.FromString(data)
    except DecodeError:
        name = message_type.DESCRIPTOR.full_name
        raise ProtocolError(f"{len(data)} bytes that are not a {name} message") from None


def encode_verification(verification: Verification) -> types_pb2.Verification:
    match verification:
        case Verification.COUPLED:
            return types_pb2.VERIFICATION_COUPLED
        case Verification.REJECTION:
            return types_pb2.VERIFICATION_REJECTION


def decode_verification(verification: int) -> Verification:
    """Raises ProtocolError for the unspecified value and for values of other protocol versions."""
    match verification:
        case types_pb2.VERIFICATION_COUPLED:
            return Verification.COUPLED
        case types_pb2.VERIFICATION_REJECTION:
            return Verification.REJECTION
        case _:
            raise ProtocolError(f"verification is {verification}; allowed: 1 (coupled), 2 (rejection)")


def encode_sampling(out: types_pb2.SamplingParams, sampling: SamplingParams) -> None:
    """Sets the message, once per sequence; numbers go by their names, which both sides share."""
    for name in SAMPLING_SCALARS:
        setattr(out, name, getattr(sampling, name))
    if sampling.logit_bias:
        out.logit_bias.extend(encode_logit_bias(sampling.logit_bias))
    out.stop_token_ids.extend(sampling.stop_token_ids)
    if sampling.num_logprobs is not None:
        out.num_logprobs = sampling.num_logprobs
    if sampling.num_prompt_logprobs is not None:
        out.num_prompt_logprobs = sampling.num_prompt_logprobs
    out.verification = encode_verification(sampling.verification)
    if sampling.grammar is not None:
        encode_grammar(out.grammar, sampling.grammar)
    out.allowed_token_ids.extend(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        out.bad_words.add().token_ids.extend(word)
    out.cache_salt = sampling.cache_salt


def decode_sampling(sampling: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        **{name: getattr(sampling, name) for name in SAMPLING_SCALARS},
        logit_bias=decode_logit_bias(sampling.logit_bias),
        stop_token_ids=tuple(sampling.stop_token_ids[:]),
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        num_prompt_logprobs=(
            sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None
        ),
        verification=decode_verification(sampling.verification),
        grammar=decode_grammar(sampling.grammar) if sampling.HasField("grammar") else None,
        allowed_token_ids=tuple(sampling.allowed_token_ids[:]),
        bad_words=tuple(tuple(word.token_ids[:]) for word in sampling.bad_words),
        cache_salt=sampling.cache_salt,
    )


def encode_grammar(out: types_pb2.Grammar, grammar: Grammar) -> None:
    out.kind = _GRAMMAR_KINDS[grammar.kind]
    out.source = grammar.source


def decode_grammar(grammar: types_pb2.Grammar) -> Grammar:
    """Raises ProtocolError for an unknown kind."""
    for kind, number in _GRAMMAR_KINDS.items():
        if grammar.kind == number:
            return Grammar(kind, grammar.source)
    raise ProtocolError(f"grammar.kind is {grammar.kind}; allowed: 1 (JSON schema), 2 (Lark), 3 (regex)")


def encode_logit_bias(logit_bias: Sequence[tuple[int, float]]) -> list[types_pb2.LogitBias]:
    return [types_pb2.LogitBias(token_id=token_id, bias=bias) for token_id, bias in logit_bias]


def decode_logit_bias(logit_bias: Sequence[types_pb2.LogitBias]) -> tuple[tuple[int, float], ...]:
    return tuple((entry.token_id, entry.bias) for entry in logit_bias)


def encode_draft_tokens(out: DraftMessage, draft: DraftTokens) -> None:
    """Sets the draft tokens of a message; a chain's parents are not sent."""
    out.draft_token_ids.extend(draft.token_ids)
    if draft.parents is not None:
        out.draft_parents.extend(draft.parents)
    for probs in draft.probs:
        row = out.draft_probs.add()
        row.token_ids.extend(probs.token_ids)
        row.probs.extend(probs.probs)


def decode_draft_tokens(message: DraftMessage) -> DraftTokens:
    """Raises ProtocolError for parents or distributions that do not fit the draft tokens."""
    token_ids, parents = tuple(message.draft_token_ids[:]), tuple(message.draft_parents[:])
    probs = tuple(map(_decode_sparse_probs, message.draft_probs)) if message.draft_probs else ()
    try:
        return DraftTokens(token_ids, parents or None, probs)
    except ValueError as error:
        raise ProtocolError(str(error)) from None


def _decode_sparse_probs(probs: types_pb2.SparseProbs) -> SparseProbs:
    token_ids, values = tuple(probs.token_ids[:]), tuple(probs.probs[:])
    if len(token_ids) != len(values):
        raise ProtocolError(f"SparseProbs has {len(token_ids)} token_ids and {len(values)} probs")
    return SparseProbs(token_ids, values)


def encode_token_logprobs(out: types_pb2.TokenLogprobs, logprobs: TokenLogprobs) -> None:
    out.token_id = logprobs.token_id
    out.logprob = logprobs.logprob
    out.top_token_ids.extend(logprobs.top_token_ids)
    out.top_logprobs.extend(logprobs.top_logprobs)


def decode_token_logprobs(logprobs: types_pb2.TokenLogprobs) -> TokenLogprobs:
    """Raises ProtocolError when ids and logprobs do not pair up."""
    token_ids, values = tuple(logprobs.top_token_ids[:]), tuple(logprobs.top_logprobs[:])
    if len(token_ids) != len(values):
        raise ProtocolError(
            f"TokenLogprobs has {len(token_ids)} top_token_ids and {len(values)} top_logprobs"
        )
    return TokenLogprobs(logprobs.token_id, logprobs.logprob, token_ids, values)


def encode_unknown_sequence(out: types_pb2.UnknownSequence, reply: UnknownSequence) -> None:
    out.request_id = reply.request_id
    out.round_id = reply.round_id
    out.base_len = reply.base_len


def decode_unknown_sequence(reply: types_pb2.UnknownSequence) -> UnknownSequence:
    return UnknownSequence(reply.request_id, reply.round_id, reply.base_len)


def encode_item_failed(out: types_pb2.ItemFailed, reply: ItemFailed) -> None:
    out.request_id = reply.request_id
    out.round_id = reply.round_id
    out.base_len = reply.base_len
    out.message = reply.message
    out.is_retriable = reply.is_retriable
    out.is_invalid = reply.is_invalid
    out.field = reply.field


def decode_item_failed(reply: types_pb2.ItemFailed) -> ItemFailed:
    return ItemFailed(
        reply.request_id,
        reply.round_id,
        reply.base_len,
        reply.message,
        reply.is_retriable,
        reply.is_invalid,
        reply.field,
    )


def encode_features(out: types_pb2.FeatureRows, rows: FeatureRows) -> None:
    out.first, out.num_rows, out.data = rows.first, rows.num_rows, rows.data


def decode_features(rows: types_pb2.FeatureRows, of: str) -> FeatureRows:
    """Raises ProtocolError for rows that are none."""
    try:
        return FeatureRows(rows.first, rows.num_rows, rows.data)
    except ValueError as error:
        raise ProtocolError(f"{of}: {error}") from None


_GRAMMAR_STATS = tuple(each.name for each in fields(GrammarStats))
"""Names of figures that message and type share."""


def encode_engine_info(out: types_pb2.EngineInfo, info: EngineInfo) -> None:
    out.role = info.role
    out.model = info.model
    out.vocab_size = info.vocab_size
    out.tokenizer_fingerprint = info.tokenizer_fingerprint
    out.block_size = info.block_size
    out.num_blocks = info.num_blocks
    out.max_model_len = info.max_model_len
    out.max_num_seqs = info.max_num_seqs
    out.max_num_batched_tokens = info.max_num_batched_tokens
    out.protocol_version = info.protocol_version
    out.dtype = info.dtype
    out.tensor_parallel_size = info.tensor_parallel_size
    out.num_blocks_in_use = info.num_blocks_in_use
    out.num_prefix_cache_queries = info.num_prefix_cache_queries
    out.num_prefix_cache_hits = info.num_prefix_cache_hits
    out.num_routers = info.num_routers
    out.busy_share = info.busy_share
    for step_time in info.step_times:
        out.step_times.add(num_rows=step_time.num_rows, seconds=step_time.seconds)
    out.context_token_s = info.context_token_s
    out.drafter = info.drafter
    out.feature_drafter = info.feature_drafter
    out.feature_size = info.feature_size
    for name in _GRAMMAR_STATS:
        setattr(out.grammar, name, getattr(info.grammar, name))


def decode_engine_info(info: types_pb2.EngineInfo) -> EngineInfo:
    return EngineInfo(
        role=info.role,
        model=info.model,
        vocab_size=info.vocab_size,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        protocol_version=info.protocol_version,
        dtype=info.dtype,
        tensor_parallel_size=info.tensor_parallel_size,
        num_blocks_in_use=info.num_blocks_in_use,
        num_prefix_cache_queries=info.num_prefix_cache_queries,
        num_prefix_cache_hits=info.num_prefix_cache_hits,
        step_times=tuple(StepTime(entry.num_rows, entry.seconds) for entry in info.step_times),
        context_token_s=info.context_token_s,
        num_routers=info.num_routers,
        drafter=info.drafter,
        feature_drafter=info.feature_drafter,
        feature_size=info.feature_size,
        busy_share=info.busy_share,
        grammar=GrammarStats(**{name: getattr(info.grammar, name) for name in _GRAMMAR_STATS}),
    )


def encode_tree(out: types_pb2.TreeBudget, tree: TreeBudget) -> None:
    out.num_nodes = tree.num_nodes
    out.widths.extend(tree.widths)
    out.min_chance = tree.min_chance


def decode_tree(tree: types_pb2.TreeBudget, of: str) -> TreeBudget:
    try:
        return TreeBudget(tree.num_nodes, tuple(tree.widths[:]), tree.min_chance)
    except ValueError as error:
        raise ProtocolError(f"{of}: {error}") from None
