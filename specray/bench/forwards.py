"""How far a forward is from the least it can cost: reading every weight once.

The bound is measured, not computed from a data sheet: the decoder's linear layers alone, in the same process,
in turns with the whole forward, so that a busy machine slows both. What is above the bound is attention,
norms, rotary positions and the interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.table import Table

from specray.engine.inputs import SequenceInput
from specray.engine.linear import Weights
from specray.engine.lowered import LoweredForward
from specray.engine.runner import ModelRunner
from specray.errors import ConfigError

ROWS = (1, 2, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """One width of a forward. Medians over the repetitions."""

    num_rows: int
    forward_ms: float
    bound_ms: float
    """The linear layers alone."""
    weight_bytes: int

    @property
    def ratio(self) -> float:
        """Forward over bound; 1 is unreachable."""
        return self.forward_ms / self.bound_ms

    @property
    def bandwidth_gb_s(self) -> float:
        """10^9 bytes of weights per second that the linear layers alone read."""
        return self.weight_bytes / self.bound_ms / 1e6


def measure_forwards(
    runner: ModelRunner,
    *,
    rows: Sequence[int] = ROWS,
    context_len: int = 256,
    num_repeats: int = 50,
    progress: Callable[[int, int], None] | None = None,
) -> list[ForwardCost]:
    """Measures one sequence's forward of each width after ``context_len`` tokens.

    Args:
        progress: told after each width how many of how many are done.

    Raises:
        ConfigError: the runner's forward is not the lowered one, or the sequence would be too long.
    """
    forward = runner.forward
    if not isinstance(forward, LoweredForward):
        raise ConfigError(
            f"the forward of {runner.info.model_name} is {forward.name}; measured is only 'lowered'"
        )
    longest = context_len + max(rows)
    if longest > runner.info.max_model_len:
        raise ConfigError(
            f"context_len is {context_len}; allowed: 0..{runner.info.max_model_len - max(rows)}"
        )
    block_ids = range(-(-longest // runner.info.block_size))
    linears = forward.linears()
    costs = []
    for done, num_rows in enumerate(rows, start=1):
        step = [SequenceInput(range(2, 2 + num_rows), context_len, block_ids, num_rows)]
        inputs = [torch.ones(num_rows, x.in_features, dtype=runner.info.dtype) for x in linears]
        forward_ms, bound_ms = _medians_ms(
            lambda step=step: runner.run(step),  # type: ignore[misc]
            lambda inputs=inputs: _run_linears(linears, inputs),  # type: ignore[misc]
            num_repeats,
        )
        weight_bytes = sum(x.num_weights for x in linears) * runner.info.dtype.itemsize
        costs.append(ForwardCost(num_rows, forward_ms, bound_ms, weight_bytes))
        if progress is not None:
            progress(done, len(rows))
    return costs


def forwards_table(costs: Sequence[ForwardCost], *, title: str) -> Table:
    """The costs for people."""
    table = Table(title=title, caption="bound: the linear layers alone, in the same run")
    for heading in ("rows", "forward ms", "bound ms", "ratio", "weights GB/s"):
        table.add_column(heading, justify="right")
    for cost in costs:
        table.add_row(
            str(cost.num_rows),
            f"{cost.forward_ms:.3f}",
            f"{cost.bound_ms:.3f}",
            f"{cost.ratio:.2f}",
            f"{cost.bandwidth_gb_s:.1f}",
        )
    return table


@torch.inference_mode()
def _run_linears(linears: Sequence[Weights], inputs: Sequence[torch.Tensor]) -> None:
    for linear, rows in zip(linears, inputs, strict=True):
        linear(rows)


def _medians_ms(
    first: Callable[[], object], second: Callable[[], object], num_repeats: int
) -> tuple[float, float]:
    """Both in turns, after a tenth as many repetitions to warm up."""
    durations: tuple[list[float], list[float]] = ([], [])
    for repeat in range(-(num_repeats // 10) - 1, num_repeats):
        for call, kept in zip((first, second), durations, strict=True):
            began = time.perf_counter()
            call()
            if repeat >= 0:
                kept.append((time.perf_counter() - began) * 1e3)
    return statistics.median(durations[0]), statistics.median(durations[1])
