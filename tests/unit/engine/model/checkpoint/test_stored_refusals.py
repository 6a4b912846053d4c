"""Quantised checkpoints that are refused by name, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specray.errors import ConfigError
from tests.unit.engine.model.checkpoint.stored_sources import DOWN, change, refused, source
from tests.unit.engine.model.checkpoints import change_config
from tests.unit.engine.model.stored_layouts import (
    LAYOUTS,
    Layout,
    compressed,
    quantise_checkpoint,
)


@pytest.mark.parametrize(
    ("layout", "values", "named"),
    [
        ("gptq", {"bits": 3}, "'gptq' 3 bits in quantization_config, bits 3"),
        ("gptq", {"bits": True}, "bits True"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ("awq", {"version": "gemv"}, "version 'gemv'"),
        ("fp8-blocks", {"fmt": "e5m2"}, "fmt 'e5m2'"),
        ("fp8-blocks", {"weight_block_size": [128]}, "weight_block_size [128]"),
        ("fp8-blocks", {"weight_block_size": [0, 128]}, "weight_block_size [0, 128]"),
        ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ("compressed-float", {"format": "marlin-24"}, "format 'marlin-24'"),
        ("compressed-float", {"transform_config": {"config_groups": {}}}, "transform_config"),
        ("compressed-float", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ("compressed-float", compressed("pack-quantized", num_bits=3), "num_bits 3"),
        ("compressed-float", compressed("float-quantized", num_bits=8, strategy="token"), "strategy 'token'"),
    ],
)
def test_a_variant_that_is_not_read(
    checkpoint: Path, layout: str, values: dict[str, Any], named: str
) -> None:
    stored = LAYOUTS[layout]
    quantise_checkpoint(checkpoint, Layout({**stored.config, **values}, stored.store))
    message = refused(checkpoint)
    assert f"{named})" in message and "allowed: " in message


def test_a_tensor_that_the_method_does_not_know(checkpoint: Path) -> None:
    quantise_checkpoint(checkpoint, LAYOUTS["modelopt"])
    change(checkpoint, pre_quant_scale=torch.ones(48))
    assert "down_proj.pre_quant_scale', without a place in 'modelopt'" in refused(checkpoint)


def test_a_configuration_that_speaks_of_plain_weights(checkpoint: Path) -> None:
    change_config(checkpoint, quantization_config=LAYOUTS["awq"].config)
    assert "says that it is quantised ('awq'), and none of its tensors is" in refused(checkpoint)


@pytest.mark.parametrize(
    ("layout", "values", "lacking"),
    [
        ("gptq", {"desc_act": True}, "g_idx"),
        (
            "compressed-pack4",
            compressed("pack-quantized", num_bits=4, strategy="group", symmetric=False),
            "weight_zero_point",
        ),
        (
            "compressed-pack4",
            compressed("pack-quantized", num_bits=4, strategy="group", actorder="group"),
            "weight_g_idx",
        ),
    ],
)
def test_a_tensor_that_the_configuration_speaks_of(
    checkpoint: Path, layout: str, values: dict[str, Any], lacking: str
) -> None:
    """Without it each layer would be read in another way than was meant."""
    stored = LAYOUTS[layout]
    quantise_checkpoint(checkpoint, Layout({**stored.config, **values}, stored.store))
    with pytest.raises(ConfigError, match=f"lacks weights: .*{lacking}$"):
        source(checkpoint)


def test_forward_hf_reads_no_quantised_weights(checkpoint: Path) -> None:
    quantise_checkpoint(checkpoint, LAYOUTS["fp8-blocks"])
    assert "is quantised ('fp8'), which only forward decoder reads" in refused(checkpoint, forward="hf")


@pytest.mark.parametrize(
    ("layout", "tensors", "named"),
    [
        (
            "fp8-blocks",
            {"weight_scale_inv": torch.ones(2, 2)},
            "scales of shape [2, 2] for a weight of shape",
        ),
        ("fp8-blocks", {"weight_scale_inv": None}, "lacks weights"),
        ("fp8-blocks", {"weight": None}, f"lacks weights: {DOWN}"),
        ("gptq", {"qzeros": None}, f"lacks weights: {DOWN.removesuffix('weight')}qzeros"),
        ("gptq", {"scales": torch.ones(3, 31)}, "scales of shape [31, 3] for a weight of 32 rows"),
        ("gptq", {"g_idx": torch.full((48,), 3, dtype=torch.int32)}, "that do not fit 3 groups"),
        ("awq", {"scales": torch.ones(5, 32)}, "cannot be loaded: weight"),
        (
            "compressed-pack4",
            {"weight_packed": torch.ones(32, 5, dtype=torch.int32)},
            "packed numbers of shape [32, 5] for a weight of [32, 48] in 4 bits; allowed: [32, 6]",
        ),
        ("compressed-pack4", {"weight_shape": torch.tensor([32, 40])}, "are of another shape"),
        ("awq", {"scales": torch.full((3, 32), torch.nan)}, "holds NaN or infinite values"),
    ],
)
def test_parts_that_do_not_fit(
    checkpoint: Path, layout: str, tensors: dict[str, torch.Tensor | None], named: str
) -> None:
    quantise_checkpoint(checkpoint, LAYOUTS[layout])
    change(checkpoint, **tensors)
    with pytest.raises(ConfigError) as caught:
        source(checkpoint).weights.take(DOWN)
    assert named in str(caught.value) and "\n" not in str(caught.value)
