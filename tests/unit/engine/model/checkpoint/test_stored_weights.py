"""Quantised checkpoints are read as the weights that they mean, in every layout, or refused by name."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.checkpoint.stored_format import read_stored_format
from specray.engine.model.checkpoint.stored_weights import StoredWeights
from specray.engine.model.quantized.operator_set import has_own_kernels
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoint.light import warnings_of
from tests.unit.engine.model.checkpoint.stored_sources import DOWN, change, refused, source
from tests.unit.engine.model.checkpoints import write_checkpoint
from tests.unit.engine.model.stored_layouts import (
    LAYOUTS,
    Layout,
    awq,
    compressed,
    compressed_groups,
    fp8_blocks,
    fp8_rows,
    gptq,
    int8_rows,
    packed_rows,
    quantise_checkpoint,
)

_HAS_KERNELS = pytest.mark.skipif(
    not has_own_kernels(torch.device("cpu"), torch.float32), reason="no kernels for a file's own bits here"
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_weight_is_what_its_layout_means(checkpoint: Path, name: str) -> None:
    plain = "model.layers.0.self_attn.q_proj"
    meant = quantise_checkpoint(checkpoint, LAYOUTS[name], plain=(plain,))
    weights = source(checkpoint).weights
    for tensor, expected in meant.items():
        assert torch.equal(weights.take(tensor), expected), tensor
    rows, columns = meant[DOWN].shape
    assert torch.equal(weights.take(DOWN, WeightPart(0, 3, rows)), meant[DOWN][3:])
    part = weights.take(DOWN, WeightPart(1, columns // 2, columns))
    assert torch.equal(part, meant[DOWN][:, columns // 2 :]) and part.is_contiguous()
    half = source(checkpoint, torch.bfloat16).weights.take(DOWN)
    assert torch.equal(half, meant[DOWN].bfloat16())


_GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
OWN = {
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 32}, awq(size=32)),
    "gptq": Layout(
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        gptq(4, is_reordered=False, stored_less=1, size=32),
    ),
    "gptq-8": Layout(
        {"quant_method": "gptq", "bits": 8, "group_size": 64},
        gptq(8, is_reordered=False, stored_less=1, size=64),
    ),
    "compressed-4": Layout(
        compressed("pack-quantized", **_GROUPS), packed_rows(4, is_symmetric=True, size=32)
    ),
    "compressed-4-zeros": Layout(
        compressed("pack-quantized", **_GROUPS), packed_rows(4, is_symmetric=False, size=32)
    ),
    "compressed-8": Layout(
        compressed("pack-quantized", **{**_GROUPS, "num_bits": 8}), packed_rows(8, is_symmetric=True, size=32)
    ),
    "fp8-tensor": LAYOUTS["fp8-tensor"],
    "fp8-rows": Layout(compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_rows),
    "fp8-blocks": Layout({"quant_method": "fp8", "weight_block_size": [24, 32]}, fp8_blocks(24, 32)),
    "int8": Layout(compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_rows),
}
"""Layouts that kernels hold exactly, in checkpoints whose layers have 64 and 128 input features."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    return write_checkpoint(directory, "llama-biased-scaled", hidden_size=64, intermediate_size=128)


@_HAS_KERNELS
@pytest.mark.parametrize("name", OWN)
def test_own_bits_are_the_values_that_a_layout_means(tmp_path: Path, wide: Path, name: str) -> None:
    checkpoint = Path(shutil.copytree(wide, tmp_path / "model"))
    meant = quantise_checkpoint(checkpoint, OWN[name])
    found = source(checkpoint, torch.bfloat16)
    for tensor, expected in meant.items():
        stored = found.weights.stored(tensor)
        assert (stored is None) == (not tensor.endswith("_proj.weight")), tensor
        if stored is not None:
            assert torch.equal(stored.values(), expected), tensor
    for part in (WeightPart(0, 3, 40), WeightPart(1, 32, 128)):
        stored = found.weights.stored(DOWN, part)
        expected = meant[DOWN].narrow(part.dim, part.start, part.stop - part.start)
        assert stored is not None and torch.equal(stored.values(), expected)
    bits = 4 if "4" in name or name in ("awq", "gptq") else 8
    count, numbers = 64 * 128, found.stored_bytes[DOWN]
    assert count * bits // 8 < numbers < count * (bits + 1.5) / 8
    assert DOWN in found.stored_bytes and "lm_head.weight" not in found.stored_bytes


