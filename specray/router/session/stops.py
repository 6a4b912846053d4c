"""Decides when an output is finished: stop tokens, stop strings, max_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specray.interfaces import StopMatcher
from specray.requests import FinishReason, GenerateRequest


class OutputCut(NamedTuple):
    """What is left of newly verified tokens."""

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class StopConditions:
    """Stop token ids, stop strings and max_tokens of one request.

    A stop token counts from ``min_tokens`` on (the target makes it impossible before), and so does a stop
    string. A stop token wins over a stop string that it completes, and both over the length.
    """

    def __init__(self, request: GenerateRequest, matcher: StopMatcher | None) -> None:
        self._stop_token_ids = frozenset(request.sampling.stop_token_ids)
        self._eos_token_ids = frozenset(request.eos_token_ids)
        self._min_tokens = request.sampling.min_tokens
        self._max_tokens = request.max_tokens
        self._matcher = matcher if request.stop else None

    def cut(self, token_ids: Sequence[int], num_output_tokens: int) -> OutputCut:
        """How many of ``token_ids`` are kept after ``num_output_tokens`` earlier ones. Call once for each."""
        if self._matcher is None and self._stop_token_ids.isdisjoint(token_ids):
            remaining = self._max_tokens - num_output_tokens
            if len(token_ids) < remaining:
                return OutputCut(len(token_ids))
            return OutputCut(remaining, FinishReason.LENGTH)
        for num_kept, token_id in enumerate(token_ids, start=1):
            num_output_tokens += 1
            matched = self._matcher.push((token_id,)) if self._matcher is not None else None
            if num_output_tokens > self._min_tokens:
                if token_id in self._stop_token_ids:
                    stop_reason = None if token_id in self._eos_token_ids else token_id
                    return OutputCut(num_kept, FinishReason.STOP, stop_reason)
                if matched is not None:
                    return OutputCut(num_kept, FinishReason.STOP, matched)
            if num_output_tokens >= self._max_tokens:
                return OutputCut(num_kept, FinishReason.LENGTH)
        return OutputCut(len(token_ids))
