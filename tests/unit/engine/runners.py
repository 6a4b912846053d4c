"""Runners over checkpoints on the CPU, and engines over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from specray.config import EngineConfig, TargetConfig
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.cuda_graphs import GraphedForward, run_again
from specray.engine.runner.runner import ModelRunner
from specray.engine.target.engine import TargetEngine
from specray.engine_info import EngineInfo
from tests.unit.engine.harness import engine_info


def cpu_config(model: Path | str, **changes: Any) -> EngineConfig:
    """In float32 on one thread, unless the changes say otherwise."""
    values = {"model": str(model), "dtype": "float32", "device": "cpu", "num_threads": 1, **changes}
    kind = TargetConfig if "snapshot_memory_gib" in changes else EngineConfig
    return kind.model_validate(values)


def cpu_runner(model: Path | str, *, role: str = "target", **changes: Any) -> ModelRunner:
    return build_runner(cpu_config(model, **changes), role=role)


def eager(runner: ModelRunner) -> ModelRunner:
    """The same weights and cache, without graphs of the CPU."""
    return ModelRunner(runner.forward, runner.cache, runner.info, records=False)


def graphed(runner: ModelRunner) -> tuple[ModelRunner, GraphedForward]:
    """The same weights and cache with captured forwards, which a CPU runs again."""
    max_model_len = runner.info.max_model_len
    graphs = GraphedForward(runner.forward, runner.cache, max_model_len=max_model_len, capture=run_again)
    return ModelRunner(runner.forward, runner.cache, runner.info, graphs=graphs), graphs


def info_of(runner: ModelRunner, role: str = "target", **changes: int) -> EngineInfo:
    """With the runner's vocabulary and cache; limits are those of toy engines or ``changes``."""
    own = runner.info
    sizes = {"vocab_size": own.vocab_size, "block_size": own.block_size, "num_blocks": own.num_blocks}
    return engine_info(role, **{**sizes, **changes})


def target_over(runner: ModelRunner, **changes: int) -> TargetEngine:
    """A target that holds nothing yet."""
    return TargetEngine(runner, info_of(runner, **changes), device=torch.device("cpu"))
