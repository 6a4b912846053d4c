"""Builds response bodies of the OpenAI APIs, whole and as events: what they share, and completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specray.requests import SpeculationStats
from specray.serving.generation import Delta
from specray.tokenization import Tokenizer
from specray.types import TokenLogprobs

Json = dict[str, Any]

_MIN_LOGPROB = -9999.0
"""Substitute for minus infinity, which JSON does not have, as in OpenAI's API and vLLM."""


@dataclass(frozen=True, slots=True)
class Header:
    """Fields with which every body of one call begins."""

    response_id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> Json:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(slots=True)
class Totals:
    """Counters of one call over all its choices."""

    num_prompt_tokens: int
    num_choices: int = 1
    """Choices per prompt."""
    num_output_tokens: int = 0
    stats: list[SpeculationStats] = field(default_factory=list)
    num_cached_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens by prompt that every one of its choices found in the prefix cache."""

    def add(self, delta: Delta) -> None:
        self.num_output_tokens += len(delta.token_ids)
        if delta.stats is not None:
            self.stats.append(delta.stats)
        if delta.finish_reason is not None:
            prompt, found = delta.index // self.num_choices, delta.num_cached_tokens
            self.num_cached_tokens[prompt] = min(found, self.num_cached_tokens.get(prompt, found))

    def usage_so_far(self) -> Json:
        """Returns the usage of all choices; cached tokens of a choice are known when it has ended."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }

    def usage(self) -> Json:
        cached = {"cached_tokens": sum(self.num_cached_tokens.values())}
        return {**self.usage_so_far(), "prompt_tokens_details": cached}

    def metrics(self) -> Json:
        """Returns ``speculative_decoding`` with vLLM's field names."""
        total = sum_stats(self.stats)
        return {
            "speculative_decoding": {
                "mean_acceptance_length": total.mean_acceptance_length,
                "draft_acceptance_rate": total.draft_acceptance_rate,
                "num_spec_steps": total.num_spec_steps,
                "num_accepted_draft_tokens": total.num_accepted_draft_tokens,
                "num_draft_tokens": total.num_draft_tokens,
                "acceptance_histogram": list(total.acceptance_histogram),
            }
        }


class ResponseFormat(Protocol):
    """The way one of the APIs writes the outputs of a call."""

    def body(self, outputs: Sequence[Delta], totals: Totals) -> Json:
        """Returns the whole response, without its metrics."""
        ...

    def opening(self, num_choices: int) -> Iterable[Json]:
        """Yields the events before the first delta."""
        ...

    def events(self, delta: Delta) -> Iterable[Json]:
        """Yields the events of one delta."""
        ...

    def summary(self) -> Json:
        """Returns the last event, without choices, which carries usage and metrics."""
        ...

    def usage(self, totals: Totals) -> Json:
        """Returns the token counts of a call that has ended."""
        ...


class CompletionFormat:
    """Bodies of /v1/completions.

    Args:
        echoes: text of the prompt that comes first, by choice; empty strings without ``echo``.
    """

    def __init__(self, header: Header, tokenizer: Tokenizer, echoes: Sequence[str]) -> None:
        self._header = header
        self._tokenizer = tokenizer
        self._echoes = echoes

    def body(self, outputs: Sequence[Delta], totals: Totals) -> Json:
        choices = [self._choice(delta, self._echoes[delta.index] + delta.text) for delta in outputs]
        return {**self._header.fields("text_completion"), "choices": choices, "usage": totals.usage()}

    def opening(self, num_choices: int) -> Iterable[Json]:
        for index in range(num_choices):
            if self._echoes[index]:
                yield from self.events(Delta(index, self._echoes[index], ()))

    def events(self, delta: Delta) -> Iterable[Json]:
        if delta.is_visible:
            yield {**self.summary(), "choices": [self._choice(delta, delta.text)]}

    def summary(self) -> Json:
        return {**self._header.fields("text_completion"), "choices": []}

    def usage(self, totals: Totals) -> Json:
        return totals.usage()

    def _choice(self, delta: Delta, text: str) -> Json:
        return {
            "index": delta.index,
            "text": text,
            "logprobs": self._logprobs(delta) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _logprobs(self, delta: Delta) -> Json:
        name = self._tokenizer.token_text
        return {
            "tokens": [name(entry.token_id) for entry in delta.logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in delta.logprobs],
            "top_logprobs": [
                {name(token_id): finite(logprob) for token_id, logprob in _alternatives(entry)}
                for entry in delta.logprobs
            ],
            "text_offset": list(delta.text_offsets),
        }


def sum_stats(stats: Iterable[SpeculationStats]) -> SpeculationStats:
    """Adds up the counters of several outputs."""
    total = SpeculationStats()
    for one in stats:
        total = SpeculationStats(
            total.num_spec_steps + one.num_spec_steps,
            total.num_draft_tokens + one.num_draft_tokens,
            total.num_accepted_draft_tokens + one.num_accepted_draft_tokens,
            _add(total.acceptance_histogram, one.acceptance_histogram),
        )
    return total


def _add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return tuple(
        count + (shorter[index] if index < len(shorter) else 0) for index, count in enumerate(longer)
    )


def _alternatives(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """Returns the likeliest tokens, and the chosen one too, as in OpenAI's completions API."""
    tops = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
    if entry.token_id in entry.top_token_ids:
        return tops
    return [*tops, (entry.token_id, entry.logprob)]


def finite(logprob: float) -> float:
    """A log probability as JSON has it."""
    return max(logprob, _MIN_LOGPROB)
