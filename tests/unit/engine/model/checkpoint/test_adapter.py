"""LoRA adapters are merged into the weights of either forward, or refused with one sentence."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.config import TargetConfig
from specray.engine.inputs import SequenceInput
from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.description import ModelArgs, check_loadable
from specray.engine.model.loader import DecoderSource, load_model
from specray.engine.runner.assembly import build_runner
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import (
    changing_tensors,
    reference_logits,
    reference_model,
    write_checkpoint,
)

CPU = torch.device("cpu")
RANK, ALPHA = 3, 8
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": ALPHA,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "init_lora_weights": True,
    "modules_to_save": None,
    "use_dora": False,
    "alpha_pattern": {},
    "lora_dropout": 0.05,
    # What peft writes of an adapter that has nothing to do with it.
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "loftq_config": {},
    "ensure_weight_tying": False,
    "qalora_group_size": 16,
    "base_model_name_or_path": "some/base",
}
QUERY, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"


def write_adapter(
    directory: Path,
    base: Path,
    modules: tuple[str, ...] = (QUERY, DOWN),
    *,
    prefix: str = "",
    scales: dict[str, float] | None = None,
    **config: Any,
) -> dict[str, torch.Tensor]:
    """Writes a random adapter; returns the base's weights with it.

    Args:
        prefix: of the names in the base that the adapter's lack.
        scales: factors of each module; None: alpha over rank.
    """
    merged, tensors = load_file(base / "model.safetensors"), {}
    random = torch.Generator().manual_seed(5)
    for module in modules:
        out_features, in_features = merged[f"{module}.weight"].shape
        down = torch.randn(RANK, in_features, generator=random) / 4
        up = torch.randn(out_features, RANK, generator=random) / 4
        stored = f"base_model.model.{module.removeprefix(prefix)}"
        tensors |= {f"{stored}.lora_A.weight": down, f"{stored}.lora_B.weight": up}
        merged[f"{module}.weight"] += (scales or {}).get(module, ALPHA / RANK) * (up @ down)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({**CONFIG, **config}))
    return merged


def source(base: Path, adapter: Path, **options: Any) -> Any:
    args = ModelArgs(str(base), role="target", adapter=str(adapter), **options)
    check_loadable(args)
    return load_model(args, dtype=torch.float32, device=CPU).source


def refusal(base: Path, adapter: Path, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_loadable(ModelArgs(str(base), role="target", adapter=str(adapter), **options))
    message = str(caught.value)
    assert message.startswith("target.adapter ") and str(adapter) in message and "\n" not in message
    return message


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama-biased-scaled")


def test_weights_of_the_decoder_whole_and_in_parts(tmp_path: Path, llama: Path) -> None:
    merged = write_adapter(tmp_path, llama)
    found = source(llama, tmp_path)
    assert isinstance(found, DecoderSource)
    for name, expected in merged.items():
        torch.testing.assert_close(found.weights.take(name), expected, atol=1e-6, rtol=1e-6)
    rows = found.weights.take(f"{QUERY}.weight", WeightPart(0, 5, 9))
    torch.testing.assert_close(rows, merged[f"{QUERY}.weight"][5:9], atol=1e-6, rtol=1e-6)
    columns = found.weights.take(f"{DOWN}.weight", WeightPart(1, 10, 30))
    torch.testing.assert_close(columns, merged[f"{DOWN}.weight"][:, 10:30], atol=1e-6, rtol=1e-6)


def test_scales_by_module_and_by_the_root_of_the_rank(tmp_path: Path, llama: Path) -> None:
    root = math.sqrt(RANK)
    merged = write_adapter(
        tmp_path,
        llama,
        scales={QUERY: 2 / root, DOWN: ALPHA / root},
        use_rslora=True,
        alpha_pattern={"layers.0.self_attn.q_proj": 5, "q_proj": 2},
    )
    for module in (QUERY, DOWN):
        found = source(llama, tmp_path).weights.take(f"{module}.weight")
        torch.testing.assert_close(found, merged[f"{module}.weight"], atol=1e-6, rtol=1e-6)


def test_names_of_a_model_without_its_head(tmp_path: Path, llama: Path) -> None:
    """Patterns are of the names that the layers had then."""
    merged = write_adapter(
        tmp_path,
        llama,
        prefix="model.",
        scales={QUERY: 2 / RANK},
        alpha_pattern={"^layers.1.self_attn.q_proj": 2},
    )
    found = source(llama, tmp_path).weights.take(f"{QUERY}.weight")
    torch.testing.assert_close(found, merged[f"{QUERY}.weight"], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("qwen3_moe", ("model.layers.0.mlp.experts.2.up_proj", "model.layers.0.mlp.gate", "lm_head")),
        ("olmo2", (QUERY, DOWN)),
        ("llama-biased-scaled", (QUERY, DOWN)),
    ],
)
def test_the_model_that_is_served_is_the_merged_one(
    tmp_path: Path, name: str, modules: tuple[str, ...]
) -> None:
    """Experts, and forward hf, too: its logits are those of the library over the merged weights."""
    base = write_checkpoint(tmp_path / "base", name)
    merged = write_adapter(tmp_path / "adapter", base, modules)
    config = TargetConfig(
        model=str(base),
        adapter=str(tmp_path / "adapter"),
        dtype="float32",
        device="cpu",
        max_num_seqs=1,
        num_threads=1,
    )
    prompt = [5, 7, 9, 11, 13, 2]
    logits = build_runner(config, role="target").run([SequenceInput(prompt, 0, [0], len(prompt))]).logits
    before = reference_logits(reference_model(base), prompt)
    save_file(merged, base / "model.safetensors", metadata={"format": "pt"})
    expected = reference_logits(reference_model(base), prompt)
    torch.testing.assert_close(logits, expected, atol=5e-5, rtol=0)
    assert float((expected - before).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"peft_type": "ADALORA"}, "has peft_type 'ADALORA'"),
        ({"use_dora": True}, "has use_dora True, which is not computed"),
        ({"modules_to_save": ["lm_head"]}, "has modules_to_save ['lm_head']"),
        ({"bias": "all"}, "has bias 'all'"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights 'pissa', which changes the base's weights"),
        (
            {"init_lora_weights": "lora_ga"},
            "has init_lora_weights 'lora_ga', which changes the base's weights",
        ),
        ({"megatron_config": {"tensor_model_parallel_size": 2}}, "has megatron_config {"),
        ({"fan_in_fan_out": True}, "has fan_in_fan_out True"),
        ({"a_later_invention": 3}, "has a_later_invention 3"),
        ({"lora_alpha": "8"}, "has no number in lora_alpha"),
        ({"alpha_pattern": {"(": 2}}, "has a pattern in alpha_pattern that cannot be read"),
    ],
)
def test_configurations_that_mean_more(
    tmp_path: Path, llama: Path, values: dict[str, Any], named: str
) -> None:
    write_adapter(tmp_path, llama, **values)
    assert named in refusal(llama, tmp_path)


def test_tensors_that_do_not_fit(tmp_path: Path, llama: Path) -> None:
    write_adapter(tmp_path, llama)
    file, stored = tmp_path / "adapter_model.safetensors", f"base_model.model.{QUERY}"
    whole = load_file(file)
    down, up = f"{stored}.lora_A.weight", f"{stored}.lora_B.weight"
    vector = f"{stored}.lora_magnitude_vector"
    other = stored.replace("layers.1", "layers.7")
    for tensors, named in (
        ({**whole, vector: torch.ones(3)}, f"holds F32 tensor '{vector}' of shape [3]"),
        ({down: whole[down]}, "has no pair of matrices that fit each other"),
        ({down: whole[down], up: whole[up][:, :2].clone()}, "has no pair of matrices that fit each other"),
        ({down: whole[down], up: whole[up][:5].clone()}, f"adapts {QUERY}.weight as [5, 32], which"),
        (
            {f"{other}.lora_A.weight": whole[down], f"{other}.lora_B.weight": whole[up]},
            f"the model has no place: {QUERY.replace('1', '7')}.weight",
        ),
        (
            {
                **whole,
                **{name.replace(".model.model.", ".model."): each.clone() for name, each in whole.items()},
            },
            "adapts a weight under two names: ",
        ),
        ({}, "holds no tensors"),
    ):
        save_file(tensors, file)
        assert named in refusal(llama, tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    assert refusal(llama, tmp_path).endswith(
        "directory with adapter_config.json and adapter_model.safetensors"
    )


def test_numbers_that_are_none(tmp_path: Path, llama: Path) -> None:
    write_adapter(tmp_path, llama)
    with changing_tensors(tmp_path, "adapter_model.safetensors") as tensors:
        tensors[f"base_model.model.{DOWN}.lora_B.weight"][2, 1] = float("nan")
    with pytest.raises(ConfigError, match=f"makes the weight '{DOWN}.weight' hold NaN or infinite values"):
        source(llama, tmp_path).weights.take(f"{DOWN}.weight")


def test_beside_its_base_it_is_merged_where_it_is_asked_for(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path, "llama-biased-scaled")
    merged = write_adapter(base, base)
    found = source(base, base).weights.take(f"{QUERY}.weight")
    torch.testing.assert_close(found, merged[f"{QUERY}.weight"], atol=1e-6, rtol=1e-6)
    with pytest.raises(ConfigError, match="and the adapter's directory as target"):
        check_loadable(ModelArgs(str(base), role="target"))


def test_several_ranks_of_forward_hf_have_none(tmp_path: Path, llama: Path) -> None:
    write_adapter(tmp_path, llama)
    message = refusal(llama, tmp_path, tensor_parallel_size=2, forward="hf")
    assert "target.tensor_parallel_size 2; model type 'llama', which forward hf runs" in message
    check_loadable(ModelArgs(str(llama), role="target", adapter=str(tmp_path), tensor_parallel_size=2))
