"""Measures how far a forward is from the least it can cost, and what a draft token costs.

The bound is reading every weight once. It is measured, not computed from a data sheet: the decoder's linear
layers alone, in the same process, in turns with the whole forward, so that a busy machine slows both. The
rest of a forward is attention, norms, rotary positions and the interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.table import Table

from specray.bench.core.report import number, table_of
from specray.bench.core.turns import medians_ms
from specray.engine.inputs import SequenceInput
from specray.engine.model.decoder import DecoderForward
from specray.engine.model.linear import Weights
from specray.engine.runner.runner import ModelRunner, RunnerInfo
from specray.errors import ConfigError
from specray.interfaces import SyncDraftEngine
from specray.types import SamplingParams, SpeculateItem

ROWS = (1, 2, 4, 6, 8, 16, 64, 256)


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """Times of forwards of one width; medians over the repetitions."""

    num_sequences: int
    num_rows: int
    """Rows per sequence."""
    forward_ms: float
    bound_ms: float
    """Milliseconds of the linear layers alone."""
    weight_bytes: int
    number_format: str = ""
    """Formats of the weights and of the computation."""
    times_faster: float = 1.0
    """Forward of the first model measured beside this one, in the same width, over this forward."""

    @property
    def share(self) -> float:
        """Bound over forward: the share of the time in which weights are read; 1 is unreachable."""
        return self.bound_ms / self.forward_ms

    @property
    def bandwidth_gb_s(self) -> float:
        """Speed in 10^9 bytes/s at which the linear layers alone read their weights."""
        return self.weight_bytes / self.bound_ms / 1e6


def measure_forwards(
    runner: ModelRunner,
    *,
    rows: Sequence[int] = ROWS,
    num_sequences: int = 1,
    context_len: int = 256,
    num_repeats: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> list[ForwardCost]:
    """Measures a forward of each width after ``context_len`` tokens; see :func:`measure_in_turns`."""
    return measure_in_turns(
        [runner],
        rows=rows,
        num_sequences=num_sequences,
        context_len=context_len,
        num_repeats=num_repeats,
        progress=progress,
    )


def measure_in_turns(
    runners: Sequence[ModelRunner],
    *,
    rows: Sequence[int] = ROWS,
    num_sequences: int = 1,
    context_len: int = 256,
    num_repeats: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> list[ForwardCost]:
    """Measures forwards of several runners, in turns, in each width after ``context_len`` tokens.

    Args:
        runners: one for each model, or form of a model; all costs of a width follow each other.
        rows: rows per sequence, one number for each width.
        num_sequences: equal sequences in the batch.
        context_len: tokens of each sequence in the KV cache.
        num_repeats: measurements per width.
        progress: called after each width with how many of how many are done.

    Raises:
        ConfigError: a runner's forward is not the decoder, a sequence would be too long, or the cache
            has no room for them all.
    """
    measured = [
        _Measured(
            runner, num_sequences=num_sequences, context_len=context_len, longest=context_len + max(rows)
        )
        for runner in runners
    ]
    costs = []
    for done, num_rows in enumerate(rows, start=1):
        calls = [call for one in measured for call in one.calls(num_rows)]
        medians = medians_ms(
            calls, num_repeats, num_warmup=num_repeats // 10 + 1, wait=wait_for(runners[0].info.device)
        )
        for index, one in enumerate(measured):
            forward_ms, bound_ms = medians[2 * index : 2 * index + 2]
            costs.append(
                ForwardCost(
                    num_sequences,
                    num_rows,
                    forward_ms,
                    bound_ms,
                    sum(x.num_bytes for x in one.linears),
                    one.runner.info.number_format,
                    medians[0] / forward_ms,
                )
            )
        if progress is not None:
            progress(done, len(rows))
    return costs


class _Measured:
    """A runner, and what of it is measured. Raises as :func:`measure_in_turns`."""

    def __init__(self, runner: ModelRunner, *, num_sequences: int, context_len: int, longest: int) -> None:
        self.runner, self._num_sequences, self._context_len = runner, num_sequences, context_len
        info, forward = runner.info, runner.forward
        if not isinstance(forward, DecoderForward):
            raise ConfigError(
                f"the forward of {info.model_name} is {forward.name}; measured is only 'decoder'"
            )
        if longest > info.max_model_len:
            most = info.max_model_len - longest + context_len
            raise ConfigError(f"context_len is {context_len}; allowed: 0..{most}")
        num_blocks = -(-longest // info.block_size)
        if num_sequences * num_blocks > info.num_blocks:
            raise ConfigError(
                f"num_sequences is {num_sequences}; allowed: 1..{info.num_blocks // num_blocks}"
            )
        self._blocks = [range(i * num_blocks, (i + 1) * num_blocks) for i in range(num_sequences)]
        self.linears = forward.linears()

    def calls(self, num_rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
        """A forward of so many rows per sequence, and its linear layers alone."""
        info = self.runner.info
        step = [SequenceInput([2] * num_rows, self._context_len, ids, num_rows) for ids in self._blocks]
        inputs = inputs_of(self.linears, self._num_sequences * num_rows, info)
        return partial(self.runner.run, step), partial(run_linears, self.linears, inputs)


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Cost of one draft token in a whole draft engine."""

    num_sequences: int
    num_tokens: int
    """Draft tokens per round, K."""
    temperature: float
    round_ms: float
    """Median milliseconds of a round: keep, append two tokens, draft K."""

    @property
    def step_ms(self) -> float:
        """Milliseconds per forward of the round."""
        return self.round_ms / self.num_tokens


