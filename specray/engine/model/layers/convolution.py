"""Causal convolutions of recurrent layers: sums over the last few inputs of each channel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specray.engine.cache.state_pool import LayerStates, StatePool, StateRows
from specray.engine.model.layers.recurrences import by_sequence
from specray.engine.step import StateShape


def convolve(
    rows: torch.Tensor, taps: torch.Tensor, bias: torch.Tensor | None, layer: LayerStates, item: StateRows
) -> torch.Tensor:
    """Weights each row's input and those before it, which are kept for what follows.

    A row's result has one order of sums, whatever rows lie next to it.

    Args:
        rows: of one sequence, ``[num_rows, num_channels]``.
        taps: ``[num_taps, num_channels]``, float32, the last one for a row itself.

    Returns:
        ``[num_rows, num_channels]``, float32.
    """
    num_rows, num_before = len(rows), len(taps) - 1
    ring = layer.inputs[item.slot]
    positions = torch.arange(item.start - num_before, item.end, device=rows.device)
    places = positions.remainder(len(ring))
    before = torch.where(positions[:num_before, None] < 0, 0.0, ring[places[:num_before]].float())
    inputs = torch.cat((before, rows.float()))
    total = inputs[:num_rows] * taps[0]
    for tap in range(1, len(taps)):
        total = total + inputs[tap : tap + num_rows] * taps[tap]
    count = min(num_rows, len(ring))
    ring[places[len(places) - count :]] = rows[num_rows - count :]
    return total if bias is None else total + bias


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """Implements ``delta.Mixer``: layers that are a convolution alone, with two gates (LFM2).

    Rows are ``[B | C | x]``, a number of each for every channel: B times x is convolved, and the result is
    multiplied by C.
    """

    shape: StateShape
    taps: torch.Tensor  # [num_taps, num_channels], float32
    bias: torch.Tensor | None  # [num_channels], float32

    @property
    def can_be_captured(self) -> bool:
        return False

    def __call__(self, projected: torch.Tensor, pool: StatePool, place: int) -> torch.Tensor:
        return by_sequence(self.run, projected, pool, place, self.shape.num_channels)

    def run(self, projected: torch.Tensor, layer: LayerStates, item: StateRows) -> torch.Tensor:
        """The rows of one sequence."""
        first, last, x = projected.chunk(3, -1)
        return last.float() * convolve(first * x, self.taps, self.bias, layer, item)
