"""Quantised checkpoints, adapters, and weights that are unknown or broken are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specray.engine.model.description import ModelArgs, check_loadable
from specray.engine.model.loader import DecoderSource, load_model
from specray.engine.model.lowering import lower
from specray.engine.model.operators_torch import TorchOperators
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import change_config, changing_tensors

Tensors = dict[str, torch.Tensor]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def checkpoint(tmp_path: Path, llama: Path) -> Path:
    """A copy, for a test to change."""
    return Path(shutil.copytree(llama, tmp_path / "model"))


def args(path: Path) -> ModelArgs:
    return ModelArgs(str(path), role="target")


def build(path: Path) -> None:
    """All that happens to weights."""
    loaded = load_model(args(path), dtype=torch.float32, device=torch.device("cpu"))
    assert isinstance(loaded.source, DecoderSource)
    operators = TorchOperators(torch.float32)
    lower(loaded.source.config, loaded.source.weights, operators, max_model_len=loaded.max_model_len)


def refused_early(path: Path) -> str:
    """Refused without the weights, with one sentence."""
    with pytest.raises(ConfigError) as caught:
        check_loadable(args(path))
    with pytest.raises(ConfigError) as loading:
        build(path)
    assert str(loading.value) == str(caught.value)
    assert "\n" not in str(caught.value) and repr(str(path)) in str(caught.value)
    return str(caught.value)


def refused_late(path: Path) -> str:
    """Refused when the weights are there, with one sentence."""
    check_loadable(args(path))
    with pytest.raises(ConfigError) as caught:
        build(path)
    assert "\n" not in str(caught.value) and repr(str(path)) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
            "('awq' 4 bits in quantization_config, version 'gemv')",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "'gptq' 3 bits"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "'fp8' e5m2"),
        ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "'bitsandbytes'"),
        ({"quantization_config": {"load_in_8bit": True}}, "'bitsandbytes'"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "marlin-24"}},
            "'compressed-tensors' marlin-24",
        ),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}},
            "'modelopt' W4A8_AWQ",
        ),
        ({"quantization_config": {"quant_method": "no-such-method"}}, "'no-such-method'"),
        ({"quantization_config": {"a": 1}}, "a method without a name"),
        ({"compression_config": {"format": "float-quantized"}}, "float-quantized in compression_config"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "4 bits in quantization"),
    ],
)
def test_method_in_the_configuration(checkpoint: Path, values: dict[str, Any], named: str) -> None:
    change_config(checkpoint, **values)
    message = refused_early(checkpoint)
    assert "is quantised (" in message and named in message


def test_no_method_in_the_configuration(checkpoint: Path) -> None:
    change_config(checkpoint, quantization_config=None)
    build(checkpoint)


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ"}},
            "'modelopt' W4A8_AWQ in hf_quant_config.json",
        ),
        ("quantize_config.json", {"bits": 3, "group_size": 128}, "3 bits in quantize_config.json"),
        ("quant_config.json", {"w_bit": 3, "zero_point": True}, "3 bits in quant_config.json"),
    ],
)
def test_method_in_a_file(checkpoint: Path, file: str, values: dict[str, Any], named: str) -> None:
    (checkpoint / file).write_text(json.dumps(values))
    assert named in refused_early(checkpoint)


def to_fp8(tensors: Tensors) -> None:
    tensors[Q_PROJ] = tensors[Q_PROJ].to(torch.float8_e4m3fn)


def to_whole_numbers(tensors: Tensors) -> None:
    tensors[Q_PROJ] = torch.zeros(tensors[Q_PROJ].shape, dtype=torch.int8)


def with_tensor(suffix: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[Q_PROJ.removesuffix(".weight") + suffix] = torch.ones(1)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (to_fp8, f"F8_E4M3 tensors such as '{Q_PROJ}'"),
        (to_whole_numbers, f"I8 tensors such as '{Q_PROJ}'"),
        *[
            (with_tensor(suffix), f"q_proj{suffix}'")
            for suffix in (
                ".weight_scale",
                ".weight_scale_inv",
                ".weight_scale_2",
                ".input_scale",
                ".scales",
                ".qweight",
                ".qzeros",
                ".g_idx",
                ".weight_packed",
                ".weight.absmax",
                ".weight.quant_state.bitsandbytes__nf4",
                ".SCB",
            )
        ],
    ],
)
def test_tensors_of_a_method_that_nothing_names(
    checkpoint: Path, change: Callable[[Tensors], None], named: str
) -> None:
    with changing_tensors(checkpoint) as tensors:
        change(tensors)
    message = refused_early(checkpoint)
    assert named in message and "without a named method" in message


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter_beside_its_base(checkpoint: Path, file: str) -> None:
    (checkpoint / file).write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    message = refused_early(checkpoint)
    assert f"has a LoRA adapter{' for the base model' if 'config' in file else ''}" in message
    assert file in message


def test_adapter_without_its_base(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "some/base"}))
    save_file({"base_model.model.x.lora_A.weight": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    assert "has a LoRA adapter for the base model 'some/base'" in refused_early(tmp_path)


def test_adapter_tensors_in_the_checkpoint(checkpoint: Path) -> None:
    with changing_tensors(checkpoint) as tensors:
        with_tensor(".lora_A.weight")(tensors)
    assert "holds the LoRA adapter's tensor" in refused_early(checkpoint)


@pytest.mark.parametrize("suffix", [".bias", ".alien"])
def test_weights_without_a_place(checkpoint: Path, suffix: str) -> None:
    with changing_tensors(checkpoint) as tensors:
        with_tensor(suffix)(tensors)
    message = refused_late(checkpoint)
    assert f"has weights for which model type 'llama' has no place: {Q_PROJ[:-7]}{suffix}" in message


def test_weights_of_layers_beyond_the_last(checkpoint: Path) -> None:
    change_config(checkpoint, num_hidden_layers=1)
    message = refused_late(checkpoint)
    assert "has no place: model.layers.1." in message and " and 5 more" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "lm_head.weight",
        "model.vision_tower.blocks.0.weight",
        "mtp.layers.0.proj.weight",
    ],
)
def test_weights_that_are_not_needed(checkpoint: Path, name: str) -> None:
    with changing_tensors(checkpoint) as tensors:
        tensors[name] = tensors["model.embed_tokens.weight"].clone()
    build(checkpoint)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers(checkpoint: Path, value: float) -> None:
    with changing_tensors(checkpoint) as tensors:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    message = refused_late(checkpoint)
    assert "the weight 'model.layers.1.mlp.down_proj.weight' holds NaN or infinite values" in message


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("tekken.json", "in tekken.json alone, which only the package mistral-common reads"),
        ("tokenizer.model", "in tokenizer.model alone, which needs the package sentencepiece"),
    ],
)
def test_tokenizers_in_other_forms(
    checkpoint: Path, file: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specray.tokenization.files.find_spec", lambda name: None)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).unlink()
    (checkpoint / file).write_text("{}")
    assert sentence in refused_late(checkpoint)
