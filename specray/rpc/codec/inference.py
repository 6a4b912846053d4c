"""Messages of the public InferenceService between domain types and protobuf bytes.

Requests come from strangers: what is wrong with them is an InvalidRequestError that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError

from specray.errors import InvalidRequestError, ProtocolError
from specray.request_options import OPTIONS, Option
from specray.requests import FinishReason, ServedModel, ServiceInfo, SpeculationStats
from specray.rpc.codec.values import (
    decode_grammar,
    decode_logit_bias,
    decode_token_logprobs,
    decode_verification,
    encode_grammar,
    encode_logit_bias,
    encode_token_logprobs,
    encode_verification,
    get_fields,
    parse,
    set_fields,
)
from specray.rpc.inference.types import GenerateEvent, GenerateParams, Message, TokenUsage
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
_PARAMS: Final = ("model", "tools", "chat_template_kwargs")
_MESSAGE: Final = tuple(each.name for each in fields(Message) if each.name != "content")
_USAGE: Final = tuple(each.name for each in fields(TokenUsage))
_STATS: Final = tuple(each.name for each in fields(SpeculationStats) if each.name != "acceptance_histogram")
_SERVICE: Final = tuple(each.name for each in fields(ServiceInfo) if each.name != "models")
_WIRE_OPTIONS: Final = tuple(each for each in OPTIONS.values() if each.on_wire)


def encode_generate_request(params: GenerateParams) -> bytes:
    """Raises InvalidRequestError for a value that the wire format cannot carry."""
    message = inference_pb2.GenerateRequest()
    try:
        if params.text is not None:
            message.text = params.text
        if params.token_ids is not None:
            message.tokens.SetInParent()
            message.tokens.token_ids.extend(params.token_ids)
        for entry in params.messages:
            out = message.messages.add()
            set_fields(out, entry, _MESSAGE)
            if entry.content is not None:
                out.content = entry.content
        set_fields(message, params, _PARAMS)
        for each in _WIRE_OPTIONS:
            if (value := getattr(params, each.name)) != each.default:
                _encode_option(message, each, value)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"the request cannot be sent: {error}") from None
    return message.SerializeToString()


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
        messages=tuple(
            Message(content=each.content if each.HasField("content") else None, **get_fields(each, _MESSAGE))
            for each in message.messages
        ),
        **get_fields(message, _PARAMS),
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
        set_fields(message.usage, event.usage, _USAGE)
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
        usage=TokenUsage(**get_fields(message.usage, _USAGE)) if message.HasField("usage") else None,
        speculation=decode_stats(message.speculation) if message.HasField("speculation") else None,
        prompt_logprobs=tuple(map(decode_token_logprobs, message.prompt_logprobs)),
    )


def encode_stats(out: inference_pb2.SpeculationStats, stats: SpeculationStats) -> None:
    set_fields(out, stats, _STATS)
    out.acceptance_histogram.extend(stats.acceptance_histogram)


def decode_stats(stats: inference_pb2.SpeculationStats) -> SpeculationStats:
    histogram = tuple(stats.acceptance_histogram[:])
    return SpeculationStats(acceptance_histogram=histogram, **get_fields(stats, _STATS))


def encode_service_info(info: ServiceInfo) -> bytes:
    message = inference_pb2.InfoResponse()
    set_fields(message, replace(info, draft_model=info.draft_model or ""), _SERVICE)
    for model in info.models:
        message.models.add(name=model.name, aliases=model.aliases, state=model.state)
    return message.SerializeToString()


def decode_service_info(data: bytes) -> ServiceInfo:
    """Raises ProtocolError for broken bytes."""
    message = parse(inference_pb2.InfoResponse, data)
    info = ServiceInfo(**get_fields(message, _SERVICE))
    models = tuple(ServedModel(each.name, tuple(each.aliases), each.state) for each in message.models)
    return replace(info, draft_model=info.draft_model or None, models=models)
