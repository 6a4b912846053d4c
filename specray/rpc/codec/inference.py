"""Messages of the public InferenceService between domain types and protobuf bytes.

Requests come from strangers: what is wrong with them is an InvalidRequestError that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError

from specray.errors import InvalidRequestError, ProtocolError
from specray.request_options import OPTIONS, Option
from specray.requests import FinishReason, ServiceInfo, SpeculationStats
from specray.rpc.codec.values import (
    decode_grammar,
    decode_logit_bias,
    decode_token_logprobs,
    decode_verification,
    encode_grammar,
    encode_logit_bias,
    encode_token_logprobs,
    encode_verification,
    parse,
)
from specray.rpc.inference.types import GenerateEvent, GenerateParams, Message, Usage
from specray.rpc.pb import inference_pb2, types_pb2
from specray.types import DraftKind, Grammar, Verification

FINISH_REASON_TO_PB = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
FINISH_REASON_FROM_PB = {
    inference_pb2.FINISH_REASON_UNSPECIFIED: None,
    **{number: reason for reason, number in FINISH_REASON_TO_PB.items()},
}
DRAFT_KIND_TO_PB = {
    DraftKind.MODEL: inference_pb2.DRAFT_KIND_MODEL,
    DraftKind.NGRAM: inference_pb2.DRAFT_KIND_NGRAM,
    DraftKind.SUFFIX: inference_pb2.DRAFT_KIND_SUFFIX,
    DraftKind.LOOKAHEAD: inference_pb2.DRAFT_KIND_LOOKAHEAD,
    DraftKind.FEATURES: inference_pb2.DRAFT_KIND_FEATURES,
}
DRAFT_KIND_FROM_PB = {
    inference_pb2.DRAFT_KIND_UNSPECIFIED: None,
    **{number: kind for kind, number in DRAFT_KIND_TO_PB.items()},
}
_WIRE_OPTIONS: Final = tuple(each for each in OPTIONS.values() if each.on_wire)


def encode_generate_request(params: GenerateParams) -> bytes:
    """Raises InvalidRequestError for a value that the wire format cannot carry."""
    message = inference_pb2.GenerateRequest(model=params.model)
    try:
        if params.text is not None:
            message.text = params.text
        if params.token_ids is not None:
            message.tokens.SetInParent()
            message.tokens.token_ids.extend(params.token_ids)
        message.messages.extend(map(_encode_message, params.messages))
        message.tools = params.tools
        message.chat_template_kwargs = params.chat_template_kwargs
        for each in _WIRE_OPTIONS:
            if (value := getattr(params, each.name)) != each.default:
                _encode_option(message, each, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from None
    return message.SerializeToString()


def _encode_message(message: Message) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(
        role=message.role,
        content=message.content,
        name=message.name,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )


def _decode_message(message: inference_pb2.ChatMessage) -> Message:
    return Message(
        role=message.role,
        content=message.content if message.HasField("content") else None,
        name=message.name,
        tool_calls=message.tool_calls,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.reasoning_content,
    )


def _encode_option(message: inference_pb2.GenerateRequest, option: Option, value: Any) -> None:
    holder, name = _place(message, option)
    match value:
        case Grammar():
            encode_grammar(message.grammar, value)
        case Verification():
            setattr(holder, name, encode_verification(value))
        case DraftKind():
            setattr(holder, name, DRAFT_KIND_TO_PB[value])
        case tuple():
            getattr(holder, name).extend(encode_logit_bias(value) if option.name == "logit_bias" else value)
        case _:
            setattr(holder, name, value)


def _decode_option(message: inference_pb2.GenerateRequest, option: Option) -> Any:
    holder, name = _place(message, option)
    field = holder.DESCRIPTOR.fields_by_name[name]
    if field.has_presence and not holder.HasField(name):
        return option.default
    value = getattr(holder, name)
    if (decode := _OPTION_DECODERS.get(option.name)) is not None:
        return decode(value)
    return value if option.num_entries is None else tuple(value[:]) or option.default


def _place(message: inference_pb2.GenerateRequest, option: Option) -> tuple[Any, str]:
    """The message that holds an option, and the option's name there."""
    parent, _, name = option.path.rpartition(".")
    return getattr(message, parent) if parent else message, name


def decode_generate_request(data: bytes) -> GenerateParams:
    """Raises InvalidRequestError: broken bytes, text that is not UTF-8, no prompt, an unknown rule."""
    try:
        message = inference_pb2.GenerateRequest.FromString(data)
    except DecodeError:
        reason = "the message is no specray.v1.GenerateRequest, or a string in it is not UTF-8"
        raise InvalidRequestError(reason) from None
    prompt = message.WhichOneof("prompt")
    if prompt is None and not message.messages:
        raise InvalidRequestError("prompt is missing; give text, tokens or messages", field="prompt")
    return GenerateParams(
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.tokens.token_ids[:]) if prompt == "tokens" else None,
        messages=tuple(map(_decode_message, message.messages)),
        tools=message.tools,
        chat_template_kwargs=message.chat_template_kwargs,
        model=message.model,
        **{each.name: _decode_option(message, each) for each in _WIRE_OPTIONS},
    )


