"""What a step of the target knows of each of its items, and which rows of the step's logits are whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from specray.draft_tokens import DraftTokens
from specray.engine.cache.sequence import EngineSequence
from specray.engine.cache.state_slots import STATE_UNIT
from specray.engine.sampling.logprobs import token_logprobs
from specray.engine.schedule import CatchUp
from specray.engine.target.lookahead import WindowRows
from specray.types import TokenLogprobs, Verdict, VerifyItem

T = TypeVar("T")

Scores = dict[int, tuple[TokenLogprobs, ...]]
"""Logprobs of the prompt tokens of an item, by its index in the batch."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An item whose sequence has its tokens and its room."""

    index: int
    item: VerifyItem
    draft: DraftTokens
    """What is verified of the item's draft."""
    sequence: EngineSequence
    window: WindowRows | None = None
    """Rows of lookahead decoding after the draft's; None: there are none."""

    @property
    def num_window_rows(self) -> int:
        return 0 if self.window is None else len(self.window.token_ids)

    @property
    def parents(self) -> Sequence[int] | None:
        """Parents of draft tokens and window; None: there is a chain alone."""
        if self.window is None:
            return self.draft.parents
        of_draft = self.draft.parents
        chain = range(-1, len(self.draft) - 1)
        return (*(chain if of_draft is None else of_draft), *self.window.parents)

    @property
    def num_sampled(self) -> int:
        return len(self.draft.token_ids) + 1 if self.item.sample else 0

    @property
    def scored(self) -> Sequence[int]:
        """The prompt tokens of the item whose logprobs are wanted; nothing predicts the first of all."""
        sampling = self.sequence.sampling
        if sampling.num_prompt_logprobs is None:
            return ()
        end = min(self.sequence.num_tokens, sampling.num_prompt_tokens)
        return self.sequence.token_ids[max(1, self.item.base_len) : end]

    @property
    def num_logits(self) -> int:
        """Rows of the sequence that give logits: its last ones, from before the first scored token on."""
        if not self.scored:
            return self.num_sampled
        return len(self.sequence.token_ids) - max(1, self.item.base_len) + 1

    @property
    def work(self) -> CatchUp:
        """The rows that the step computes of the sequence.

        The next chunk of a prompt that is scored goes on from the row before it, whose logits are its own.
        """
        sequence = self.sequence
        goes_back = sequence.sampling.num_prompt_logprobs is not None and not self.item.sample
        num_left = 0
        if sequence.state_slot is not None and not self.item.sample and not goes_back:
            # However prompts are cut, chunks of recurrent layers end at the same tokens.
            num_left = min(sequence.num_missing_tokens, len(sequence.token_ids) % STATE_UNIT)
        return CatchUp(
            sequence,
            self.num_logits + self.num_window_rows,
            self.parents,
            () if self.window is None else self.window.token_ids,
            num_open=1 if goes_back else self.num_sampled,
            num_left=num_left,
        )

    @property
    def takes_logits(self) -> bool:
        """Whether the step's logits are needed besides its draws, or a grammar depends on them."""
        sampling = self.sequence.sampling
        return (
            bool(self.scored)
            or self.num_window_rows > 0
            or sampling.grammar is not None
            or (self.item.sample and sampling.num_logprobs is not None)
        )

    def chunk_verdict(self, prompt_logprobs: tuple[TokenLogprobs, ...] = ()) -> Verdict:
        """The answer to a prefill chunk."""
        item, sequence = self.item, self.sequence
        return Verdict(
            item.request_id,
            item.round_id,
            item.base_len,
            0,
            None,
            held_len=None if item.max_new_tokens is None else sequence.num_tokens,
            num_cached_tokens=sequence.num_cached_tokens,
            prompt_logprobs=prompt_logprobs,
        )


def with_rows(
    sampled: Sequence[Scheduled], logits: Tensor, values: Sequence[T]
) -> Iterator[tuple[Scheduled, Tensor, T]]:
    start = 0
    for entry, value in zip(sampled, values, strict=True):
        yield entry, logits[start : start + entry.num_sampled], value
        start += entry.num_sampled


def split_scores(scheduled: Sequence[Scheduled], logits: Tensor | None) -> tuple[Tensor | None, Scores]:
    """Separates the rows that tokens are drawn from, and makes logprobs of those that score prompts."""
    if logits is None or not any(entry.scored for entry in scheduled):
        return logits, {}
    scores: Scores = {}
    sampled: list[Tensor] = []
    pieces = torch.split(logits, [entry.num_logits for entry in scheduled])
    for entry, rows in zip(scheduled, pieces, strict=True):
        tokens, num_top = entry.scored, entry.sequence.sampling.num_prompt_logprobs
        if tokens:
            assert num_top is not None
            scores[entry.index] = token_logprobs(rows[: len(tokens)], tokens, num_top)
        if entry.item.sample:
            sampled.append(rows[len(rows) - entry.num_sampled :])
    return (torch.cat(sampled) if sampled else None), scores