def measure_drafting(
    engine: SyncDraftEngine,
    *,
    num_sequences: int,
    temperature: float = 0.0,
    num_tokens: int = 4,
    context_len: int = 256,
    num_repeats: int = 50,
) -> DraftCost:
    """Measures rounds of a draft engine after ``context_len`` tokens; each round appends two tokens.

    Raises:
        ConfigError: the sequences would become too long.
    """
    num_rounds = num_repeats + num_repeats // 10 + 1
    longest = context_len + 2 * num_rounds + num_tokens
    if longest > engine.info.max_model_len:
        raise ConfigError(
            f"context_len is {context_len} and num_repeats {num_repeats}: the sequences would have {longest} "
            f"tokens; allowed: {engine.info.max_model_len}"
        )
    ids = [f"bench-{index}" for index in range(num_sequences)]
    sampling = SamplingParams(temperature=temperature, num_prompt_tokens=context_len)
    prompt = (2,) * context_len
    engine.speculate([SpeculateItem(i, 0, 0, prompt, 0, sampling=sampling) for i in ids])
    durations = []
    for index in range(num_rounds):
        base_len = context_len + 2 * index
        items = [SpeculateItem(i, index + 1, base_len, (2, 3), num_tokens) for i in ids]
        began = time.perf_counter()
        engine.speculate(items)
        durations.append((time.perf_counter() - began) * 1e3)
    engine.release(ids)
    return DraftCost(num_sequences, num_tokens, temperature, statistics.median(durations[-num_repeats:]))


def drafting_table(costs: Sequence[DraftCost], *, title: str) -> Table:
    columns: dict[str, Callable[[DraftCost], object]] = {
        "sequences": lambda cost: cost.num_sequences,
        "temperature": lambda cost: f"{cost.temperature:g}",
        "draft tokens": lambda cost: cost.num_tokens,
        "round ms": lambda cost: number(cost.round_ms, 3),
        "ms per token": lambda cost: number(cost.step_ms, 3),
    }
    return table_of(title, columns, costs, caption="rounds of a whole draft engine")


def forwards_table(costs: Sequence[ForwardCost], *, title: str) -> Table:
    """Makes a table of the costs; with several formats, it compares them with the first."""
    columns: dict[str, Callable[[ForwardCost], object]] = {
        "format": lambda cost: cost.number_format,
        "sequences": lambda cost: cost.num_sequences,
        "rows each": lambda cost: cost.num_rows,
        "forward ms": lambda cost: number(cost.forward_ms, 3),
        "bound ms": lambda cost: number(cost.bound_ms, 3),
        "bound share": lambda cost: cost.share,
        "weights GB/s": lambda cost: number(cost.bandwidth_gb_s, 1),
        "times faster": lambda cost: cost.times_faster,
    }
    if len({cost.number_format for cost in costs}) == 1:
        del columns["format"], columns["times faster"]
    return table_of(title, columns, costs, caption="bound: the linear layers alone, in the same run")


def wait_for(device: torch.device) -> Callable[[], None]:
    """What waits until a device has done all that it was asked for."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def inputs_of(linears: Sequence[Weights], num_rows: int, info: RunnerInfo) -> list[torch.Tensor]:
    """Rows for each of the linear layers."""
    return [torch.ones(num_rows, x.in_features, dtype=info.dtype, device=info.device) for x in linears]


@torch.inference_mode()
def run_linears(linears: Sequence[Weights], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Runs the linear layers alone; returns the last one's output."""
    for linear, rows in zip(linears, inputs, strict=True):
        output = linear(rows)
    return output
