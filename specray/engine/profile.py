"""What an engine's steps take, measured at its start through the head that will serve.

The router chooses K, fan-out and overlap from these times until it has measured its own. The head that is
measured is thrown away afterwards with all its sequences; weights and cache are the runner's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from specray.interfaces import DraftEngine, TargetEngine
from specray.types import (
    DraftReply,
    EngineInfo,
    ItemFailed,
    SamplingParams,
    SpeculateItem,
    StepTime,
    TargetReply,
    UnknownSequence,
    VerifyItem,
)

TARGET_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
DRAFT_ROWS: Final = (1, 2, 4, 8, 16, 32)
CONTEXT_LEN: Final = 256
"""Tokens before the measured ones, where the time allows it."""
_ROWS_PER_SEQUENCE: Final = 4
"""Of a target step: three draft tokens and the one before them."""
_DRAFT_TOKENS: Final = 4
_NUM_RUNS: Final = 2
"""Of each width at first; the least of all counts, since warm-up and whatever disturbs only slow down."""
_NUM_MORE_PASSES: Final = 3
"""Over all widths, where the time allows it."""
_CONTEXT_SHARE: Final = 0.25
"""Of the time, for computing the context."""
_FIRST_CHUNK: Final = 16


class _Workload(Protocol):
    """Sequences of one engine, all with the same context."""

    num_context_tokens: int

    def extend(self, num_tokens: int) -> None:
        """Makes the context of the first sequence longer."""
        ...

    def fits(self, num_rows: int) -> bool:
        """Whether a step of ``num_rows`` is within the engine's limits."""
        ...

    def prepare(self, num_rows: int) -> None:
        """Gets the sequences for a step of ``num_rows`` ready."""
        ...

    def step(self, num_rows: int) -> float | None:
        """Runs a step; its seconds, or None when an item failed."""
        ...


def profile_target(
    engine: TargetEngine, *, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[StepTime, ...]:
    """Measures Verifies of 1 to 64 rows, up to four of each sequence.

    Args:
        engine: fresh; it is of no use afterwards.
        budget_s: begins no step that would end later, after the first; narrow steps come first.
        clock: seconds, for the budget.
    """
    return _measure(_TargetWorkload(engine), TARGET_ROWS, budget_s=budget_s, clock=clock)


def profile_draft(
    engine: DraftEngine, *, budget_s: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[StepTime, ...]:
    """Measures what a draft token takes for 1 to 32 sequences side by side; as ``profile_target``."""
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
        StepTime(num_rows, min(min(samples[other]) for other in known[index:]))
        for index, num_rows in enumerate(known)
    )


def _sample(
    workload: _Workload, widths: Sequence[int], clock: Callable[[], float], deadline_s: float
) -> dict[int, list[float]]:
    """Seconds of the steps of each width: each some times in a row, then all again while time is left."""
    samples: dict[int, list[float]] = {}
    first_pass = [num_rows for num_rows in widths for _ in range(_NUM_RUNS)]
    last_s = 0.0
    for num_rows in (*first_pass, *(_NUM_MORE_PASSES * tuple(widths))):
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


class _TargetWorkload:
    def __init__(self, engine: TargetEngine) -> None:
        self._engine = engine
        self._info = engine.info
        self._num_sequences = 1
        self.num_context_tokens = _context_limit(self._info)

    def extend(self, num_tokens: int) -> None:
        self._fill(0, self.num_context_tokens, num_tokens)
        self.num_context_tokens += num_tokens

    def fits(self, num_rows: int) -> bool:
        count = -(-num_rows // _ROWS_PER_SEQUENCE)
        return count <= _max_sequences(self._info) and num_rows <= self._info.max_num_batched_tokens

    def prepare(self, num_rows: int) -> None:
        count = -(-num_rows // _ROWS_PER_SEQUENCE)
        for index in range(self._num_sequences, count):
            self._fill(index, 0, self.num_context_tokens)
        self._num_sequences = max(count, self._num_sequences)

    def step(self, num_rows: int) -> float | None:
        each = min(num_rows, _ROWS_PER_SEQUENCE)
        token, *drafts = _tokens(self.num_context_tokens, each, self._info)
        items = [
            VerifyItem(str(index), 0, self.num_context_tokens, (token,), tuple(drafts))
            for index in range(num_rows // each)
        ]
        replies = self._engine.verify(items)
        return replies.forward_ns / 1e9 if _is_answered(replies.replies) else None

    def _fill(self, index: int, base_len: int, num_tokens: int) -> None:
        tokens = _tokens(base_len, num_tokens, self._info)
        sampling = _sampling(base_len == 0)
        self._engine.verify([VerifyItem(str(index), 0, base_len, tokens, sample=False, sampling=sampling)])


class _DraftWorkload:
    def __init__(self, engine: DraftEngine) -> None:
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

    def _fill(self, index: int, base_len: int, num_tokens: int) -> None:
        tokens = _tokens(base_len, num_tokens, self._info)
        sampling = _sampling(base_len == 0)
        self._engine.speculate([SpeculateItem(str(index), 0, base_len, tokens, 0, sampling=sampling)])
