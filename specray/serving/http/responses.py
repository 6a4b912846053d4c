"""What the answers of all endpoints share, whole and as events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol

from specray.requests import SpeculationStats
from specray.serving.generation import Delta
from specray.serving.problems import problem_body
from specray.tokenization import Tokenizer
from specray.types import TokenLogprobs

Json = dict[str, Any]

GET: Final = ["GET", "HEAD"]
"""Methods of endpoints that only read: probes use HEAD, and the server sends no body then."""


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
        usage = {**self.usage_so_far(), "prompt_tokens_details": cached}
        total = sum_stats(self.stats)
        num_accepted, num_rejected = (
            total.num_accepted_prediction_tokens,
            total.num_rejected_prediction_tokens,
        )
        if num_accepted or num_rejected:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": num_accepted,
                "rejected_prediction_tokens": num_rejected,
            }
        return usage

    def metrics(self) -> Json:
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
    """The way one of the APIs writes the outputs of a call.

    An event whose body has a ``type`` carries it as its name, too.
    """

    @property
    def ending(self) -> bytes:
        """What ends a stream behind its last event."""
        ...

    @property
    def waiting(self) -> bytes: ...

    def body(self, outputs: Sequence[Delta], totals: Totals) -> Json: ...

    def opening(self, num_choices: int, totals: Totals) -> Iterable[Json]: ...

    def events(self, delta: Delta) -> Iterable[Json]: ...

    def closing(self, totals: Totals, *, includes_usage: bool, includes_metrics: bool) -> Iterable[Json]: ...

    def failure(self, error: Exception) -> Json: ...


class ChunkFormat(ABC):
    """What the formats of chats and completions share: events without names, and usage in one of its own."""

    ending: ClassVar[bytes] = b"data: [DONE]\n\n"
    waiting: ClassVar[bytes] = b": waiting\n\n"

    @abstractmethod
    def summary(self) -> Json: ...

    @abstractmethod
    def usage(self, totals: Totals) -> Json: ...

    def closing(self, totals: Totals, *, includes_usage: bool, includes_metrics: bool) -> Iterable[Json]:
        if not includes_usage and not includes_metrics:
            return
        summary = self.summary()
        if includes_usage:
            summary["usage"] = self.usage(totals)
        if includes_metrics:
            summary["metrics"] = totals.metrics()
        yield summary

    def failure(self, error: Exception) -> Json:
        return problem_body(error)


def sum_stats(stats: Iterable[SpeculationStats]) -> SpeculationStats:
    """Adds up the counters of several outputs."""
    total = SpeculationStats()
    for one in stats:
        total = SpeculationStats(
            total.num_spec_steps + one.num_spec_steps,
            total.num_draft_tokens + one.num_draft_tokens,
            total.num_accepted_draft_tokens + one.num_accepted_draft_tokens,
            _add(total.acceptance_histogram, one.acceptance_histogram),
            total.num_accepted_prediction_tokens + one.num_accepted_prediction_tokens,
            total.num_rejected_prediction_tokens + one.num_rejected_prediction_tokens,
        )
    return total


def _add(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    longer, shorter = (left, right) if len(left) >= len(right) else (right, left)
    return tuple(
        count + (shorter[index] if index < len(shorter) else 0) for index, count in enumerate(longer)
    )


def listed_prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[Json | None]:
    """Writes a prompt's logprobs as vLLM does: a map from token ids for each token, null for the first."""
    return [None, *(_by_token(tokenizer, entry) for entry in entries)]


def _by_token(tokenizer: Tokenizer, entry: TokenLogprobs) -> Json:
    tops = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    ranked: dict[int, tuple[int | None, float]] = {
        token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(tops, start=1)
    }
    # How many tokens are likelier is known of those that are listed.
    ranked.setdefault(entry.token_id, (None, entry.logprob))
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (rank, logprob) in ranked.items()
    }


def finite(logprob: float) -> float:
    # Substitute for minus infinity, which JSON does not have, as in OpenAI's API and vLLM.
    return max(logprob, -9999.0)
