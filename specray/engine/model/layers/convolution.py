"""Causal convolutions of recurrent layers: sums over the last few inputs of each channel."""

from __future__ import annotations

import torch

from specray.engine.cache.state_pool import LayerStates, StateRows


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
