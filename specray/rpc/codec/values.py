"""The parts of messages that several services share, between domain types and protobuf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from specray.draft_tokens import DraftTokens, SparseProbs, TreeBudget
from specray.engine_info import EngineInfo, GrammarStats, RoutedExperts, StepTime
from specray.errors import ProtocolError
from specray.feature_rows import FeatureRows
from specray.rpc.pb import draft_pb2, target_pb2, types_pb2
from specray.types import (
    Grammar,
    GrammarKind,
    ItemFailed,
    SamplingParams,
    TokenLogprobs,
    UnknownSequence,
    Verification,
)

_SAMPLING: Final = tuple(
    each.name for each in fields(SamplingParams) if type(each.default) in (int, float, str, bytes)
)
"""Fields that are a number, a text or bytes, and never absent."""
_GRAMMAR_KINDS: Final = {
    GrammarKind.JSON_SCHEMA: types_pb2.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.LARK: types_pb2.GRAMMAR_KIND_LARK,
    GrammarKind.REGEX: types_pb2.GRAMMAR_KIND_REGEX,
}
_HEAD: Final = tuple(each.name for each in fields(UnknownSequence))
_FAILED: Final = tuple(each.name for each in fields(ItemFailed))
_GRAMMAR_STATS: Final = tuple(each.name for each in fields(GrammarStats))
_STEP_TIME: Final = tuple(each.name for each in fields(StepTime))
_EXPERTS: Final = tuple(each.name for each in fields(RoutedExperts))
_INFO_LISTS: Final = ("hardware", "adapters", "adapter_names")
_INFO_MESSAGES: Final = ("step_times", "experts", "grammar", *_INFO_LISTS)
"""Fields that are messages of their own, or repeated."""
_INFO: Final = tuple(each.name for each in fields(EngineInfo) if each.name not in _INFO_MESSAGES)
ItemT = TypeVar("ItemT")
MessageT = TypeVar("MessageT", bound=Message)
DraftMessage = draft_pb2.Proposal | draft_pb2.Branch | target_pb2.VerifyItem | target_pb2.Verdict
"""Messages with draft tokens in fields of their own: a message inside would cost bytes per round."""

Refusal = UnknownSequence | ItemFailed
InfoMessage = type[draft_pb2.GetDraftInfoResponse] | type[target_pb2.GetTargetInfoResponse]


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


def set_fields(out: Message, value: object, names: Iterable[str]) -> None:
    """Sets fields that message and value have under the same names; too slow for messages of every round."""
    for name in names:
        setattr(out, name, getattr(value, name))


def get_fields(message: Message, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(message, name) for name in names}


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
    """Sets the message, once per sequence."""
    set_fields(out, sampling, _SAMPLING)
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
    out.message_borders.extend(sampling.message_borders)
    for word in sampling.bad_words:
        out.bad_words.add().token_ids.extend(word)


def decode_sampling(sampling: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        **get_fields(sampling, _SAMPLING),
        logit_bias=decode_logit_bias(sampling.logit_bias),
        stop_token_ids=tuple(sampling.stop_token_ids[:]),
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
        num_prompt_logprobs=(
            sampling.num_prompt_logprobs if sampling.HasField("num_prompt_logprobs") else None
        ),
        verification=decode_verification(sampling.verification),
        grammar=decode_grammar(sampling.grammar) if sampling.HasField("grammar") else None,
        allowed_token_ids=tuple(sampling.allowed_token_ids[:]),
        message_borders=tuple(sampling.message_borders[:]),
        bad_words=tuple(tuple(word.token_ids[:]) for word in sampling.bad_words),
    )


def encode_grammar(out: types_pb2.Grammar, grammar: Grammar) -> None:
    out.kind = _GRAMMAR_KINDS[grammar.kind]
    out.source = grammar.source


def decode_grammar(grammar: types_pb2.Grammar) -> Grammar:
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


def encode_refusal(out: draft_pb2.DraftReply | target_pb2.TargetReply, reply: Refusal) -> None:
    """Sets the reply of either engine to an item that it does not answer."""
    if isinstance(reply, UnknownSequence):
        set_fields(out.unknown_sequence, reply, _HEAD)
    else:
        set_fields(out.item_failed, reply, _FAILED)


def decode_refusal(message: draft_pb2.DraftReply | target_pb2.TargetReply) -> Refusal:
    """Raises ProtocolError for a reply that is empty."""
    match message.WhichOneof("reply"):
        case "unknown_sequence":
            return UnknownSequence(**get_fields(message.unknown_sequence, _HEAD))
        case "item_failed":
            return ItemFailed(**get_fields(message.item_failed, _FAILED))
    raise ProtocolError(f"a {message.DESCRIPTOR.name} without a reply")


def encode_features(out: types_pb2.FeatureRows, rows: FeatureRows) -> None:
    out.first, out.num_rows, out.data = rows.first, rows.num_rows, rows.data


def decode_features(rows: types_pb2.FeatureRows, of: str) -> FeatureRows:
    try:
        return FeatureRows(rows.first, rows.num_rows, rows.data)
    except ValueError as error:
        raise ProtocolError(f"{of}: {error}") from None


def encode_info(message_type: InfoMessage, info: EngineInfo) -> bytes:
    message = message_type()
    out = message.info
    set_fields(out, info, _INFO)
    set_fields(out.grammar, info.grammar, _GRAMMAR_STATS)
    for step_time in info.step_times:
        set_fields(out.step_times.add(), step_time, _STEP_TIME)
    if info.experts is not None:
        set_fields(out.experts, info.experts, _EXPERTS)
    for name in _INFO_LISTS:
        getattr(out, name).extend(getattr(info, name))
    return message.SerializeToString()


def decode_info(message_type: InfoMessage, data: bytes) -> EngineInfo:
    """Raises ProtocolError for broken bytes or an absent info."""
    message = parse(message_type, data)
    if not message.HasField("info"):
        raise ProtocolError(f"a {message.DESCRIPTOR.name} without info")
    return EngineInfo(
        **get_fields(message.info, _INFO),
        step_times=tuple(StepTime(**get_fields(entry, _STEP_TIME)) for entry in message.info.step_times),
        experts=_decode_experts(message.info.experts) if message.info.HasField("experts") else None,
        grammar=GrammarStats(**get_fields(message.info.grammar, _GRAMMAR_STATS)),
        **_get_lists(message.info),
    )


def _get_lists(info: types_pb2.EngineInfo) -> dict[str, Any]:
    return {name: tuple(getattr(info, name)) for name in _INFO_LISTS}


def _decode_experts(experts: types_pb2.RoutedExperts) -> RoutedExperts:
    try:
        return RoutedExperts(**get_fields(experts, _EXPERTS))
    except ValueError as error:
        raise ProtocolError(f"EngineInfo: experts: {error}") from None


def encode_tree(out: types_pb2.TreeBudget, tree: TreeBudget) -> None:
    out.num_nodes = tree.num_nodes
    out.widths.extend(tree.widths)
    out.min_chance = tree.min_chance


def decode_tree(tree: types_pb2.TreeBudget, of: str) -> TreeBudget:
    try:
        return TreeBudget(tree.num_nodes, tuple(tree.widths[:]), tree.min_chance)
    except ValueError as error:
        raise ProtocolError(f"{of}: {error}") from None
