"""Weights of several formats are cut and joined undecoded: values equal those of the decoded numbers."""

from __future__ import annotations

import pytest
import torch

from specray.engine.weights.block_type import BlockType
from specray.engine.weights.block_weight import BlockWeight
from specray.engine.weights.grouped_weight import NIBBLE_BITS, GroupedWeight
from specray.engine.weights.stored_weight import Part, StoredWeight, join
from specray.errors import ConfigError

_IN = 512


def _blocks(kind: BlockType, rows: int, seed: int) -> BlockWeight:
    numbers = torch.Generator().manual_seed(seed)
    # Bytes below 0x70 leave every float16 finite.
    shape = (rows, kind.row_bytes(_IN))
    return BlockWeight(kind, torch.randint(0, 0x70, shape, generator=numbers, dtype=torch.uint8))


def _groups(rows: int, *, bits: int = NIBBLE_BITS, group: int = 128, has_zeros: bool = True) -> GroupedWeight:
    numbers = torch.Generator().manual_seed(rows)
    low, high = (0, 16) if bits == NIBBLE_BITS else (-128, 128)
    codes = torch.randint(low, high, (rows, _IN), generator=numbers, dtype=torch.int8)
    scales = torch.randn(rows, _IN // group, generator=numbers).to(torch.float16)
    zeros = torch.randint(0, 17, scales.shape, generator=numbers, dtype=torch.int8) if has_zeros else None
    return GroupedWeight(codes, scales, zeros, bits)


def _mixed() -> StoredWeight:
    """Nine rows: four of Q4_K, two of groups, three of Q6_K."""
    parts: list[Part] = [_blocks(BlockType.Q4_K, 4, 1), _groups(2), _blocks(BlockType.Q6_K, 3, 2)]
    return StoredWeight.of(parts)


def test_the_bytes_are_those_of_the_parts() -> None:
    weight = _mixed()
    assert weight.shape == (9, _IN)
    assert weight.num_bytes == 4 * 2 * 144 + 2 * (_IN // 2 + 4 * 2 + 4) + 3 * 2 * 210


@pytest.mark.parametrize(
    "index",
    [
        slice(None),
        slice(3, 7),
        slice(6, 9),
        torch.tensor([8, 0, 1, 5, 4, 3, 3]),
        torch.tensor([4]),
        torch.tensor([7, 2, 7, 2]),
    ],
    ids=str,
)
def test_rows_of_any_order_keep_their_values(index: torch.Tensor | slice) -> None:
    weight = _mixed()
    torch.testing.assert_close(weight.select(index).values(), weight.values()[index], rtol=0, atol=0)


def test_columns_are_cut_at_whole_blocks_of_all_parts() -> None:
    weight = _mixed()
    torch.testing.assert_close(weight.columns(256, 512).values(), weight.values()[:, 256:], rtol=0, atol=0)
    with pytest.raises(
        ConfigError, match="'q4_k' is cut at input features 0 and 128; allowed: multiples of 256"
    ):
        weight.columns(0, 128)


@pytest.mark.parametrize(("start", "stop"), [(0, 128), (128, 384), (64, 128), (32, 512)])
def test_a_cut_group_becomes_smaller_ones(start: int, stop: int) -> None:
    weight = _groups(2)
    cut = weight.columns(start, stop)
    torch.testing.assert_close(cut.values(), weight.values()[:, start:stop], rtol=0, atol=0)


def test_a_cut_within_32_features_is_refused() -> None:
    with pytest.raises(ConfigError, match="groups of 128 is cut at input features 16 and 512; allowed: m"):
        StoredWeight((_groups(2),)).columns(16, 512)


def test_neighbours_of_one_format_become_one_part() -> None:
    first, second = _blocks(BlockType.Q4_K, 4, 1), _blocks(BlockType.Q4_K, 2, 2)
    other, groups = _blocks(BlockType.Q6_K, 1, 3), [_groups(2), _groups(3), _groups(1, has_zeros=False)]
    weight = join([StoredWeight((first,)), StoredWeight((second,)), StoredWeight((other, *groups))])
    assert [part.shape[0] for part in weight.parts] == [6, 1, 5, 1]
    expected = torch.cat([part.values() for part in (first, second, other, *groups)])
    torch.testing.assert_close(weight.values(), expected, rtol=0, atol=0)


def test_a_group_is_its_codes_from_zero_times_its_scale() -> None:
    codes = torch.tensor([[0, 15, 8, 3]], dtype=torch.int8)
    scales, zeros = torch.tensor([[0.5, -2.0]]), torch.tensor([[16, 3]], dtype=torch.int8)
    weight = GroupedWeight(codes, scales, zeros, NIBBLE_BITS)
    assert weight.group == 2
    assert weight.values().tolist() == [[-8.0, -0.5, -10.0, 0.0]]
    assert weight.values(torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_seen(number: float) -> None:
    weight = _groups(3)
    assert weight.is_finite()
    weight.scales[2, 3] = number
    assert not weight.is_finite()


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (torch.float8_e4m3fn, 0x7F),
        (torch.float8_e4m3fn, 0xFF),
        (torch.float16, 0x7C00),
        (torch.float16, 0x7E01),
    ],
)
def test_a_float_that_is_no_number_is_seen(dtype: torch.dtype, code: int) -> None:
    words = torch.zeros(2, 64, dtype=torch.uint8 if dtype.itemsize == 1 else torch.int16)
    weight = GroupedWeight(words.view(dtype), torch.ones(2, 2), bits=8 * dtype.itemsize)
    assert weight.is_finite()
    words[1, 63] = code
    assert not weight.is_finite()


def test_floats_are_cut_and_joined_like_codes() -> None:
    numbers = torch.Generator().manual_seed(0)
    parts = [
        GroupedWeight(torch.randn(3, 64, generator=numbers).to(torch.float8_e4m3fn), torch.rand(3, 2))
        for _ in range(2)
    ]
    both = StoredWeight.of(parts)
    assert len(both.parts) == 1
    expected = torch.cat([part.values() for part in parts])
    assert torch.equal(both.values(), expected)
    order = torch.tensor([5, 0, 2])
    assert torch.equal(both.select(order).columns(32, 64).values(), expected[order][:, 32:])
