"""Writes the linear layers of a tiny checkpoint as quantising libraries store them, number by number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.unit.engine.model.checkpoints import change_config, changing_tensors

Tensors = dict[str, torch.Tensor]
Store = Callable[[tuple[int, int], torch.Generator], tuple[Tensors, torch.Tensor]]
GROUP = 16
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Layout:
    """How one library stores a layer."""

    config: dict[str, Any]
    """``quantization_config``."""
    store: Store
    """Random tensors of a layer of this shape, by the end of their names, and the weight that they mean."""


def packed(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes ``[rows, columns]`` as int32 words along the columns, the first of ``order`` lowest."""
    per_word = 32 // bits
    rows = []
    for row in codes.tolist():
        words = []
        for first in range(0, len(row), per_word):
            values = (row[first : first + per_word] + [0] * per_word)[:per_word]
            word = sum(values[place] << (bits * i) for i, place in enumerate(order or range(per_word)))
            words.append(word - (1 << 32) if word >> 31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32)


def _fp8(shape: tuple[int, int], random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random).to(torch.float8_e4m3fn)


def _scales(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=random) * 0.5 + 0.1


def fp8_blocks(rows: int, columns: int) -> Store:
    """Blocks of so many rows and columns, which need not divide the weight's."""

    def store(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        weight = _fp8(shape, random)
        scale = _scales((-(-shape[0] // rows), -(-shape[1] // columns)), random)
        meant = torch.empty(shape)
        for row in range(shape[0]):
            for column in range(shape[1]):
                meant[row, column] = weight[row, column].float() * scale[row // rows, column // columns]
        return {"weight": weight, "weight_scale_inv": scale}, meant

    return store


def _fp8_tensor(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    weight, scale = _fp8(shape, random), _scales((), random)
    unused = {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor(0.25)}
    return {"weight": weight, "weight_scale": scale, **unused}, weight.float() * scale


def fp8_rows(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    weight, scale = _fp8(shape, random), _scales((shape[0], 1), random)
    return {"weight": weight, "weight_scale": scale}, weight.float() * scale


def int8_rows(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    weight = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
    scale = _scales((shape[0], 1), random) / 100
    zero = torch.randint(-8, 8, (shape[0], 1), generator=random, dtype=torch.int8)
    meant = (weight.float() - zero.float()) * scale
    return {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, meant


def _grouped(
    shape: tuple[int, int],
    bits: int,
    random: torch.Generator,
    groups: torch.Tensor | None = None,
    *,
    size: int = GROUP,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, zero points and float16 scales of groups of columns, and the weight that they mean."""
    rows, columns = shape
    codes = torch.randint(0, 1 << bits, shape, generator=random)
    num_groups = -(-columns // size)
    zeros = torch.randint(1, 1 << bits, (rows, num_groups), generator=random)
    scales = (_scales((rows, num_groups), random) / (1 << bits)).half()
    index = torch.arange(columns) // size if groups is None else groups
    return codes, zeros, scales, (codes - zeros[:, index]).float() * scales.float()[:, index]


def packed_rows(
    bits: int, *, is_symmetric: bool, size: int = GROUP
) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    """Stores layers as compressed-tensors packs them."""

    def store(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, meant = _grouped(shape, bits, random, size=size)
        tensors = {
            "weight_packed": packed(codes, bits),
            "weight_shape": torch.tensor(shape),
            "weight_scale": scales,
        }
        if is_symmetric:
            index = torch.arange(shape[1]) // size
            return tensors, (codes - (1 << (bits - 1))).float() * scales.float()[:, index]
        return {**tensors, "weight_zero_point": packed(zeros.T, bits).T.contiguous()}, meant

    return store


def gptq(
    bits: int, *, is_reordered: bool, stored_less: int, size: int = GROUP
) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    """Stores layers as GPTQ packs them."""

    def store(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(shape[1], generator=random) if is_reordered else torch.arange(shape[1])
        groups = order // size
        codes, zeros, scales, meant = _grouped(shape, bits, random, groups, size=size)
        tensors = {
            "qweight": packed(codes, bits).T.contiguous(),
            "qzeros": packed(zeros.T - stored_less, bits),
            "scales": scales.T.contiguous(),
        }
        return {**tensors, **({"g_idx": groups.int()} if is_reordered else {})}, meant

    return store


def awq(*, size: int = GROUP) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    """Stores layers as AutoAWQ's ``gemm`` version packs them."""

    def store(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes, zeros, scales, meant = _grouped(shape, 4, random, size=size)
        return {
            "qweight": packed(codes.T, 4, _AWQ_COLUMNS),
            "qzeros": packed(zeros.T, 4, _AWQ_COLUMNS),
            "scales": scales.T.contiguous(),
        }, meant

    return store


_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _nvfp4(*, is_modelopt: bool) -> Callable[..., tuple[Tensors, torch.Tensor]]:
    """Stores layers as ModelOpt or compressed-tensors packs them: the one multiplies, the other divides."""

    def store(shape: tuple[int, int], random: torch.Generator) -> tuple[Tensors, torch.Tensor]:
        codes = torch.randint(0, 16, shape, generator=random)
        scale = _scales((shape[0], shape[1] // 16), random).to(torch.float8_e4m3fn)
        number = _scales((), random)
        factor = number if is_modelopt else 1.0 / number
        grouped = _E2M1[codes].view(*scale.shape, 16) * scale.float()[..., None]
        pairs = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        if is_modelopt:
            tensors = {"weight": pairs, "weight_scale_2": number, "input_scale": torch.tensor(0.5)}
        else:
            tensors = {"weight_packed": pairs, "weight_global_scale": number[None]}
        return {**tensors, "weight_scale": scale}, grouped.view(shape) * factor

    return store


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors with one group."""
    return compressed_groups(format, {"Linear": weights})


def compressed_groups(format: str, weights: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """One with a group for each target."""
    groups = {
        f"group_{index}": {"targets": [target], "weights": own}
        for index, (target, own) in enumerate(weights.items())
    }
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, **values}


LAYOUTS = {
    "fp8-blocks": Layout({"quant_method": "fp8", "weight_block_size": [24, 20]}, fp8_blocks(24, 20)),
    "fp8-tensor": Layout({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor),
    "modelopt": Layout({"quant_method": "modelopt", "quant_algo": "FP8"}, _fp8_tensor),
    "compressed-float": Layout(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_rows
    ),
    "compressed-int8": Layout(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_rows
    ),
    "compressed-pack4": Layout(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
        packed_rows(4, is_symmetric=True),
    ),
    "compressed-pack4-zeros": Layout(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP),
        packed_rows(4, is_symmetric=False),
    ),
    "compressed-pack8": Layout(
        compressed("pack-quantized", num_bits=8, strategy="group", group_size=GROUP),
        packed_rows(8, is_symmetric=True),
    ),
    "gptq": Layout(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
        gptq(4, is_reordered=False, stored_less=1),
    ),
    "gptq-short-last-group": Layout(
        # Of 48 columns, which two groups of 24 would divide as well.
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        gptq(4, is_reordered=False, stored_less=1, size=32),
    ),
    "gptq-whole-rows": Layout(
        {"quant_method": "gptq", "bits": 4, "group_size": -1},
        gptq(4, is_reordered=False, stored_less=1, size=48),
    ),
    "gptq-reordered-8": Layout(
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "desc_act": True},
        gptq(8, is_reordered=True, stored_less=1),
    ),
    "gptq-v2": Layout(
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        gptq(4, is_reordered=True, stored_less=0),
    ),
    "awq": Layout({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq()),
    "nvfp4-modelopt": Layout(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, _nvfp4(is_modelopt=True)
    ),
    "nvfp4-compressed": Layout(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        _nvfp4(is_modelopt=False),
    ),
}
"""Every layout that is read, by name."""


def quantise_checkpoint(
    directory: Path, layout: Layout, *, plain: tuple[str, ...] = (), only: str = "_proj"
) -> Tensors:
    """Stores the linear layers of a checkpoint in a layout, with random numbers.

    Args:
        plain: layers that stay as they are.
        only: end of the names of the others.

    Returns:
        All tensors as they are meant, in float32.
    """
    random = torch.Generator().manual_seed(0)
    with changing_tensors(directory) as tensors:
        meant = dict(tensors)
        for name in sorted(tensors):
            layer = name.removesuffix(".weight")
            if not name.endswith(f"{only}.weight") or layer in plain:
                continue
            rows, columns = tensors.pop(name).shape
            parts, meant[name] = layout.store((rows, columns), random)
            tensors |= {f"{layer}.{suffix}": part for suffix, part in parts.items()}
    change_config(directory, quantization_config=layout.config)
    return meant
