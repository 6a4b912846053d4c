"""Sizes of groups that follow from the number of scales: never those of a short last group."""

from __future__ import annotations

import pytest
import torch

from specray.engine.model.checkpoint.dequantise import scaled


def test_a_short_last_group_is_not_read_as_equal_groups() -> None:
    """96 columns with 2 scales are groups of 64 and 32, not twice 48."""
    with pytest.raises(ValueError, match=r"^2 groups for 96 columns$"):
        scaled(torch.ones(3, 96), torch.ones(3, 2), None, None)


@pytest.mark.parametrize(("columns", "num_groups", "size"), [(128, 2, 64), (96, 3, 32), (96, 1, 96)])
def test_equal_groups(columns: int, num_groups: int, size: int) -> None:
    scales = 1.0 + torch.arange(num_groups).repeat(3, 1)
    numbers = scaled(torch.ones(3, columns), scales, None, None)
    assert numbers.tolist() == [[1.0 + column // size for column in range(columns)]] * 3
