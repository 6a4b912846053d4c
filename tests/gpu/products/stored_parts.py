"""Stored weights of random bytes, of every type and at the edges of each."""

from __future__ import annotations

import torch

from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import GroupedWeight
from specray.engine.weights.nvfp4_weight import Nvfp4Weight
from specray.engine.weights.quantization import Quantization
from specray.engine.weights.quantized_weight import quantize
from specray.engine.weights.reordered_weight import ReorderedWeight
from specray.engine.weights.stored_weight import Part

ROWS, COLUMNS = 40, 512
_HALVES = {
    BlockType.Q4_1: (0, 2),
    BlockType.Q5_1: (0, 2),
    BlockType.Q4_K: (0, 2),
    BlockType.Q5_K: (0, 2),
    BlockType.Q6_K: (208,),
}
_EDGES = (0.0, -0.0, 2.0**-24, -(2.0**-24), 2.0**-14, 1.0, -1.5, 65504.0)
"""Zero, the smallest numbers of float16, and the largest."""


def random_blocks(kind: BlockType, rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> BlockWeight:
    """Bytes of any value; float16 numbers that are finite, each edge once among those of usual size."""
    numbers = torch.Generator().manual_seed(seed)
    size = kind.size
    raw = torch.randint(0, 256, (rows, columns // size.num_values, size.num_bytes), generator=numbers)
    raw = raw.to(torch.uint8)
    if kind is BlockType.MXFP4:
        exponents = torch.randint(110, 135, raw.shape[:2], generator=numbers)
        exponents[0, :6] = torch.tensor((0, 1, 2, 127, 243, 244))
        raw[..., 0] = exponents.to(torch.uint8)
    else:
        for place in _HALVES.get(kind, (0,)):
            halves = torch.randn(raw.shape[:2], generator=numbers) * 0.01
            halves[: len(_EDGES), 0] = torch.tensor(_EDGES)
            raw[..., place : place + 2] = halves.half()[..., None].view(torch.uint8)
    return BlockWeight(kind, raw.flatten(1))


def grouped(bits: int, group: int, *, dtype: torch.dtype = torch.float16, has_zeros: bool) -> GroupedWeight:
    """All codes and zero points, and scales of the type."""
    numbers = torch.Generator().manual_seed(bits + group)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = torch.randint(low, high, (ROWS, COLUMNS), generator=numbers).to(torch.int8)
    scales = (torch.randn(ROWS, COLUMNS // group, generator=numbers) * 0.01).to(dtype)
    zeros = None
    if has_zeros:
        highest = 17 if bits == 4 else 128
        zeros = torch.randint(low, highest, scales.shape, generator=numbers).to(torch.int8)
    elif bits == 4:
        zeros = torch.full(scales.shape, 8, dtype=torch.int8)
    return GroupedWeight(codes, scales, zeros, bits)


def all_e4m3(group: int) -> GroupedWeight:
    """Every code that is a number."""
    numbers = torch.Generator().manual_seed(7)
    codes = torch.randint(0, 256, (ROWS, COLUMNS), generator=numbers).to(torch.uint8)
    codes.view(-1)[:256] = torch.arange(256)
    codes[codes & 0x7F == 0x7F] = 0x7E
    scales = torch.rand(ROWS, COLUMNS // group, generator=numbers) * 0.01
    scales[0, 0], scales[1, 0] = 2.0**-140, 2.0**100
    return GroupedWeight(codes.view(torch.float8_e4m3fn), scales)


def nvfp4(seed: int = 0) -> Nvfp4Weight:
    """Every code, and every scale that is a number."""
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (ROWS, COLUMNS // 2), generator=numbers).to(torch.uint8)
    scales = torch.randint(0, 127, (ROWS, COLUMNS // 16), generator=numbers).to(torch.uint8)
    scales.view(-1)[:127] = torch.arange(127)
    factors = torch.rand(ROWS, generator=numbers) * 1e-3
    return Nvfp4Weight(codes, scales.view(torch.float8_e4m3fn), factors)


def reordered() -> ReorderedWeight:
    """Groups of 64 input features that are no runs, as GPTQ's ``desc_act`` makes."""
    numbers = torch.Generator().manual_seed(11)
    groups = (torch.arange(COLUMNS) // 64)[torch.randperm(COLUMNS, generator=numbers)]
    return ReorderedWeight.of(grouped(4, 64, has_zeros=True), groups)


def every_part() -> dict[str, Part]:
    """One weight of every form, by its name."""
    parts: dict[str, Part] = {kind.value: random_blocks(kind) for kind in BlockType}
    for bits in (4, 8):
        for group in (32, 128, COLUMNS):
            parts[f"int{bits} of {group}"] = grouped(bits, group, has_zeros=False)
            parts[f"int{bits} of {group} with zeros"] = grouped(bits, group, has_zeros=True)
    parts["bfloat16 scales"] = grouped(4, 64, dtype=torch.bfloat16, has_zeros=True)
    parts["fp8 of 128"] = all_e4m3(128)
    parts["fp8 by row"] = all_e4m3(COLUMNS)
    parts["nvfp4"] = nvfp4()
    parts["desc_act"] = reordered()
    parts["desc_act of a rank"] = reordered().columns(32, 400)
    return parts


def quantized(format: Quantization) -> tuple[torch.Tensor, object]:
    """A weight that is quantised when it is loaded: its values, and what is packed."""
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
    made = quantize(weight, format)
    return made.dequantized(), made
