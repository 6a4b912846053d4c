"""Measures what ``target.deterministic: on`` costs, and whether a row's bits are the same in any step.

The engine is built with the setting off and on, one after the other, and runs the same steps as it does for
requests.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from specray.bench.core.turns import medians_ms
from specray.bench.forwards import wait_for
from specray.config import TargetConfig
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median time of one step, and its bits."""

    num_sequences: int
    width: int
    """Rows per sequence."""
    off_ms: float
    on_ms: float
    off_equal: int
    """Rows of the first sequence whose logits have the bits that a step of that sequence alone gives them."""
    on_equal: int

    @property
    def ratio(self) -> float:
        return self.on_ms / self.off_ms


@dataclass(frozen=True, slots=True)
class DeterminismLoad:
    """Sizes and repetitions to measure."""

    batches: tuple[int, ...] = (1, 4, 16)
    widths: tuple[int, ...] = (1, 5)
    context_len: int = 256
    prompt_len: int = 512
    num_repeats: int = 20


TINY = DeterminismLoad(batches=(1, 2), widths=(1, 3), context_len=24, prompt_len=40, num_repeats=2)


def measure(config: TargetConfig, workload: DeterminismLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form.

    Raises:
        ConfigError: the model cannot be loaded, or cannot be deterministic.
    """
    shapes = [(count, width) for count in workload.batches for width in workload.widths]
    shapes.append((1, workload.prompt_len))
    measured = {}
    for setting in ("off", "on"):
        runner = build_runner(config.model_copy(update={"deterministic": setting}), role="target")
        _fill(runner, workload)
        measured[setting] = [_measured(runner, *shape, workload) for shape in shapes]
        attention = runner.info.attention
        del runner
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    times = [
        StepTime(*shape, off[0], on[0], off[1], on[1])
        for shape, off, on in zip(shapes, measured["off"], measured["on"], strict=True)
    ]
    return {"attention": attention, "times": [{**asdict(each), "ratio": each.ratio} for each in times]}


def _fill(runner: ModelRunner, workload: DeterminismLoad) -> None:
    """Writes contexts of several tokens into the cache, one sequence after the other."""
    for index in range(max(workload.batches)):
        tokens = [2 + (7 * index + place) % 50 for place in range(workload.context_len)]
        runner.run([SequenceInput(tokens, 0, _table(runner, index, workload), 1)])


def _table(runner: ModelRunner, index: int, workload: DeterminismLoad) -> range:
    tokens = workload.context_len + max(*workload.widths, workload.prompt_len)
    count = -(-tokens // runner.info.block_size)
    return range(index * count, (index + 1) * count)


def _measured(runner: ModelRunner, count: int, width: int, workload: DeterminismLoad) -> tuple[float, int]:
    """Milliseconds of a step, and rows of its first sequence with the bits of rows that come one by one."""
    tokens = [3 + place % 40 for place in range(width)]
    start = workload.context_len
    step = [SequenceInput(tokens, start, _table(runner, index, workload), width) for index in range(count)]
    device = runner.info.device
    [ms] = medians_ms([partial(runner.run, step)], workload.num_repeats, num_warmup=3, wait=wait_for(device))
    found = runner.run(step).logits[:width].clone()
    equal = 0
    for place in range(width):
        alone = [SequenceInput(tokens[place : place + 1], start + place, step[0].block_ids, 1)]
        equal += torch.equal(runner.run(alone).logits[0], found[place])
    return ms, equal
