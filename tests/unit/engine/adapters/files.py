"""Adapters of tiny checkpoints, as peft writes them, and the checkpoints with them merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specray.config import TargetConfig
from specray.engine.runner.assembly import build_runner
from specray.engine.runner.runner import ModelRunner
from specray.engine.target.engine import TargetEngine

CONFIG: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": 8, "bias": "none", "init_lora_weights": True}


_UNCHANGED = ("expert", "linear_attn", "kv_b_proj")
"""Parts of names of modules that adapters may not change."""


def projections(base: Path) -> tuple[str, ...]:
    """Modules that adapters may change while the model serves."""
    names = load_file(base / "model.safetensors")
    return tuple(
        name.removesuffix(".weight")
        for name in names
        if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))
        and not any(part in name for part in _UNCHANGED)
    )


@dataclass(frozen=True)
class Written:
    """An adapter's folder."""

    folder: Path
    base: Path
    added: Mapping[str, torch.Tensor]
    """What it adds to weights, by their names."""

    def merged(self, directory: Path) -> Path:
        """The base with the adapter in its weights."""
        shutil.copytree(self.base, directory)
        weights = load_file(self.base / "model.safetensors")
        for name, added in self.added.items():
            weights[name] = weights[name] + added
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return directory


def write_adapter(
    folder: Path,
    base: Path,
    *,
    rank: int = 3,
    seed: int = 0,
    modules: tuple[str, ...] | None = None,
    part: str = "",
    **config: Any,
) -> Written:
    """Writes a random adapter.

    Args:
        modules: None: all that may be changed while the model serves.
        part: of the tensors' names, which some trainers leave there.
    """
    random = torch.Generator().manual_seed(seed)
    weights = load_file(base / "model.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    added: dict[str, torch.Tensor] = {}
    values = {**CONFIG, "r": rank, **config}
    scale = values["lora_alpha"] / (rank**0.5 if values.get("use_rslora") else rank)
    for module in projections(base) if modules is None else modules:
        out_features, in_features = weights[f"{module}.weight"].shape
        down = torch.randn(rank, in_features, generator=random) / 8
        up = torch.randn(out_features, rank, generator=random) / 8
        name = f"base_model.model.{module}"
        tensors |= {f"{name}.lora_A{part}.weight": down, f"{name}.lora_B{part}.weight": up}
        added[f"{module}.weight"] = scale * (up @ down)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return Written(folder, base, added)


def target_config(base: Path, directory: Path, **changes: Any) -> TargetConfig:
    """With adapters of that directory, in float32 on one thread."""
    adapters = {"directory": str(directory), "max_rank": 8, **changes.pop("adapters", {})}
    values = {
        "model": str(base),
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "max_num_seqs": 9,
        "adapters": adapters,
    }
    return TargetConfig.model_validate({**values, **changes})


def adapted_runner(base: Path, directory: Path, names: tuple[str, ...], **changes: Any) -> ModelRunner:
    """A runner with some adapters of a directory, in the slots from 0 on."""
    runner = build_runner(target_config(base, directory, **changes), role="target")
    for slot, name in enumerate(names):
        put(runner, slot, name)
    return runner


def put(runner: ModelRunner, slot: int, name: str) -> None:
    """Gives a slot the adapter of a folder. Raises ConfigError, with which nothing has changed."""
    assert runner.adapters is not None
    reading = runner.adapters.start(name, b"")
    reading.read()
    runner.adapters.put(slot, reading)


def load(engine: TargetEngine, folder: str, digest: bytes = b"") -> bytes:
    """Loads an adapter into a target."""
    loading = engine.start_loading(folder, digest)
    loading.read()
    return loading.place()
