"""Round reports between domain types and protobuf messages."""

from __future__ import annotations

from specray.round_reports import EngineStep, RoundReport
from specray.rpc.pb import delivery_pb2

_SCALARS = ("num_accepted_tokens", "source", "lookup", "overlap", "num_speculative_tokens", "reason")


def encode_round(out: delivery_pb2.RoundReport, report: RoundReport) -> None:
    out.token_ids.extend(report.token_ids)
    out.draft_token_ids.extend(report.draft_token_ids)
    for name in _SCALARS:
        setattr(out, name, getattr(report, name))
    _encode_step(out.verify, report.verify)
    for step in report.drafting:
        _encode_step(out.drafting.add(), step)
    out.draft_parents.extend(report.draft_parents or ())
    out.draft_probs.extend(report.draft_probs)


def decode_round(message: delivery_pb2.RoundReport) -> RoundReport:
    return RoundReport(
        token_ids=tuple(message.token_ids[:]),
        draft_token_ids=tuple(message.draft_token_ids[:]),
        **{name: getattr(message, name) for name in _SCALARS},
        verify=_decode_step(message.verify),
        drafting=tuple(map(_decode_step, message.drafting)),
        draft_parents=tuple(message.draft_parents[:]) or None,
        draft_probs=tuple(message.draft_probs[:]),
    )


def _encode_step(out: delivery_pb2.EngineStep, step: EngineStep) -> None:
    out.started_ms, out.ended_ms, out.forward_ms = step.started_ms, step.ended_ms, step.forward_ms


def _decode_step(message: delivery_pb2.EngineStep) -> EngineStep:
    return EngineStep(message.started_ms, message.ended_ms, message.forward_ms)
