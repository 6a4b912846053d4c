"""What adapters cost a step: several of them beside one, none, and a model that knows none, in turns."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from safetensors.torch import save_file

from specray.bench.core.report import number, table_of
from specray.bench.core.turns import medians_ms
from specray.bench.forwards import wait_for
from specray.config import AdaptersConfig, TargetConfig
from specray.engine.inputs import SequenceInput
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdapterCost:
    """Median time of a step."""

    num_rows: int
    num_adapters: int | None
    """Adapters of its rows, in turns; None: the model knows none."""
    rank: int
    step_ms: float
    times: float
    """Step over that of the model that knows none."""


def measure_adapters(
    config: TargetConfig,
    directory: Path,
    *,
    num_rows: Sequence[int],
    num_adapters: Sequence[int],
    rank: int,
    context_len: int,
    num_repeats: int,
) -> list[AdapterCost]:
    """Measures steps of one row for each sequence, after ``context_len`` tokens.

    Args:
        config: of the target, without adapters.
        directory: where random adapters are written.
        num_rows: sequences of a step, one number for each measurement.
        num_adapters: different adapters of a step's rows.
        rank: of all projections of attention and MLPs.

    Raises:
        ConfigError: the model takes no adapters, or has no room for the sequences.
    """
    most = max(1, *num_adapters)
    settings = AdaptersConfig(directory=str(directory), max_rank=rank, max_loaded=most, max_per_step=1)
    own = config.model_copy(update={"max_num_seqs": max(num_rows), "adapters": settings})
    adapted = build_runner(own, role="target")
    assert adapted.adapters is not None, "the configuration has some"
    # Over the same weights, which are in no cache twice.
    plain = ModelRunner(adapted.forward, adapted.cache, adapted.info, graphs=adapted.graphs)
    for slot in range(most):
        _write_random(directory / str(slot), adapted.adapters.pool.weight_shapes(), rank, slot)
        reading = adapted.adapters.start(str(slot), b"")
        reading.read()
        adapted.adapters.put(slot, reading)
    costs = []
    for rows in num_rows:
        arms: list[tuple[ModelRunner, int | None]] = [(plain, None), *((adapted, n) for n in num_adapters)]
        calls = [
            partial(runner.run, _step(runner, rows, context_len, number_of or 0))
            for runner, number_of in arms
        ]
        medians = medians_ms(
            calls, num_repeats, num_warmup=num_repeats // 10 + 4, wait=wait_for(plain.info.device)
        )
        costs += [
            AdapterCost(rows, number_of, rank, median, median / medians[0])
            for (_, number_of), median in zip(arms, medians, strict=True)
        ]
    return costs


def _step(runner: ModelRunner, num_rows: int, context_len: int, num_adapters: int) -> list[SequenceInput]:
    num_blocks = -(-(context_len + 1) // runner.info.block_size)
    if num_rows * num_blocks > runner.info.num_blocks or context_len >= runner.info.max_model_len:
        raise ConfigError(
            f"context_len is {context_len} and num_rows {num_rows}; allowed: what fits the cache"
        )
    return [
        SequenceInput(
            [2],
            context_len,
            range(index * num_blocks, (index + 1) * num_blocks),
            1,
            adapter_slot=index % num_adapters if num_adapters else -1,
        )
        for index in range(num_rows)
    ]


def _write_random(folder: Path, shapes: Mapping[str, tuple[int, ...]], rank: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out_features, in_features) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for kind, size in (("A", (rank, in_features)), ("B", (out_features, rank))):
            tensors[f"{module}.lora_{kind}.weight"] = (torch.randn(size, generator=random) / 64).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(values))


def adapters_table(costs: Sequence[AdapterCost], *, title: str) -> Table:
    """Makes a table of the costs."""
    columns: dict[str, Callable[[AdapterCost], object]] = {
        "rows": lambda cost: cost.num_rows,
        "adapters": lambda cost: "knows none" if cost.num_adapters is None else cost.num_adapters,
        "step ms": lambda cost: number(cost.step_ms, 3),
        "times": lambda cost: number(cost.times, 3),
    }
    return table_of(title, columns, costs, caption="times: of the step of the model that knows none")
