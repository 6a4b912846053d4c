"""Messages of the DeliveryService between domain types and protobuf bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from specray.errors import ProtocolError
from specray.requests import OutputChunk, RouterLoad
from specray.round_reports import EngineStep, RoundReport
from specray.rpc.codec.inference import (
    FINISH_REASON_FROM_PB,
    FINISH_REASON_TO_PB,
    decode_stats,
    encode_stats,
)
from specray.rpc.codec.values import (
    decode_token_logprobs,
    encode_token_logprobs,
    get_fields,
    parse,
    set_fields,
)
from specray.rpc.pb import delivery_pb2

_ROUND = ("num_accepted_tokens", "source", "lookup", "overlap", "num_speculative_tokens", "reason")
_LOAD = tuple(each.name for each in fields(RouterLoad))
_STEP = tuple(each.name for each in fields(EngineStep))


def encode_chunks(chunks: Sequence[OutputChunk]) -> bytes:
    message = delivery_pb2.DeliverRequest()
    for chunk in chunks:
        _encode_chunk(message.chunks.add(), chunk)
    return message.SerializeToString()


def decode_chunks(data: bytes) -> list[OutputChunk]:
    """Raises ProtocolError for broken bytes or an unknown finish_reason."""
    return [_decode_chunk(chunk) for chunk in parse(delivery_pb2.DeliverRequest, data).chunks]


def _encode_chunk(out: delivery_pb2.OutputChunk, chunk: OutputChunk) -> None:
    out.request_id = chunk.request_id
    out.checkpoint = chunk.checkpoint
    if chunk.load is not None:
        set_fields(out.load, chunk.load, _LOAD)
    out.token_ids.extend(chunk.token_ids)
    for logprobs in chunk.logprobs:
        encode_token_logprobs(out.logprobs.add(), logprobs)
    for report in chunk.rounds:
        _encode_round(out.rounds.add(), report)
    if chunk.finish_reason is None:
        return
    out.finish_reason = FINISH_REASON_TO_PB[chunk.finish_reason]
    if isinstance(chunk.stop_reason, str):
        out.stop_string = chunk.stop_reason
    elif chunk.stop_reason is not None:
        out.stop_token_id = chunk.stop_reason
    if chunk.stats is not None:
        encode_stats(out.stats, chunk.stats)
    out.num_cached_tokens = chunk.num_cached_tokens
    if chunk.ttft_s is not None:
        out.ttft_s = chunk.ttft_s
    for logprobs in chunk.prompt_logprobs:
        encode_token_logprobs(out.prompt_logprobs.add(), logprobs)


def _decode_chunk(chunk: delivery_pb2.OutputChunk) -> OutputChunk:
    if chunk.finish_reason not in FINISH_REASON_FROM_PB:
        raise ProtocolError(f"finish_reason is {chunk.finish_reason}; allowed: 0..3")
    stop = chunk.WhichOneof("stop_reason")
    return OutputChunk(
        request_id=chunk.request_id,
        token_ids=tuple(chunk.token_ids[:]),
        logprobs=tuple(map(decode_token_logprobs, chunk.logprobs)),
        finish_reason=FINISH_REASON_FROM_PB[chunk.finish_reason],
        stop_reason=None if stop is None else getattr(chunk, stop),
        stats=decode_stats(chunk.stats) if chunk.HasField("stats") else None,
        num_cached_tokens=chunk.num_cached_tokens,
        ttft_s=chunk.ttft_s if chunk.HasField("ttft_s") else None,
        prompt_logprobs=tuple(map(decode_token_logprobs, chunk.prompt_logprobs)),
        rounds=tuple(map(_decode_round, chunk.rounds)),
        checkpoint=chunk.checkpoint,
        load=RouterLoad(**get_fields(chunk.load, _LOAD)) if chunk.HasField("load") else None,
    )


def _encode_round(out: delivery_pb2.RoundReport, report: RoundReport) -> None:
    out.token_ids.extend(report.token_ids)
    out.draft_token_ids.extend(report.draft_token_ids)
    set_fields(out, report, _ROUND)
    set_fields(out.verify, report.verify, _STEP)
    for step in report.drafting:
        set_fields(out.drafting.add(), step, _STEP)
    out.draft_parents.extend(report.draft_parents or ())
    out.draft_probs.extend(report.draft_probs)


def _decode_round(message: delivery_pb2.RoundReport) -> RoundReport:
    return RoundReport(
        token_ids=tuple(message.token_ids[:]),
        draft_token_ids=tuple(message.draft_token_ids[:]),
        **get_fields(message, _ROUND),
        verify=EngineStep(**get_fields(message.verify, _STEP)),
        drafting=tuple(EngineStep(**get_fields(step, _STEP)) for step in message.drafting),
        draft_parents=tuple(message.draft_parents[:]) or None,
        draft_probs=tuple(message.draft_probs[:]),
    )
