"""A head for a base with an adapter is trained on what the merged model writes and answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.cli.train.options import HeadOptions
from specray.errors import ConfigError
from specray.train.heads.loading import loaded
from specray.train.heads.methods import Medusa
from specray.train.heads.training import train_head
from tests.unit.engine.model.checkpoint.test_adapter import write_adapter
from tests.unit.train.heads.runs import begin, config

MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj")


@pytest.fixture
def base(target_path: Path, tmp_path: Path) -> Path:
    """The target in float32, so that sums are not rounded."""
    copied = shutil.copytree(target_path, tmp_path / "base")
    tensors = {name: tensor.float() for name, tensor in load_file(copied / "model.safetensors").items()}
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    return copied


@pytest.mark.slow
def test_the_adapter_counts_as_if_it_had_been_merged(base: Path, tmp_path: Path) -> None:
    tensors = write_adapter(tmp_path / "adapter", base, MODULES)
    merged = shutil.copytree(base, tmp_path / "merged")
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    adapt = HeadOptions(adapter=tmp_path / "adapter").adapt()
    heads = []
    for path, change in ((merged, None), (base, adapt), (base, None)):
        work_dir = begin(tmp_path / f"run{len(heads)}")
        train_head(Medusa(), str(path), work_dir, config(2), has_bfloat16=False, adapt=change)
        heads.append(load_file(work_dir / "medusa" / "medusa_lm_head.safetensors"))
    as_merged, adapted, plain = heads
    for name, tensor in as_merged.items():
        torch.testing.assert_close(adapted[name], tensor, rtol=0.02, atol=1e-4)
    assert any(
        not torch.allclose(plain[name], tensor, rtol=0.02, atol=1e-4) for name, tensor in as_merged.items()
    )


def test_a_model_gets_the_adapters_weights_and_what_is_no_adapter_is_refused(
    base: Path, tmp_path: Path
) -> None:
    tensors = write_adapter(tmp_path / "adapter", base, MODULES)
    adapt = HeadOptions(adapter=tmp_path / "adapter").adapt()
    model, _ = loaded(str(base), torch.float32, role="target", adapt=adapt)
    found = dict(model.named_parameters())
    for module in MODULES:
        torch.testing.assert_close(found[f"{module}.weight"].data, tensors[f"{module}.weight"])
    with pytest.raises(ConfigError, match=r"allowed: a directory with adapter_config\.json"):
        HeadOptions(adapter=tmp_path).adapt()
