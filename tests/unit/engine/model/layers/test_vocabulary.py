"""Look-ups with a scale leave the table, which the head shares, as it is."""

from __future__ import annotations

import torch

from specray.engine.model.layers.vocabulary import ScaledEmbedding, TableEmbedding


def test_scaled_look_ups() -> None:
    table = torch.arange(12.0).view(4, 3)
    rows = ScaledEmbedding(TableEmbedding(table), 2.5)(torch.tensor([3, 0, 3]))
    assert rows.tolist() == [[22.5, 25.0, 27.5], [0.0, 2.5, 5.0], [22.5, 25.0, 27.5]]
    assert table.flatten().tolist() == list(range(12))
