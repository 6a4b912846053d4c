"""Tells the rounds of an output in events of a stream, where a call asks for them.

``stream_options.include_speculation`` asks. The events have no choices: clients that do not know them pass
them over. A round whose text is held back, for a stop string or an unfinished character, is told as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from specray.draft_tokens import DraftTokens
from specray.round_reports import RoundReport
from specray.serving.generation import Delta
from specray.serving.http.responses import finite
from specray.tokenization import Tokenizer

Json = dict[str, Any]


class RoundFormat:
    """Writes the rounds of one call's choices.

    Args:
        summary: event of the call's format without choices.
    """

    def __init__(self, tokenizer: Tokenizer, summary: Json) -> None:
        self._tokenizer = tokenizer
        self._summary = summary

    def event(self, delta: Delta) -> Json:
        tokens = _tokens(delta)
        rounds = [self._round(report, tokens) for report in delta.rounds]
        return {**self._summary, "speculation": {"index": delta.index, "rounds": rounds}}

    def _round(self, report: RoundReport, tokens: Iterator[Json]) -> Json:
        kinds = _kinds(report)
        return {
            "tokens": [{**next(tokens), "kind": kind} for kind in kinds],
            "draft": [
                {
                    "id": token_id,
                    "text": self._tokenizer.token_text(token_id),
                    "probability": report.draft_probs[place] if report.draft_probs else None,
                }
                for place, token_id in enumerate(report.draft_token_ids)
            ],
            "parents": None if report.draft_parents is None else list(report.draft_parents),
            "num_accepted_tokens": report.num_accepted_tokens,
            "source": report.source,
            "lookup": report.lookup,
            "overlap": report.overlap,
            "num_speculative_tokens": report.num_speculative_tokens,
            "reason": report.reason,
            "verify": _rounded(asdict(report.verify)),
            "drafting": [_rounded(asdict(step)) for step in report.drafting],
        }


def _tokens(delta: Delta) -> Iterator[Json]:
    for place, token_id in enumerate(delta.token_ids):
        text = delta.pieces[place] if place < len(delta.pieces) else ""
        logprob = finite(delta.logprobs[place].logprob) if place < len(delta.logprobs) else None
        yield {"id": token_id, "text": text, "logprob": logprob}


def _kinds(report: RoundReport) -> list[str]:
    """What each token of a round is: an accepted draft token, or one of the target's own."""
    num_accepted = report.num_accepted_tokens
    kinds = ["accepted"] * num_accepted
    if len(report.token_ids) == num_accepted:
        return kinds
    if not report.draft_token_ids:
        return [*kinds, "target"]
    draft = DraftTokens(report.draft_token_ids, report.draft_parents)
    last = draft.common(report.token_ids[:num_accepted])
    parents = range(-1, len(draft) - 1) if draft.parents is None else draft.parents
    return [*kinds, "recovered" if last in parents else "bonus"]


def _rounded(step: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in step.items()}
