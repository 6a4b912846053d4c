"""Measures recurrent layers alone: steps against copying their states, and all against torch's operators.

A step reads and writes a state of every sequence; so does a copy of half as many bytes, in turns with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from specray.bench.core.turns import medians_ms
from specray.bench.forwards import wait_for
from specray.engine.cache.state_pool import StatePool, StateRows, write_table
from specray.engine.cache.state_slots import MAX_OPEN_ROWS
from specray.engine.model.layers.delta import GatedDelta, Mixer
from specray.engine.model.operators import cpu_operators, cuda_operators
from specray.engine.runner.cuda_graphs import CudaCapture
from specray.engine.step import NUM_COLUMNS, StateShape

_BEFORE = 64
"""Tokens in the states before a step."""


@dataclass(frozen=True, slots=True)
class RecurrentLoad:
    """Sizes to measure: of Qwen3.5-35B-A3B's layers."""

    num_layers: int = 4
    num_heads: int = 32
    num_key_heads: int = 16
    head_dim: int = 128
    steps: tuple[tuple[int, int], ...] = ((1, 1), (1, 4), (1, 8), (16, 1), (16, 4), (64, 1))
    """Numbers of sequences, and of rows of each."""
    prompts: tuple[int, ...] = (64, 512, 2048)
    """Rows of one sequence that go into its state."""
    num_repeats: int = 30


TINY = RecurrentLoad(1, 2, 1, 8, ((1, 1), (2, 3)), (70,), 2)


@dataclass(frozen=True, slots=True)
class RecurrentTime:
    """Times of all layers: medians, in milliseconds."""

    kind: str
    num_sequences: int
    num_rows: int
    """Rows of each sequence."""
    ms: float
    torch_ms: float
    copy_ms: float | None
    """Milliseconds in which as many bytes of states are copied; None for prompts, which products bind."""

    @property
    def share(self) -> float | None:
        """Share of a copy's bandwidth at which a step reads and writes states."""
        return None if self.copy_ms is None else self.copy_ms / self.ms


@torch.inference_mode()
def measure(device: torch.device, workload: RecurrentLoad) -> dict[str, Any]:
    """Measures everything and returns it in the report's form."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    operators = cuda_operators(dtype, device) if device.type == "cuda" else cpu_operators(dtype, 1)
    plain = _mixer(workload, device)
    made = operators.mixer(plain)
    times = [_step(plain, made, workload, *sizes, device, dtype) for sizes in workload.steps]
    times += [_prompt(plain, made, workload, num_rows, device, dtype) for num_rows in workload.prompts]
    return {
        "sizes": asdict(workload),
        "mixer": type(made).__name__,
        "times": [{**asdict(time), "share": time.share} for time in times],
    }


def _mixer(workload: RecurrentLoad, device: torch.device) -> GatedDelta:
    heads, size = workload.num_heads, workload.head_dim
    num_channels = (2 * workload.num_key_heads + heads) * size
    shape = StateShape(heads, workload.num_key_heads, size, size, 1, num_channels, 4)
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.rand(*sizes, generator=generator).to(device)

    return GatedDelta(shape, random(4, num_channels), random(heads), random(heads), random(size), 1e-6)


def _pool(
    mixer: GatedDelta, workload: RecurrentLoad, rows: Sequence[StateRows], dtype: torch.dtype
) -> StatePool:
    """States of zeros, and a step of these rows that can be run again and again."""
    device = mixer.taps.device
    shapes = [mixer.shape] * workload.num_layers
    pool = StatePool(shapes, num_slots=len(rows), max_open=MAX_OPEN_ROWS, dtype=dtype, device=device)
    for layer in pool.layers:
        layer.fill(0.0)
    table = np.empty((len(rows), NUM_COLUMNS), dtype=np.int32)
    write_table(table, rows)
    pool.rows, pool.table = list(rows), torch.from_numpy(table).to(device)
    return pool


def _work(mixer: Mixer, pool: StatePool, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        for place in range(len(pool.layers)):
            out = mixer(rows, pool, place)
        return out

    return work


def _rows(mixer: GatedDelta, count: int, dtype: torch.dtype) -> torch.Tensor:
    width = mixer.shape.num_channels + mixer.shape.num_heads * (mixer.shape.value_dim + 2)
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1)).to(mixer.taps.device, dtype)


def _step(
    plain: GatedDelta,
    made: Mixer,
    workload: RecurrentLoad,
    num_sequences: int,
    num_rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> RecurrentTime:
    """A verify behind one of which all rows stay."""
    start = _BEFORE + num_rows
    states = [
        StateRows(index, _BEFORE, start, start, start + num_rows, index * num_rows)
        for index in range(num_sequences)
    ]
    rows = _rows(plain, num_sequences * num_rows, dtype)
    works = [_work(each, _pool(plain, workload, states, dtype), rows) for each in (made, plain)]
    if device.type == "cuda" and made.can_be_captured:
        works[0] = CudaCapture(device)(works[0])
    numbers = torch.zeros(workload.num_layers, num_sequences, plain.shape.num_state_numbers, device=device)
    other = torch.empty_like(numbers)
    works.append(lambda: other.copy_(numbers))
    ms, torch_ms, copy_ms = medians_ms(works, workload.num_repeats, num_warmup=2, wait=wait_for(device))
    return RecurrentTime("step", num_sequences, num_rows, ms, torch_ms, copy_ms)


def _prompt(
    plain: GatedDelta,
    made: Mixer,
    workload: RecurrentLoad,
    num_rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> RecurrentTime:
    states = [StateRows(0, 0, 0, num_rows, num_rows, 0)]
    rows = _rows(plain, num_rows, dtype)
    works = [_work(each, _pool(plain, workload, states, dtype), rows) for each in (made, plain)]
    ms, torch_ms = medians_ms(works, workload.num_repeats, num_warmup=2, wait=wait_for(device))
    return RecurrentTime("prompt", 1, num_rows, ms, torch_ms, None)
