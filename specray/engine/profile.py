"""Measures step times of an engine at its start, through an engine like the one that will serve.

The router chooses K, fan-out and overlap from these times until it has measured its own. The engine
that is measured is thrown away afterwards with all its sequences; weights and cache are the runner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from specray.draft_tokens import DraftTokens
from specray.engine_info import EngineInfo, RoutedExperts, StepTime
from specray.feature_rows import ITEM_BYTES, FeatureRows
from specray.interfaces import SyncDraftEngine, SyncTargetEngine
from specray.types import (
    DraftReply,
    ItemFailed,
    SamplingParams,
    SpeculateItem,
    TargetReplies,
    TargetReply,
    UnknownSequence,
    VerifyItem,
)

COMPARED_SEQUENCES: Final = 8
"""Sequences of one row each, at most, measured with a long and a short context in turns. Rows and
sequences are the same in both, so the difference is the cost of context."""
COMPARED_BEFORE: Final = 64
"""Rows: from there on a step takes long, and what context takes must be known. Without it, steps of few
sequences with many draft tokens stand for as many rows of many sequences, which are longer (32 sequences of
220 tokens: 10 of 44 ms), and speculation promises those what it cannot keep."""
SHORT_CONTEXT_LEN: Final = 16
_LEAST_COMPARED: Final = 4
TARGET_ROWS: Final = (1, 2, 4, 8, 16, 32, 36, 64, 128)
"""Rows of the measured target steps; one size lies just beyond a block of kernel rows."""
DRAFT_ROWS: Final = (1, 2, 4, 8, 16, 32)
CONTEXT_LEN: Final = 128
"""Context tokens before the measured rows, where time allows."""
_ROWS_PER_SEQUENCE: Final = 4
"""Rows per sequence of a target step: three draft tokens and the one before them."""
_MAX_TARGET_SEQUENCES: Final = 8
"""Sequences of a target step, at most: each needs a context, a second for a 200M target on 2 cores."""
_ALIKE_ROWS: Final = 8
"""Rows of one sequence with the same token and with different ones, in turns: what experts take is seen from
how many they hit."""
_MOST_SHARE: Final = 0.98
"""Largest share of experts in a step: something else is always done."""
_DRAFT_TOKENS: Final = 4
_NUM_RUNS: Final = 2
"""Runs of each width in the first pass; the shortest counts, since disturbances only slow down."""
_NUM_PAIRS: Final = 16
"""Pairs of long and short contexts, where time allows. Their median counts: another engine that starts on
the same machine disturbs both of a pair, and hardly ever all."""
_PAIRS_SHARE: Final = 0.3
"""Share of the time budget for pairs beyond the first ones."""
_NUM_MORE_PASSES: Final = 3
"""Further passes over all widths, where time allows."""
_CONTEXT_SHARE: Final = 0.25
"""Share of the time budget for computing contexts."""
_FIRST_CHUNK: Final = 16
_LEAST_ROWS_SHARE: Final = 0.1
"""Share of a step that its rows take, at least."""


class TargetSpeed(NamedTuple):
    """What a target's steps take."""

    step_times: tuple[StepTime, ...]
    """Step times by rows, without the cost of context."""
    context_token_s: float
    """Seconds of a step per context token of its sequences."""
    experts: RoutedExperts | None
    """What the engine says of its experts, with their share in a step of one row."""


class _Workload(Protocol):
    """Sequences of one engine, all with the same context."""

    num_context_tokens: int

    @property
    def hit(self) -> Mapping[int, int]:
        """Distinct experts that the last step of each width hit; those that hit none are left out."""
        ...

    def extend(self, num_tokens: int) -> None: ...

    def fits(self, num_rows: int) -> bool: ...

    def prepare(self, num_rows: int) -> None: ...

    def step(self, num_rows: int) -> float | None:
        """Runs a step; its seconds, or None when an item failed."""
        ...

    def compare(self, clock: Callable[[], float], deadline_s: float) -> None:
        """Measures what else there is to know, when widths below COMPARED_BEFORE were measured."""
        ...


