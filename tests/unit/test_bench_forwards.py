"""The forward bench counts what it says it counts."""

from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from rich.console import Console

from specray.bench.forwards import ForwardCost, forwards_table, measure_forwards
from specray.config import EngineConfig
from specray.engine.runner import ModelRunner, build_runner
from specray.errors import ConfigError


def runner_of(path: Path, name: str) -> ModelRunner:
    config = EngineConfig(
        model=str(write_checkpoint(path, name)), dtype="float32", device="cpu", num_threads=1, block_size=16
    )
    return build_runner(config, role="target")


def test_one_cost_per_width_over_all_weights_of_the_linear_layers(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    costs = measure_forwards(
        runner_of(tmp_path, "llama"),
        rows=(1, 3),
        context_len=20,
        num_repeats=2,
        progress=lambda done, total: told.append((done, total)),
    )
    assert [cost.num_rows for cost in costs] == [1, 3]
    assert told == [(1, 2), (2, 2)]
    # Two layers of q, k, v (64 rows), output, gate, up and down, and the head; hidden size 32, float32.
    parameters = 2 * (64 * 32 + 32 * 32 + 3 * 48 * 32) + 96 * 32
    assert {cost.weight_bytes for cost in costs} == {4 * parameters}
    assert all(cost.forward_ms > 0 and cost.bound_ms > 0 for cost in costs)


def test_ratio_and_bandwidth() -> None:
    cost = ForwardCost(num_rows=1, forward_ms=3.0, bound_ms=2.0, weight_bytes=40_000_000)
    assert (cost.ratio, cost.bandwidth_gb_s) == (1.5, 20.0)
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(forwards_table([cost], title="a model"))
    assert "3.000" in capture.get() and "1.50" in capture.get() and "20.0" in capture.get()


def test_context_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"context_len is 125; allowed: 0\.\.124"):
        measure_forwards(runner_of(tmp_path, "llama"), rows=(1, 4), context_len=125)


def test_generic_forward_has_no_bound(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is generic; measured is only 'lowered'"):
        measure_forwards(runner_of(tmp_path, "gpt2"), context_len=8)
