"""Sizes of groups that follow from the number of scales: never those of a short last group."""

from __future__ import annotations

import pytest
import torch

from specray.engine.model.checkpoint.dequantise import scaled


def test_a_short_last_group_is_not_read_as_equal_groups() -> None:
    """96 columns with 2 scales are groups of 64 and 32, not twice 48."""
    with pytest.raises(
        ValueError,
        match=r"^2 groups for 96 columns, and no size of them; allowed: equal ones of a power of two$",
    ):
        scaled(torch.ones(3, 96), torch.ones(3, 2), None, None)


@pytest.mark.parametrize(("columns", "num_groups", "size"), [(128, 2, 64), (96, 3, 32), (96, 1, 96)])
def test_equal_groups(columns: int, num_groups: int, size: int) -> None:
    scales = 1.0 + torch.arange(num_groups).repeat(3, 1)
    numbers = scaled(torch.ones(3, columns), scales, None, None)
    assert numbers.values().tolist() == [[1.0 + column // size for column in range(columns)]] * 3


def test_a_size_that_is_named_counts() -> None:
    """32 columns with 2 scales are groups of 20 and 12 where the configuration says so."""
    numbers = scaled(torch.ones(3, 32), torch.tensor([[1.0, 2.0]] * 3), None, None, group_size=20)
    assert numbers.values().tolist() == [[1.0] * 20 + [2.0] * 12] * 3


@pytest.mark.parametrize(("group_size", "named"), [(10, "10"), (32, "32"), (-1, "32")])
def test_a_size_that_the_scales_contradict(group_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=rf"^2 groups for 32 columns; allowed: groups of {named}$"):
        scaled(torch.ones(3, 32), torch.ones(3, 2), None, None, group_size=group_size)


def test_blocks_count_before_groups() -> None:
    """Rows of blocks of 1 x 20: not two equal groups."""
    numbers = scaled(torch.ones(3, 32), torch.tensor([[1.0, 2.0]] * 3), None, (1, 20))
    assert numbers.values().tolist() == [[1.0] * 20 + [2.0] * 12] * 3


@pytest.mark.parametrize("scale", [torch.ones(1), torch.ones(3, 1)])
def test_scales_of_rows_where_there_are_blocks(scale: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="for a weight of shape"):
        scaled(torch.ones(3, 32), scale, None, (2, 16))
