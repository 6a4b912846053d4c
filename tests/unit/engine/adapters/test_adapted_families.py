"""Adapters of models whose queries have a gate in their rows, or are made for latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.engine.runner.assembly import build_runner
from specray.errors import ConfigError
from tests.unit.engine.adapters.files import adapted_runner, put, target_config, write_adapter
from tests.unit.engine.adapters.test_adapted_steps import PROMPT, greedy, item
from tests.unit.engine.model.checkpoints import (
    reference_greedy,
    reference_logits,
    reference_model,
    write_family,
)
from tests.unit.engine.model.zoo import FAMILIES


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5",
        "deepseek_v3",
        # Queries of latent attention in one step; a gate beside experts.
        pytest.param("deepseek_v2", marks=pytest.mark.slow),
        pytest.param("qwen3_next", marks=pytest.mark.slow),
    ],
)
def test_logits_and_tokens_are_those_of_the_merged_model(tmp_path: Path, name: str) -> None:
    base = write_family(tmp_path / "base", FAMILIES[name])
    written = write_adapter(tmp_path / "adapters" / "x", base)
    write_adapter(tmp_path / "adapters" / "y", base, seed=9)
    runner = adapted_runner(base, tmp_path / "adapters", ("y", "x"))
    reference = reference_model(written.merged(tmp_path / "merged"))
    expected = reference_logits(reference, PROMPT)
    logits = runner.run([item(PROMPT, 0, 0, 1, len(PROMPT))]).logits
    torch.testing.assert_close(logits, expected, atol=3e-4, rtol=0)
    assert float((expected - reference_logits(reference_model(base), PROMPT)).abs().max()) > 0.05
    assert greedy(runner, 1, 12) == reference_greedy(reference, PROMPT, 12)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        (
            "qwen3_5",
            {
                "model.layers.0.linear_attn.out_proj": ", a recurrent layer's;",
                "model.layers.0.linear_attn.in_proj_qkv": ", a recurrent layer's;",
                "lm_head": ", the head;",
            },
        ),
        (
            "deepseek_v3",
            {
                "model.layers.0.self_attn.kv_b_proj": ", which latent attention absorbs;",
                "model.layers.1.mlp.shared_experts.up_proj": ", a shared expert's;",
                "model.layers.1.mlp.gate": ", a router;",
            },
        ),
    ],
)
def test_every_other_module_is_refused_by_its_name(
    tmp_path: Path, name: str, modules: dict[str, Any]
) -> None:
    base = write_family(tmp_path / "base", FAMILIES[name])
    runner = build_runner(target_config(base, tmp_path / "adapters"), role="target")
    for module, kind in modules.items():
        write_adapter(tmp_path / "adapters" / "x", base, modules=(module,))
        with pytest.raises(ConfigError, match=f"adapts {module}.weight{kind} allowed while serving"):
            put(runner, 0, "x")