def profile_target(
    engine: SyncTargetEngine, *, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> TargetSpeed:
    """Measures Verifies of 1 to 128 rows, up to four of each sequence, 8 and 16 with 64 and 128.

    Args:
        engine: fresh; it is of no use afterwards.
        budget_s: begins no step that would end later, after the first; narrow steps come first.
        clock: seconds, for the budget.
    """
    workload = TargetWorkload(engine)
    step_times = _measure(workload, TARGET_ROWS, budget_s=budget_s, clock=clock)
    token_s = workload.context_token_s
    return TargetSpeed(
        tuple(replace(entry, seconds=workload.without_context_s(entry, token_s)) for entry in step_times),
        token_s,
        workload.experts,
    )


def profile_draft(
    engine: SyncDraftEngine, *, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[StepTime, ...]:
    """Measures what a draft token takes for 1 to 32 sequences side by side, as ``profile_target``."""
    return _measure(_DraftWorkload(engine), DRAFT_ROWS, budget_s=budget_s, clock=clock)


def _measure(
    workload: _Workload, widths: Sequence[int], *, budget_s: float, clock: Callable[[], float]
) -> tuple[StepTime, ...]:
    if budget_s <= 0:
        return ()
    started_s = clock()
    limit = workload.num_context_tokens
    workload.num_context_tokens = 0
    _fill_context(workload, limit, clock, started_s + _CONTEXT_SHARE * budget_s)
    fitting = [num_rows for num_rows in widths if workload.fits(num_rows)]
    samples = _sample(workload, fitting, clock, started_s + budget_s)
    known = [num_rows for num_rows in fitting if len(samples.get(num_rows, ())) >= _NUM_RUNS]
    # What disturbs a step only slows it down: none takes longer than a wider one.
    return tuple(
        StepTime(num_rows, min(min(samples[other]) for other in known[index:]), workload.hit.get(num_rows, 0))
        for index, num_rows in enumerate(known)
    )


def _sample(
    workload: _Workload, widths: Sequence[int], clock: Callable[[], float], deadline_s: float
) -> dict[int, list[float]]:
    """Seconds of the steps of each width: each some times in a row, then all again while time is left."""
    samples: dict[int, list[float]] = {}
    first_pass = [num_rows for num_rows in widths for _ in range(_NUM_RUNS)]
    num_before = sum(num_rows < COMPARED_BEFORE for num_rows in first_pass)
    last_s = 0.0
    for index, num_rows in enumerate((*first_pass, *(_NUM_MORE_PASSES * tuple(widths)))):
        if index == num_before:
            workload.compare(clock, deadline_s)
        expected_s = min(samples.get(num_rows, [last_s]))
        if clock() + expected_s > deadline_s:
            break
        workload.prepare(num_rows)
        seconds = workload.step(num_rows)
        if seconds is None:
            break
        samples.setdefault(num_rows, []).append(seconds)
        last_s = seconds
    return samples


def _fill_context(workload: _Workload, limit: int, clock: Callable[[], float], deadline_s: float) -> None:
    """Each chunk is as long as all before it, so it takes about twice as long as the last."""
    last_s = 0.0
    while workload.num_context_tokens < limit and clock() + 2 * last_s <= deadline_s:
        length = workload.num_context_tokens
        began_s = clock()
        workload.extend(min(max(_FIRST_CHUNK, length), limit - length))
        last_s = clock() - began_s


def _context_limit(info: EngineInfo) -> int:
    return min(CONTEXT_LEN, info.max_model_len // 2)


def _max_sequences(info: EngineInfo) -> int:
    """Sequences that fit; a block is kept for the health check."""
    longest = _context_limit(info) + 1 + _DRAFT_TOKENS
    return min(info.max_num_seqs, (info.num_blocks - 1) // -(-longest // info.block_size))


def _tokens(start: int, count: int, info: EngineInfo) -> tuple[int, ...]:
    """Some tokens, not all alike: a mixture of experts would send them all to the same."""
    return tuple((7 * position + 3) % info.vocab_size for position in range(start, start + count))


def _sampling(is_first: bool) -> SamplingParams | None:
    return SamplingParams(temperature=0.0) if is_first else None


def _is_answered(replies: Sequence[TargetReply] | Sequence[DraftReply]) -> bool:
    return not any(isinstance(reply, (ItemFailed, UnknownSequence)) for reply in replies)


class TargetWorkload:
    def __init__(self, engine: SyncTargetEngine) -> None:
        self._engine = engine
        self._info = engine.info
        self._num_sequences = 1
        self.num_context_tokens = _context_limit(self._info)
        self.context_token_s = 0.0
        """Seconds per context token; 0 until measured."""
        self.experts = self._info.experts
        self.hit: dict[int, int] = {}

    def extend(self, num_tokens: int) -> None:
        self._fill(["0"], self.num_context_tokens, num_tokens)
        self.num_context_tokens += num_tokens

    def sequences_of(self, num_rows: int) -> int:
        return -(-num_rows // self._rows_each(num_rows))

    def without_context_s(self, entry: StepTime, token_s: float) -> float:
        """What its rows took, given what a token of context takes."""
        count = self.sequences_of(entry.num_rows)
        count_s = token_s * (count + self._info.context_row_share * (entry.num_rows - count))
        context_s = self.num_context_tokens * count_s
        return max(_LEAST_ROWS_SHARE * entry.seconds, entry.seconds - context_s)

    def fits(self, num_rows: int) -> bool:
        count = self.sequences_of(num_rows)
        return count <= _max_sequences(self._info) and num_rows <= self._info.max_num_batched_tokens

    def prepare(self, num_rows: int) -> None:
        count = self.sequences_of(num_rows)
        for index in range(self._num_sequences, count):
            self._fill([str(index)], 0, self.num_context_tokens)
        self._num_sequences = max(count, self._num_sequences)

    def compare(self, clock: Callable[[], float], deadline_s: float) -> None:
        self._compare_contexts(clock, deadline_s)
        if self.experts is not None:
            self.experts = replace(self.experts, share=self._share(self.experts, clock, deadline_s))

    def _share(self, experts: RoutedExperts, clock: Callable[[], float], deadline_s: float) -> float:
        """Share of the experts in a step of one row, by steps of as many rows that hit more and fewer."""
        base_len, width = self.num_context_tokens, min(_ALIKE_ROWS, self._info.max_num_batched_tokens)
        apart = _tokens(base_len, width, self._info)
        began_s = clock()
        most_s = _PAIRS_SHARE * (deadline_s - began_s)
        ratios: list[float] = []
        fewer, more = 0.0, 0.0
        for index in range(_NUM_PAIRS):
            if index >= _NUM_RUNS and (clock() - began_s) * (1 + 1 / index) > most_s:
                break
            alike, unlike = (
                self._replies(["0"], base_len, tokens) for tokens in ((apart[0],) * width, apart)
            )
            if alike is None or unlike is None or not alike.num_experts or not unlike.num_experts:
                return 0.0
            if index:
                # The first ones choose kernels.
                ratios.append(unlike.forward_ns / max(1, alike.forward_ns))
            fewer, more = alike.num_experts / experts.num_chosen, unlike.num_experts / experts.num_chosen
        # V(more) / V(fewer) = (1 - s + s more) / (1 - s + s fewer)
        ratio = median(ratios)
        least = (more - 1) - ratio * (fewer - 1)
        return min(_MOST_SHARE, max(0.0, (ratio - 1) / least)) if more > fewer and least > 0 else 0.0

    def _compare_contexts(self, clock: Callable[[], float], deadline_s: float) -> None:
        count = min(COMPARED_SEQUENCES, self._num_sequences, _max_sequences(self._info) - self._num_sequences)
        more_len = self.num_context_tokens - SHORT_CONTEXT_LEN
        if count < _LEAST_COMPARED or more_len <= 0:
            return
        shorts = [f"short-{index}" for index in range(count)]
        self._fill(shorts, 0, SHORT_CONTEXT_LEN)
        longs = [str(index) for index in range(count)]
        began_s = clock()
        share_s = _PAIRS_SHARE * (deadline_s - began_s)
        differences: list[float] = []
        for index in range(_NUM_PAIRS):
            spent_s = clock() - began_s
            most_s = share_s if index >= _NUM_RUNS else deadline_s - began_s
            if index and spent_s + spent_s / index > most_s:
                break
            less = self._verify(shorts, SHORT_CONTEXT_LEN, 1)
            more = self._verify(longs, self.num_context_tokens, 1)
            if less is None or more is None:
                return
            differences.append(more - less)
        self._engine.release(shorts)
        if len(differences) >= _NUM_RUNS:
            self.context_token_s = max(0.0, median(differences) / (count * more_len))

    def step(self, num_rows: int) -> float | None:
        each = self._rows_each(num_rows)
        names = [str(index) for index in range(num_rows // each)]
        rows = _tokens(self.num_context_tokens, each, self._info)
        replies = self._replies(names, self.num_context_tokens, rows)
        if replies is None:
            return None
        if replies.num_experts:
            self.hit[num_rows] = replies.num_experts
        return replies.forward_ns / 1e9

    def _verify(self, request_ids: Sequence[str], base_len: int, each: int) -> float | None:
        """``each`` rows of every sequence; seconds, or None when an item failed."""
        replies = self._replies(request_ids, base_len, _tokens(base_len, each, self._info))
        return None if replies is None else replies.forward_ns / 1e9

    def _replies(
        self, request_ids: Sequence[str], base_len: int, rows: Sequence[int]
    ) -> TargetReplies | None:
        """A step of these rows of every sequence; None when an item failed."""
        token, *drafts = rows
        items = [VerifyItem(name, 0, base_len, (token,), DraftTokens(tuple(drafts))) for name in request_ids]
        replies = self._engine.verify(items)
        return replies if _is_answered(replies.replies) else None

    def _rows_each(self, num_rows: int) -> int:
        return min(num_rows, max(_ROWS_PER_SEQUENCE, num_rows // _MAX_TARGET_SEQUENCES))

    def _fill(self, request_ids: Sequence[str], base_len: int, num_tokens: int) -> None:
        tokens = _tokens(base_len, num_tokens, self._info)
        sampling = _sampling(base_len == 0)
        self._engine.verify(
            [VerifyItem(name, 0, base_len, tokens, sample=False, sampling=sampling) for name in request_ids]
        )


class _DraftWorkload:
    hit: Mapping[int, int] = MappingProxyType({})

    def __init__(self, engine: SyncDraftEngine) -> None:
        self._engine = engine
        self._info = engine.info
        self._num_sequences = 1
        self.num_context_tokens = _context_limit(self._info)

    def extend(self, num_tokens: int) -> None:
        self._fill(0, self.num_context_tokens, num_tokens)
        self.num_context_tokens += num_tokens

    def fits(self, num_rows: int) -> bool:
        return num_rows <= min(_max_sequences(self._info), self._info.max_num_batched_tokens)

    def prepare(self, num_rows: int) -> None:
        for index in range(self._num_sequences, num_rows):
            self._fill(index, 0, self.num_context_tokens)
        self._num_sequences = max(num_rows, self._num_sequences)

    def step(self, num_rows: int) -> float | None:
        token = _tokens(self.num_context_tokens, 1, self._info)
        items = [
            SpeculateItem(str(index), 0, self.num_context_tokens, token, _DRAFT_TOKENS)
            for index in range(num_rows)
        ]
        replies = self._engine.speculate(items)
        return replies.forward_ns / 1e9 / _DRAFT_TOKENS if _is_answered(replies.replies) else None

    def compare(self, clock: Callable[[], float], deadline_s: float) -> None:
        """There is nothing else to learn."""

    def _fill(self, index: int, base_len: int, num_tokens: int) -> None:
        tokens = _tokens(base_len, num_tokens, self._info)
        sampling, size = _sampling(base_len == 0), ITEM_BYTES * self._info.feature_size
        # The values of features do not change its time.
        features = FeatureRows(base_len, num_tokens, bytes(size * num_tokens)) if size else None
        item = SpeculateItem(str(index), 0, base_len, tokens, 0, sampling=sampling, features=features)
        self._engine.speculate([item])
