"""Where one output stands in its grammar, and which tokens may follow at each row of a verification window.

Stop tokens never enter the matcher: they end an output, so nothing can follow them, and llguidance does not
count them when it rolls back.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from specray.errors import GrammarError
from specray.grammar.bounds import sentence

TokenMasks = NDArray[np.int32]
"""Bit ``id % 32`` of word ``id // 32``: the row may predict token ``id``. ``[num_rows, num_words]``."""


@dataclass(slots=True)
class MatcherStats:
    """Counts of one process's matchers; only ever grows."""

    mask_s: float = 0.0
    """Seconds spent on masks."""
    num_illegal_drafts: int = 0
    """Draft tokens that a grammar forbade."""
    num_replays: int = 0
    """Matchers that were rebuilt from the output's tokens after an error."""


class GrammarMatcher:
    """The state of one sequence's grammar.

    Args:
        pristine: the compiled grammar, never advanced; shared by all sequences.
        vocab_size: width of the logits.
        eos_token_ids: tokens that end an output wherever the grammar may end; known to the tokenizer.
        stop_token_ids: further tokens that end the output: legal where the grammar may end, and where it
            has them as text.
        stats: where this process counts; shared.
    """

    def __init__(
        self,
        pristine: LLMatcher,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        stop_token_ids: Collection[int] = (),
        stats: MatcherStats | None = None,
    ) -> None:
        self._pristine = pristine
        self._matcher = pristine.deep_copy()
        self._fed: list[int] = []
        self._vocab_size = vocab_size
        self._ends = np.zeros(_num_words(vocab_size), np.int32)
        self._stop_token_ids = frozenset({*eos_token_ids, *stop_token_ids})
        for token_id in self._stop_token_ids:
            if token_id < vocab_size:
                self._ends.view(np.uint32)[token_id // 32] |= np.uint32(1 << (token_id % 32))
        self._stats = stats or MatcherStats()

    def fork(self) -> GrammarMatcher:
        """A matcher at the same place that moves independently."""
        other = GrammarMatcher.__new__(GrammarMatcher)
        other._pristine = self._pristine
        other._matcher = self._matcher.deep_copy()
        other._fed = list(self._fed)
        other._vocab_size = self._vocab_size
        other._ends = self._ends
        other._stop_token_ids = self._stop_token_ids
        other._stats = self._stats
        return other

    def masks(
        self, output_ids: Sequence[int], draft_ids: Sequence[int] = (), parents: Sequence[int] | None = None
    ) -> TokenMasks:
        """What may follow the output (row 0) and each node of a draft (row i + 1 for node i).

        A row after an illegal token or a stop token cannot be reached; its mask allows everything.

        Args:
            output_ids: the output so far, without the prompt.
            draft_ids: the draft's tokens.
            parents: each node's parent, -1 for the output's end; parents come first. None: a chain.

        Returns:
            ``[len(draft_ids) + 1, (vocab_size + 31) // 32]``.

        Raises:
            GrammarError: no token may follow the output, or the output itself breaks the grammar.
        """
        started = time.perf_counter()
        masks = np.full((len(draft_ids) + 1, _num_words(self._vocab_size)), -1, np.int32)
        self._move(output_ids)
        self._fill(masks, 0)
        children: list[list[int]] = [[] for _ in range(len(draft_ids) + 1)]
        for node in range(len(draft_ids)):
            children[(node - 1 if parents is None else parents[node]) + 1].append(node)
        self._fill_below(0, children, draft_ids, masks)
        self._stats.mask_s += time.perf_counter() - started
        return masks

    def count_legal(self, output_ids: Sequence[int], token_ids: Sequence[int]) -> int:
        """How many of the tokens may follow the output, one after the other; a legal stop token is the last.

        Raises:
            GrammarError: the output itself breaks the grammar.
        """
        self._move(output_ids)
        ends = next((i for i, token in enumerate(token_ids) if token in self._stop_token_ids), len(token_ids))
        num_legal = self._matcher.validate_tokens(list(token_ids[:ends])) if ends else 0
        if num_legal < ends or ends == len(token_ids):
            return num_legal
        if ends:
            self._consume(token_ids[:ends])
        is_legal = self._matcher.is_accepting() or (
            self._matcher.validate_tokens([token_ids[ends]]) == 1 and not self._matcher.is_stopped()
        )
        return ends + is_legal

    def forced(self, output_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most ``limit`` tokens without a choice. Raises GrammarError: the output breaks the grammar."""
        self._move(output_ids)
        return tuple(self._matcher.compute_ff_tokens()[:limit])

    def is_complete(self, output_ids: Sequence[int]) -> bool:
        """True when nothing but a stop token may follow. Raises GrammarError as ``masks`` does."""
        self._move(output_ids)
        return bool(self._matcher.is_stopped())

    def _fill_below(
        self, row: int, children: list[list[int]], draft_ids: Sequence[int], masks: TokenMasks
    ) -> None:
        """Fills the rows below ``row``, where the matcher stands; it may end up further along."""
        place = len(self._fed)
        for node in children[row]:
            token_id = draft_ids[node]
            if not _has_bit(masks[row], token_id):
                self._stats.num_illegal_drafts += 1
                continue
            if token_id in self._stop_token_ids:
                continue
            self._consume((token_id,))
            self._fill(masks, node + 1)
            self._fill_below(node + 1, children, draft_ids, masks)
            if len(children[row]) > 1:
                self._roll_back(place)

    def _fill(self, masks: TokenMasks, row: int) -> None:
        if self._matcher.is_stopped():
            masks[row] = self._ends
        else:
            fill_next_token_bitmask(self._matcher, masks, row)
            if self._matcher.is_accepting():
                masks[row] |= self._ends
        if self._matcher.is_error():
            raise GrammarError(f"the grammar cannot go on: {sentence(self._matcher.get_error())}")
        if not masks[row].any():
            raise GrammarError("the grammar allows no token here")

    def _move(self, output_ids: Sequence[int]) -> None:
        """Brings the matcher to the end of ``output_ids``: back to the common prefix, then forward."""
        common = limit = min(len(self._fed), len(output_ids))
        # Nearly always the output goes on, or back to where it was: one comparison of all is quick.
        if self._fed[:limit] != list(output_ids[:limit]):
            common = next(place for place in range(limit) if self._fed[place] != output_ids[place])
        try:
            self._roll_back(common)
            self._consume(output_ids[common:])
        except GrammarError:
            # A matcher's errors are permanent; its state follows from the tokens, so it is made anew once.
            self._stats.num_replays += 1
            self._restart()
            try:
                self._consume(output_ids)
            except GrammarError:
                self._restart()
                raise

    def _restart(self) -> None:
        self._matcher, self._fed = self._pristine.deep_copy(), []

    def _roll_back(self, length: int) -> None:
        surplus = len(self._fed) - length
        if surplus:
            is_done = self._matcher.rollback(surplus)
            del self._fed[length:]
            if not is_done or self._matcher.is_error():
                raise GrammarError(f"the grammar cannot go back: {sentence(self._matcher.get_error())}")

    def _consume(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            return
        if not self._matcher.consume_tokens(list(token_ids)):
            raise GrammarError(f"the output breaks its grammar: {sentence(self._matcher.get_error())}")
        self._fed.extend(token_ids)


def _num_words(vocab_size: int) -> int:
    return (vocab_size + 31) // 32


def _has_bit(words: NDArray[np.int32], token_id: int) -> bool:
    return bool((int(words[token_id // 32]) >> (token_id % 32)) & 1)
