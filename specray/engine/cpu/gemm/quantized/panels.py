"""Weights in panels: their layouts, and what of each part of a stored weight lies where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from specray.engine.cpu.gemm.quantized.layout import BLOCK_LAYOUTS, Layout, Numbers, Table, made_layout
from specray.engine.cpu.gemm.quantized.packing import pack_blocks, pack_codes
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.huge_pages import empty_on_huge_pages
from specray.engine.cpu.thread_pool import ThreadPool
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import NIBBLE_BITS, GroupedWeight
from specray.engine.weights.quantization import GROUP
from specray.engine.weights.quantized_weight import QuantizedWeight
from specray.engine.weights.stored_weight import Part, Weight
from specray.errors import ConfigError

Packable: TypeAlias = Part | QuantizedWeight
"""What is packed, of parts those that :func:`can_pack` says."""
_TABLES = {
    torch.int8: Table.THEMSELVES,
    torch.float8_e4m3fn: Table.E4M3,
    torch.float16: Table.HALF,
}
"""What codes of these types are in layouts."""
_E4M3_UNIT = 256.0
"""What a float of 8 bits is in units of the layout's."""
_MIDDLE = 8
"""Zero of symmetric codes of 4 bits."""


@dataclass(frozen=True, slots=True)
class Panels:
    """A weight ``[size, in_features]`` in panels."""

    layout: Layout
    data: torch.Tensor  # uint8 [panels, super-blocks, block_bytes], the last panel padded with zeros
    size: int
    in_features: int

    @property
    def num_groups(self) -> int:
        return self.in_features // GROUP

    def factors(self) -> torch.Tensor:
        """The groups' factors, uint8 ``[panels, super-blocks, groups, factors, 32]``, a view."""
        layout = self.layout
        part = self.data[..., layout.factors_offset : layout.numbers_offset]
        return part.view(*part.shape[:-1], layout.num_groups, layout.num_factors, PANEL)

    def numbers(self) -> torch.Tensor:
        """Numbers of super-blocks, ``[panels, super-blocks, numbers, 32]``, a view."""
        layout = self.layout
        part = self.data[..., layout.numbers_offset :].view(
            torch.float32 if layout.is_float32 else torch.float16
        )
        return part.view(*part.shape[:-1], -1, PANEL)


def can_pack(weight: Weight) -> bool:
    if isinstance(weight, torch.Tensor):
        return False
    return all(isinstance(part, BlockWeight) or _can_pack_groups(part) for part in weight.parts)


def _can_pack_groups(part: Part) -> bool:
    return isinstance(part, GroupedWeight) and part.codes.dtype in _TABLES and part.group % GROUP == 0


def pack(weight: Packable, thread_pool: ThreadPool) -> Panels:
    """Packs a weight. Raises ConfigError: numbers of it are NaN or infinite."""
    if isinstance(weight, BlockWeight):
        panels = _empty(BLOCK_LAYOUTS[weight.kind], *weight.shape)
        pack_blocks(weight, panels.data, thread_pool)
        return panels
    if isinstance(weight, GroupedWeight):
        return _pack_groups(weight, thread_pool)
    assert isinstance(weight, QuantizedWeight), "no other form has a layout here"
    panels = _empty(made_layout(weight.format), *weight.codes.shape)
    pack_codes(panels.layout, weight.codes, panels.data, thread_pool)
    _place(panels.numbers(), 0, weight.scales)
    if weight.minimums is not None:
        _place(panels.numbers(), 1, weight.minimums)
    return panels


def _pack_groups(weight: GroupedWeight, thread_pool: ThreadPool) -> Panels:
    if not weight.is_finite():
        raise ConfigError("a weight holds a scale that is NaN or infinite; allowed: finite numbers")
    zeros, is_nibble, table = weight.zeros, weight.bits == NIBBLE_BITS, _TABLES[weight.codes.dtype]
    offset = 0 if is_nibble or table.is_float else 128
    if zeros is not None and is_nibble and bool((zeros == _MIDDLE).all()):
        zeros, offset = None, _MIDDLE
    kind = Numbers.UINT8 if is_nibble else Numbers.INT8
    scales = weight.scales.float()
    if table is Table.E4M3:
        scales = scales * _E4M3_UNIT
    layout = Layout(
        weight.bits,
        offset,
        table,
        minimums=Numbers.NONE if zeros is None else kind,
        num_groups=weight.group // GROUP,
        is_float32=not torch.equal(scales.half().float(), scales),
    )
    panels = _empty(layout, *weight.shape)
    pack_codes(layout, weight.codes, panels.data, thread_pool)
    _place(panels.numbers(), 0, scales)
    if zeros is not None:
        _place(panels.numbers(), 1, -scales)
        factors = panels.factors()
        for group in range(layout.num_groups):
            _place(factors[:, :, group], 0, zeros.view(torch.uint8))
    return panels


def _empty(layout: Layout, size: int, in_features: int) -> Panels:
    num_panels, num_blocks = -(-size // PANEL), in_features // (layout.num_groups * GROUP)
    data = empty_on_huge_pages((num_panels, num_blocks, layout.block_bytes), torch.uint8)
    if size % PANEL:
        data[-1].zero_()
    return Panels(layout, data, size, in_features)


def _place(numbers: torch.Tensor, index: int, values: torch.Tensor) -> None:
    """Writes values ``[out_features, super-blocks]`` to ``numbers[:, :, index]``."""
    size = len(values)
    whole = size // PANEL
    numbers[:whole, :, index] = (
        values[: whole * PANEL].view(whole, PANEL, values.shape[1]).transpose(1, 2).to(numbers.dtype)
    )
    if size % PANEL:
        numbers[whole, :, index, : size % PANEL] = values[whole * PANEL :].T.to(numbers.dtype)