def _decode_grammar(grammar: types_pb2.Grammar) -> Grammar:
    try:
        return decode_grammar(grammar)
    except ProtocolError as error:
        raise InvalidRequestError(str(error), field="grammar.kind") from None


def _decode_optional_verification(verification: int) -> Verification | None:
    if verification == types_pb2.VERIFICATION_UNSPECIFIED:
        return None
    try:
        return decode_verification(verification)
    except ProtocolError as error:
        raise InvalidRequestError(f"speculation.{error}", field="speculation.verification") from None


def _decode_draft_kind(number: inference_pb2.DraftKind) -> DraftKind | None:
    if number not in DRAFT_KIND_FROM_PB:
        allowed = ", ".join(f"{value} ({kind})" for kind, value in DRAFT_KIND_TO_PB.items())
        raise InvalidRequestError(
            f"speculation.draft is {number}; allowed: {allowed}", field="speculation.draft"
        )
    return DRAFT_KIND_FROM_PB[number]


_OPTION_DECODERS: Final[Mapping[str, Callable[[Any], object]]] = MappingProxyType(
    {
        "grammar": _decode_grammar,
        "verification": _decode_optional_verification,
        "draft": _decode_draft_kind,
        "logit_bias": decode_logit_bias,
    }
)
"""Functions from a field of the message to the option's value, where they differ."""


def encode_generate_event(event: GenerateEvent) -> bytes:
    """Raises ValueError for finish_reason ``error``, which is an exception of the handler instead."""
    message = inference_pb2.GenerateResponse(request_id=event.request_id, text=event.text)
    message.token_ids.extend(event.token_ids)
    for logprobs in event.logprobs:
        encode_token_logprobs(message.logprobs.add(), logprobs)
    for logprobs in event.prompt_logprobs:
        encode_token_logprobs(message.prompt_logprobs.add(), logprobs)
    if event.finish_reason is not None:
        if event.finish_reason not in FINISH_REASON_TO_PB:
            raise ValueError(f"finish_reason {event.finish_reason} has no message")
        message.finish_reason = FINISH_REASON_TO_PB[event.finish_reason]
    if event.usage is not None:
        message.usage.SetInParent()
        message.usage.num_prompt_tokens = event.usage.num_prompt_tokens
        message.usage.num_output_tokens = event.usage.num_output_tokens
        message.usage.num_cached_tokens = event.usage.num_cached_tokens
    if event.speculation is not None:
        encode_stats(message.speculation, event.speculation)
    return message.SerializeToString()


def decode_generate_event(data: bytes) -> GenerateEvent:
    """Raises ProtocolError for broken bytes or an unknown finish_reason."""
    message = parse(inference_pb2.GenerateResponse, data)
    if message.finish_reason not in FINISH_REASON_FROM_PB:
        raise ProtocolError(f"finish_reason is {message.finish_reason}; allowed: 0..3")
    return GenerateEvent(
        request_id=message.request_id,
        text=message.text,
        token_ids=tuple(message.token_ids[:]),
        logprobs=tuple(map(decode_token_logprobs, message.logprobs)),
        finish_reason=FINISH_REASON_FROM_PB[message.finish_reason],
        usage=_decode_usage(message.usage) if message.HasField("usage") else None,
        speculation=decode_stats(message.speculation) if message.HasField("speculation") else None,
        prompt_logprobs=tuple(map(decode_token_logprobs, message.prompt_logprobs)),
    )


def _decode_usage(usage: inference_pb2.Usage) -> Usage:
    return Usage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens)


def encode_stats(out: inference_pb2.SpeculationStats, stats: SpeculationStats) -> None:
    out.SetInParent()
    out.num_spec_steps = stats.num_spec_steps
    out.num_draft_tokens = stats.num_draft_tokens
    out.num_accepted_draft_tokens = stats.num_accepted_draft_tokens
    out.acceptance_histogram.extend(stats.acceptance_histogram)
    out.num_accepted_prediction_tokens = stats.num_accepted_prediction_tokens
    out.num_rejected_prediction_tokens = stats.num_rejected_prediction_tokens


def decode_stats(stats: inference_pb2.SpeculationStats) -> SpeculationStats:
    return SpeculationStats(
        stats.num_spec_steps,
        stats.num_draft_tokens,
        stats.num_accepted_draft_tokens,
        tuple(stats.acceptance_histogram[:]),
        stats.num_accepted_prediction_tokens,
        stats.num_rejected_prediction_tokens,
    )


def encode_service_info(info: ServiceInfo) -> bytes:
    return inference_pb2.InfoResponse(
        model=info.model,
        draft_model=info.draft_model or "",
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        protocol_version=info.protocol_version,
        version=info.version,
    ).SerializeToString()


def decode_service_info(data: bytes) -> ServiceInfo:
    """Raises ProtocolError for broken bytes."""
    message = parse(inference_pb2.InfoResponse, data)
    return ServiceInfo(
        model=message.model,
        draft_model=message.draft_model or None,
        vocab_size=message.vocab_size,
        max_model_len=message.max_model_len,
        protocol_version=message.protocol_version,
        version=message.version,
    )
