"""Checkpoints of gpt-oss in MXFP4 are read as the numbers that they mean, and computed with them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specray.engine.model.checkpoint.mxfp4_weights import block_rows, dequantised
from specray.engine.model.checkpoint.source import WeightPart
from specray.engine.model.description import ModelArgs, check_loadable
from specray.engine.model.loader import DecoderSource, load_model
from specray.engine.model.lowering import lower
from specray.engine.model.operators_torch import TorchOperators
from specray.engine.model.quantized.formats import WeightFormats
from specray.engine.model.quantized.operator_set import has_own_kernels
from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.errors import ConfigError
from tests.unit.engine.model.checkpoints import change_config, changing_tensors, write_checkpoint

CPU = torch.device("cpu")
_HAS_KERNELS = pytest.mark.skipif(
    not has_own_kernels(torch.device("cpu"), torch.float32), reason="no kernels for a file's own bits here"
)
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj"))


def quantise(directory: Path) -> dict[str, torch.Tensor]:
    """Replaces a checkpoint's experts by random ones in MXFP4; returns the weights that they mean."""
    random = torch.Generator().manual_seed(1)
    meant: dict[str, torch.Tensor] = {}
    with changing_tensors(directory) as tensors:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=random)
            scales = torch.randint(120, 126, blocks.shape[:3], generator=random)
            meant[name] = torch.empty(experts, columns, rows)
            for expert, row, group in torch.cartesian_prod(*map(torch.arange, blocks.shape[:3])).tolist():
                scale = math.ldexp(1.0, int(scales[expert, row, group]) - 127)
                for place, byte in enumerate(blocks[expert, row, group].tolist()):
                    for half, code in enumerate((byte & 15, byte >> 4)):
                        number = NUMBERS[code & 7] * (-scale if code & 8 else scale)
                        meant[name][expert, 32 * group + 2 * place + half, row] = number
            stored = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors |= {part: numbers.to(torch.uint8) for part, numbers in stored.items()}
    change_config(
        directory, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    return meant


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"num_hidden_layers": 2, "intermediate_size": 32, "num_local_experts": 2}
    return write_checkpoint(tmp_path / "model", "gpt_oss", **sizes)


def source(path: Path) -> DecoderSource:
    args = ModelArgs(str(path), role="target")
    check_loadable(args)
    loaded = load_model(args, dtype=torch.float32, device=CPU)
    assert isinstance(loaded.source, DecoderSource)
    return loaded.source


def test_experts_are_what_their_blocks_mean(checkpoint: Path) -> None:
    plain = load_file(checkpoint / "model.safetensors")
    meant = quantise(checkpoint)
    found = source(checkpoint)
    for name, expected in meant.items():
        assert torch.equal(found.weights.take(name), expected)
    for part in (WeightPart(0, 1, 2), WeightPart(1, 3, 20), WeightPart(2, 5, 6)):
        expected = meant[GATE_UP].narrow(part.dim, part.start, part.stop - part.start)
        assert torch.equal(found.weights.take(GATE_UP, part), expected)
    for name in ("model.layers.1.self_attn.sinks", f"{DOWN}_bias", "lm_head.weight"):
        assert torch.equal(found.weights.take(name), plain[name])
    lower(found.config, found.weights, TorchOperators(torch.float32), max_model_len=16)


@_HAS_KERNELS
def test_own_bits_of_an_expert_are_its_weights(checkpoint: Path) -> None:
    meant = quantise(checkpoint)
    found = source(checkpoint)
    assert found.weights.stored("lm_head.weight") is None
    for name in (GATE_UP, DOWN):
        for expert in range(2):
            stored = found.weights.stored(name, WeightPart(0, expert, expert + 1))
            assert stored is not None and torch.equal(stored.values(), meant[name][expert].T)
    experts, columns, rows = meant[GATE_UP].shape
    assert found.stored_bytes[GATE_UP] == experts * rows * columns // 32 * 17
    assert found.stored_formats == ("mxfp4",)


@_HAS_KERNELS
def test_a_forward_of_own_bits_is_that_of_the_numbers(checkpoint: Path) -> None:
    quantise(checkpoint)
    operators, outputs = TorchOperators(torch.float32), []
    for has_own_bits in (True, False):
        args = ModelArgs(str(checkpoint), formats=WeightFormats(has_own_bits=has_own_bits))
        found = load_model(args, dtype=torch.float32, device=CPU).source
        assert isinstance(found, DecoderSource)
        assert bool(found.stored_bytes) is has_own_bits
        forward = lower(found.config, found.weights, operators, max_model_len=32)
        experts = forward.layers[1].gate
        outputs.append(experts(torch.linspace(-1, 1, 2 * 32).view(2, 32)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("exponent", [0, 1, 126, 127, 252, 254])
def test_blocks_of_every_exponent_have_the_same_values(exponent: int) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(4, 4, 16)
    scales = torch.full((4, 4), exponent, dtype=torch.uint8)
    weight = BlockWeight(BlockType.MXFP4, block_rows(blocks, scales))
    assert torch.equal(weight.values(), dequantised(blocks, scales))
    assert weight.is_finite() is bool(weight.values().isfinite().all())


def test_a_scale_that_is_no_number_is_refused(checkpoint: Path) -> None:
    quantise(checkpoint)
    with changing_tensors(checkpoint) as tensors:
        tensors[f"{DOWN}_scales"][1, 4, 0] = 255
    found = source(checkpoint)
    with pytest.raises(ConfigError, match=f"the weight '{DOWN}' holds NaN or infinite values"):
        found.weights.take(DOWN)


def test_parts_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    quantise(checkpoint)
    whole = load_file(checkpoint / "model.safetensors")
    scales = f"{GATE_UP}_scales"
    for tensors, problem in (
        ({name: tensor for name, tensor in whole.items() if name != scales}, f"lacks weights: {scales}"),
        ({**whole, scales: whole[scales][:, 1:].clone()}, r"has blocks of shape \[2, 64, 1, 16\] and scales"),
    ):
        save_file(tensors, checkpoint / "model.safetensors")
        with pytest.raises(ConfigError, match=problem):
            source(checkpoint)


def test_forward_hf_does_not_read_them(checkpoint: Path) -> None:
    quantise(checkpoint)
    with pytest.raises(ConfigError, match="is quantised \\('mxfp4'\\), which only forward decoder reads"):
        check_loadable(ModelArgs(str(checkpoint), role="target", forward="hf"))