_REORDERED = Layout(
    {**OWN["gptq"].config, "desc_act": True}, gptq(4, is_reordered=True, stored_less=1, size=32)
)


def all_held(path: Path) -> StoredWeights:
    """The weights as a device takes them whose kernels hold everything."""
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    stored = read_stored_format(section["quant_method"], section)
    assert stored is not None
    place = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    return StoredWeights(str(path), path, stored, **place, has_own_bits=True, holds_all=True)


_FLOATS = {
    "fp8 by tensor": LAYOUTS["fp8-tensor"],
    "fp8 by row": LAYOUTS["compressed-float"],
    "fp8 of blocks": Layout({"quant_method": "fp8", "weight_block_size": [32, 96]}, fp8_blocks(32, 96)),
    "nvfp4 of modelopt": LAYOUTS["nvfp4-modelopt"],
    "nvfp4 of compressed-tensors": LAYOUTS["nvfp4-compressed"],
    "desc_act": _REORDERED,
    "desc_act of 8 bits": LAYOUTS["gptq-reordered-8"],
}


@pytest.mark.parametrize("name", _FLOATS)
def test_what_only_a_device_holds_is_what_a_layout_means_whole_and_in_parts(
    tmp_path: Path, wide: Path, name: str
) -> None:
    checkpoint = Path(shutil.copytree(wide, tmp_path / "model"))
    meant = quantise_checkpoint(checkpoint, _FLOATS[name])
    weights = all_held(checkpoint)
    for part in (None, WeightPart(0, 3, 40), WeightPart(1, 0, 64), WeightPart(1, 32, 128)):
        stored, expected = weights.stored(DOWN, part), meant[DOWN]
        if part is not None:
            expected = expected.narrow(part.dim, part.start, part.stop - part.start)
        assert stored is not None and stored.shape == expected.shape
        assert torch.equal(stored.values(), expected)
    assert weights.stored_bytes[DOWN] < 64 * 128 * 1.5


