"""Memory layout of quantised weights: panels of 32 output features, group after group of input features.

A group of a panel is contiguous: words of 32 bits, each with the codes of 4 (int8) or 8 (int4) input features
of one output feature, all output features side by side; then the scales and, for int4, the minimums. So a
product reads one stream. Within a word, two neighbouring input features lie 16 bits apart, as the processor
multiplies pairs of 16-bit integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.huge_pages import empty_on_huge_pages
from specray.engine.weights.quantization import GROUP, Quantization
from specray.engine.weights.quantized_weight import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a group of a panel."""

    format: Quantization

    @property
    def codes_per_word(self) -> int:
        return 4 if self.format is Quantization.INT8 else 8

    @property
    def has_minimums(self) -> bool:
        return self.format is Quantization.INT4

    @property
    def num_words(self) -> int:
        return GROUP // self.codes_per_word

    @property
    def scales_offset(self) -> int:
        """Bytes from the beginning of a group to its scales; minimums follow them."""
        return self.num_words * PANEL * 4

    @property
    def group_bytes(self) -> int:
        """Bytes of a group; a multiple of a cache line."""
        return self.scales_offset + (2 if self.has_minimums else 1) * PANEL * 2

    @property
    def shifts(self) -> tuple[int, ...]:
        """Bits below each code of a word, by input feature."""
        width = 32 // self.codes_per_word
        return tuple(width * (index // 2) + 16 * (index % 2) for index in range(self.codes_per_word))


def pack_panels(*weights: QuantizedWeight) -> torch.Tensor:
    """Packs weights of one shape and format into uint8 ``[panels, num_weights, groups, group_bytes]``.

    The last panel is padded with zeros.
    """
    layout, (size, in_features) = Layout(weights[0].format), weights[0].codes.shape
    num_panels, num_groups = -(-size // PANEL), in_features // GROUP
    panels = empty_on_huge_pages((num_panels, len(weights), num_groups, layout.group_bytes), torch.uint8)
    for index, weight in enumerate(weights):
        place = panels[:, index]
        words = _by_panel(_words(weight.codes, layout), num_panels).view(torch.uint8)
        place[..., : layout.scales_offset].view(words.shape).copy_(words)
        numbers = [weight.scales] if weight.minimums is None else [weight.scales, weight.minimums]
        for row, number in enumerate(numbers):
            begin = layout.scales_offset + row * PANEL * 2
            halves = _by_panel(number.to(torch.float16)[..., None], num_panels).view(torch.uint8)
            place[..., begin : begin + PANEL * 2].copy_(halves.view(num_panels, num_groups, PANEL * 2))
    return panels


def _words(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """int32 ``[size, groups, num_words]``."""
    size = len(codes)
    parts = codes.view(size, -1, layout.num_words, layout.codes_per_word)
    mask = (1 << (32 // layout.codes_per_word)) - 1
    # numpy, since torch has no unsigned words to shift.
    words = np.zeros(parts.shape[:-1], dtype=np.uint32)
    for index, shift in enumerate(layout.shifts):
        words |= (parts[..., index].numpy().astype(np.uint32) & np.uint32(mask)) << np.uint32(shift)
    return torch.from_numpy(words.view(np.int32))


def _by_panel(numbers: torch.Tensor, num_panels: int) -> torch.Tensor:
    """``[size, groups, count]`` to contiguous ``[panels, groups, count, 32]``, padded with zeros."""
    size, num_groups, count = numbers.shape
    if size % PANEL:
        padded = numbers.new_zeros(num_panels * PANEL, num_groups, count)
        padded[:size] = numbers
        numbers = padded
    return numbers.view(num_panels, PANEL, num_groups, count).permute(0, 2, 3, 1).contiguous()
