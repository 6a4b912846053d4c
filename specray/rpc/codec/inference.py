"""Messages of the public InferenceService between domain types and protobuf bytes.

Requests come from strangers: what is wrong with them is an InvalidRequestError that names the field.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import DecodeError

from specray.errors import InvalidRequestError, ProtocolError
from specray.requests import SAMPLING_OPTIONS, FinishReason, ServiceInfo, SpeculationStats
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
OPTIONAL_FIELDS = (
    *("max_tokens", *SAMPLING_OPTIONS, "logprobs", "prompt_logprobs", "priority"),
    *("skip_special_tokens", "truncate_prompt_tokens"),
)
"""Names of optional scalars of GenerateRequest and GenerateParams alike; absent is None."""

_LEVEL_FIELDS = ("ttft_ms", "itl_ms")


def encode_generate_request(params: GenerateParams) -> bytes:
    """Raises InvalidRequestError for a value that the wire format cannot carry."""
    message = inference_pb2.GenerateRequest(model=params.model, ignore_eos=params.ignore_eos)
    try:
        if params.text is not None:
            message.text = params.text
        if params.token_ids is not None:
            message.tokens.SetInParent()
            message.tokens.token_ids.extend(params.token_ids)
        message.messages.extend(map(_encode_message, params.messages))
        message.tools = params.tools
        message.chat_template_kwargs = params.chat_template_kwargs
        for name in OPTIONAL_FIELDS:
            if (value := getattr(params, name)) is not None:
                setattr(message, name, value)
        message.logit_bias.extend(encode_logit_bias(params.logit_bias))
        message.stop.extend(params.stop)
        message.stop_token_ids.extend(params.stop_token_ids)
        message.include_stop_str_in_output = params.include_stop_str_in_output
        message.allowed_token_ids.extend(params.allowed_token_ids)
        message.bad_words.extend(params.bad_words)
        message.cache_salt = params.cache_salt
        message.prediction = params.prediction
        if params.grammar is not None:
            encode_grammar(message.grammar, params.grammar)
        for name in _LEVEL_FIELDS:
            if (value := getattr(params, name)) is not None:
                setattr(message.slo, name, value)
        _encode_speculation(message, params)
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


def _encode_speculation(message: inference_pb2.GenerateRequest, params: GenerateParams) -> None:
    if params.speculation_enabled is not None:
        message.speculation.enabled = params.speculation_enabled
    if params.num_speculative_tokens is not None:
        message.speculation.num_speculative_tokens = params.num_speculative_tokens
    if params.verification is not None:
        message.speculation.verification = encode_verification(params.verification)
    if params.draft is not None:
        message.speculation.draft = DRAFT_KIND_TO_PB[params.draft]
    if params.tenant:
        message.speculation.tenant = params.tenant


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
    speculation = message.speculation
    optional: dict[str, Any] = {
        name: getattr(message, name) if message.HasField(name) else None for name in OPTIONAL_FIELDS
    }
    return GenerateParams(
        text=message.text if prompt == "text" else None,
        token_ids=tuple(message.tokens.token_ids[:]) if prompt == "tokens" else None,
        messages=tuple(map(_decode_message, message.messages)),
        tools=message.tools,
        chat_template_kwargs=message.chat_template_kwargs,
        model=message.model,
        logit_bias=decode_logit_bias(message.logit_bias),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids[:]),
        ignore_eos=message.ignore_eos,
        speculation_enabled=speculation.enabled if speculation.HasField("enabled") else None,
        num_speculative_tokens=(
            speculation.num_speculative_tokens if speculation.HasField("num_speculative_tokens") else None
        ),
        verification=_decode_optional_verification(speculation.verification),
        draft=_decode_draft_kind(speculation.draft),
        tenant=speculation.tenant,
        include_stop_str_in_output=message.include_stop_str_in_output,
        allowed_token_ids=tuple(message.allowed_token_ids[:]),
        bad_words=tuple(message.bad_words),
        cache_salt=message.cache_salt,
        prediction=message.prediction,
        grammar=_decode_optional_grammar(message),
        ttft_ms=message.slo.ttft_ms if message.slo.HasField("ttft_ms") else None,
        itl_ms=message.slo.itl_ms if message.slo.HasField("itl_ms") else None,
        **optional,
    )


def _decode_optional_grammar(message: inference_pb2.GenerateRequest) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    try:
        return decode_grammar(message.grammar)
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