def test_columns_that_cut_a_unit_of_floating_point_numbers_are_numbers(
    tmp_path: Path, wide: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = Path(shutil.copytree(wide, tmp_path / "model"))
    quantise_checkpoint(checkpoint, LAYOUTS["nvfp4-modelopt"])
    with caplog.at_level(logging.WARNING):
        assert all_held(checkpoint).stored(DOWN, WeightPart(1, 16, 128)) is None
    (record,) = warnings_of(caplog)
    assert "kernels hold units of 32 input features, and ranks of such" in record.message


def test_a_divisor_of_zero_is_refused_where_a_scale_is_not(tmp_path: Path, wide: Path) -> None:
    checkpoint = Path(shutil.copytree(wide, tmp_path / "model"))
    quantise_checkpoint(checkpoint, LAYOUTS["nvfp4-compressed"])
    change(checkpoint, weight_global_scale=torch.zeros(1))
    with pytest.raises(ConfigError, match="divided by a weight_global_scale of 0"):
        all_held(checkpoint).stored(DOWN)
    change(checkpoint, weight_scale=torch.zeros(64, 8).to(torch.float8_e4m3fn))
    stored = all_held(checkpoint).stored(DOWN)
    assert stored is not None and not stored.values().any()


@_HAS_KERNELS
@pytest.mark.parametrize(
    "layout",
    # Groups out of order; of 16 features; of 48 columns 32 and 16; of 20.
    [_REORDERED, LAYOUTS["awq"], LAYOUTS["gptq-short-last-group"], LAYOUTS["fp8-blocks"]],
    ids=["desc_act", "small", "uneven", "fp8"],
)
def test_what_kernels_do_not_hold_is_numbers_and_one_line_says_so(
    checkpoint: Path, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    meant = quantise_checkpoint(checkpoint, layout)
    found = source(checkpoint)
    with caplog.at_level(logging.WARNING):
        assert found.weights.stored(DOWN) is None and found.weights.stored(DOWN) is None
    assert torch.equal(found.weights.take(DOWN), meant[DOWN])
    assert DOWN not in found.stored_bytes
    (record,) = warnings_of(caplog)
    assert f"{DOWN} and maybe others are dequantised to dtype" in record.message


GPTQ = LAYOUTS["gptq"].config


@pytest.mark.parametrize(
    ("config", "own", "other"),
    [
        # 32 columns are twice 16, or 20 and 12: two scales either way.
        (
            compressed_groups(
                "pack-quantized",
                {
                    "re:.*self_attn.*": {"num_bits": 4, "group_size": 20},
                    "Linear": {"num_bits": 4, "group_size": 16, "symmetric": False},
                },
                ignore=["lm_head"],
            ),
            packed_rows(4, is_symmetric=True, size=20),
            packed_rows(4, is_symmetric=False),
        ),
        (
            {**GPTQ, "dynamic": {"+:.*self_attn.*": {"bits": 8, "group_size": 20}, "-:lm_head": {}}},
            gptq(8, is_reordered=False, stored_less=1, size=20),
            LAYOUTS["gptq"].store,
        ),
    ],
    ids=["compressed-tensors", "gptq"],
)
def test_layers_with_rules_of_their_own(
    checkpoint: Path, config: dict[str, Any], own: Any, other: Any
) -> None:
    meant: dict[str, torch.Tensor] = {}
    for only in ("q_proj", "k_proj", "v_proj", "o_proj"):
        meant |= {
            name: weight
            for name, weight in quantise_checkpoint(checkpoint, Layout(config, own), only=only).items()
            if name.endswith(f"{only}.weight")
        }
    meant = {**quantise_checkpoint(checkpoint, Layout(config, other)), **meant}
    weights = source(checkpoint).weights
    for tensor in (DOWN, "model.layers.0.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        assert torch.equal(weights.take(tensor), meant[tensor]), tensor


def test_a_layer_that_the_configuration_says_is_plain(checkpoint: Path) -> None:
    layout = LAYOUTS["fp8-blocks"]
    config = {**layout.config, "modules_to_not_convert": ["model.layers.1.mlp"]}
    quantise_checkpoint(checkpoint, Layout(config, layout.store))
    message = refused(checkpoint)
    assert "'model.layers.1.mlp." in message and "is among what the configuration leaves as it was" in message


def test_groups_in_an_order_that_was_never_set_are_in_order(checkpoint: Path) -> None:
    meant = quantise_checkpoint(checkpoint, LAYOUTS["compressed-pack4"])
    change(checkpoint, weight_g_idx=torch.full((48,), -1, dtype=torch.int32))
    assert torch.equal(source(checkpoint).weights.take(DOWN), meant[DOWN])


def test_zero_points_that_the_configuration_says_are_not_there(checkpoint: Path) -> None:
    layout = LAYOUTS["compressed-pack4-zeros"]
    config = compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=True)
    quantise_checkpoint(checkpoint, Layout(config, layout.store))
    with pytest.raises(ConfigError, match=r"says are not there: .*weight_zero_point$"):
        source(checkpoint)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_whole_numbers_that_no_method_means(checkpoint: Path, dtype: torch.dtype) -> None:
    quantise_checkpoint(checkpoint, LAYOUTS["compressed-int8"])
    change(checkpoint, weight=torch.ones(32, 48, dtype=dtype))
    assert f"tensors such as {DOWN!r}" in refused(checkpoint)


def test_plain_weights_that_have_scales(checkpoint: Path) -> None:
    """As of a checkpoint that was calibrated, and not compressed."""
    quantise_checkpoint(checkpoint, LAYOUTS["compressed-int8"])
    change(checkpoint, weight=torch.ones(32, 48, dtype=torch.float16))
    assert "down_proj.weight is F16 and has scales; allowed: F8_E4M3 or I8 with" in refused(checkpoint)


def test_a_library_that_names_no_groups_means_them_in_order(checkpoint: Path) -> None:
    meant = quantise_checkpoint(checkpoint, LAYOUTS["gptq"])
    assert "g_idx" not in "".join(load_file(checkpoint / "model.safetensors"))
    assert torch.equal(source(checkpoint).weights.take(DOWN), meant[DOWN])


@pytest.mark.parametrize(
    ("file", "values", "layout"),
    [
        (
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
            "modelopt",
        ),
        ("quantize_config.json", {"bits": 4, "group_size": 16}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}, "awq"),
    ],
)
def test_a_file_beside_the_configuration_names_the_method(
    checkpoint: Path, file: str, values: dict[str, Any], layout: str
) -> None:
    meant = quantise_checkpoint(checkpoint, Layout({}, LAYOUTS[layout].store))
    (checkpoint / file).write_text(json.dumps(values))
    assert torch.equal(source(checkpoint).weights.take(DOWN), meant[DOWN])
