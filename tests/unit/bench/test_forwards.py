"""Tests of the forward benchmark's counts."""

from pathlib import Path

import pytest
from rich.console import Console

from specray.bench.forwards import (
    ForwardCost,
    drafting_table,
    forwards_table,
    measure_drafting,
    measure_forwards,
    measure_in_turns,
)
from specray.bench.quantization import build_runners
from specray.config import EngineConfig, parse_config
from specray.engine.build import build_draft_engine
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import write_checkpoint


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
    assert [(cost.num_sequences, cost.num_rows) for cost in costs] == [(1, 1), (1, 3)]
    assert told == [(1, 2), (2, 2)]
    # Two layers of q, k, v (64 rows), output, gate, up and down, and the head; hidden size 32, float32.
    parameters = 2 * (64 * 32 + 32 * 32 + 3 * 48 * 32) + 96 * 32
    assert {cost.weight_bytes for cost in costs} == {4 * parameters}
    assert all(cost.forward_ms > 0 and cost.bound_ms > 0 for cost in costs)


def test_share_and_bandwidth() -> None:
    cost = ForwardCost(num_sequences=7, num_rows=1, forward_ms=2.5, bound_ms=2.0, weight_bytes=40_000_000)
    assert (cost.share, cost.bandwidth_gb_s) == (0.8, 20.0)
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(forwards_table([cost], title="a model"))
    assert all(text in capture.get() for text in ("7", "2.500", "0.80", "20.0"))


def test_sequences_side_by_side_that_the_cache_has_no_room_for(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, "llama")
    (cost,) = measure_forwards(runner, rows=(2,), num_sequences=3, context_len=20, num_repeats=1)
    assert (cost.num_sequences, cost.num_rows) == (3, 2)
    with pytest.raises(ConfigError, match=r"num_sequences is 1000; allowed: 1\.\.\d+"):
        measure_forwards(runner, rows=(2,), num_sequences=1000, context_len=20)


@pytest.mark.slow
def test_drafting_measures_rounds_that_grow(tmp_path: Path) -> None:
    """And leaves no block in use."""
    path = write_checkpoint(tmp_path, "llama")
    engine = build_draft_engine(
        parse_config({"draft": {"model": str(path), "dtype": "float32", "num_threads": 1}})
    )
    cost = measure_drafting(
        engine, num_sequences=2, temperature=0.7, num_tokens=3, context_len=10, num_repeats=4
    )
    assert (cost.num_sequences, cost.num_tokens, cost.temperature) == (2, 3, 0.7)
    assert cost.step_ms == cost.round_ms / 3 > 0
    assert engine.info.num_blocks_in_use == 0
    with pytest.raises(ConfigError, match=r"num_repeats 400: the sequences would have \d+ tokens"):
        measure_drafting(engine, num_sequences=1, num_repeats=400)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(drafting_table([cost], title="a draft"))
    assert "0.7" in capture.get()


def test_context_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"context_len is 125; allowed: 0\.\.124"):
        measure_forwards(runner_of(tmp_path, "llama"), rows=(1, 4), context_len=125)


def test_hf_forward_has_no_bound(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is hf; measured is only 'decoder'"):
        measure_forwards(runner_of(tmp_path, "gpt2"), context_len=8)


@pytest.mark.slow
def test_formats_in_turns(tmp_path: Path) -> None:
    """Each with the bytes that its weights take, and its time beside the first one's."""
    path = write_checkpoint(tmp_path, "llama", intermediate_size=64)
    engine = EngineConfig(model=str(path), dtype="float32", device="cpu", num_threads=1, block_size=16)
    runners = build_runners(engine, ["none", "int4:int8", "none"], "target")
    costs = measure_in_turns(runners, rows=(1, 2), context_len=20, num_repeats=2)
    plain, mixed = "float32", "float32 int4 layers int8 lm_head"
    assert [(cost.number_format, cost.num_rows) for cost in costs] == [
        (plain, 1),
        (mixed, 1),
        (plain, 2),
        (mixed, 2),
    ]
    layers, head = 2 * (64 * 32 + 32 * 32 + 3 * 64 * 32), 96 * 32
    assert costs[0].weight_bytes == 4 * (layers + head)
    assert costs[1].weight_bytes == layers * 20 // 32 + head * 34 // 32
    assert costs[1].times_faster == costs[0].forward_ms / costs[1].forward_ms
    assert (costs[0].times_faster, costs[2].times_faster) == (1.0, 1.0)
    console = Console(width=150)
    with console.capture() as capture:
        console.print(forwards_table(costs, title="a model"))
    assert mixed in capture.get() and "times faster" in capture.get()
