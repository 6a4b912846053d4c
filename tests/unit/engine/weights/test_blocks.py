"""Values of blocks equal the gguf library's, bit for bit, for random bytes of every type and for edges."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch

from specray.engine.weights.block_type import BlockType, numbered_type
from specray.engine.weights.block_weight import BlockWeight
from specray.errors import ConfigError

_IN_FEATURES = 1024


def _random_rows(kind: BlockType, count: int = 64) -> torch.Tensor:
    numbers = np.random.default_rng(kind.size.number)
    return torch.from_numpy(numbers.integers(0, 256, (count, kind.row_bytes(_IN_FEATURES)), dtype=np.uint8))


def _library_values(kind: BlockType, rows: torch.Tensor) -> np.ndarray:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind.name])


def _assert_same(found: torch.Tensor, expected: np.ndarray) -> None:
    both_nan = np.isnan(found.numpy()) & np.isnan(expected)
    np.testing.assert_array_equal(
        np.where(both_nan | (expected == 0), 0, found.numpy()).view(np.int32),
        np.where(both_nan | (expected == 0), 0, expected).view(np.int32),
    )


@pytest.mark.parametrize("kind", BlockType)
def test_sizes_and_numbers_are_those_of_ggml(kind: BlockType) -> None:
    known = gguf.GGMLQuantizationType[kind.name]
    assert gguf.GGML_QUANT_SIZES[known] == (kind.size.num_values, kind.size.num_bytes)
    assert numbered_type(known.value) is kind


@pytest.mark.parametrize("kind", BlockType)
def test_random_bytes_have_the_values_of_the_gguf_library(kind: BlockType) -> None:
    rows = _random_rows(kind)
    weight = BlockWeight(kind, rows)
    assert weight.shape == (64, _IN_FEATURES)
    _assert_same(weight.values(), _library_values(kind, rows))


@pytest.mark.parametrize("byte", [0x00, 0x7B, 0x80, 0xFF])
@pytest.mark.parametrize("kind", BlockType)
def test_equal_bytes_reach_the_ends_of_each_field(kind: BlockType, byte: int) -> None:
    rows = torch.full((2, kind.row_bytes(_IN_FEATURES)), byte, dtype=torch.uint8)
    _assert_same(BlockWeight(kind, rows).values(), _library_values(kind, rows))


@pytest.mark.parametrize("kind", [BlockType.Q5_0, BlockType.Q6_K])
def test_cut_and_joined_weights_keep_their_values(kind: BlockType) -> None:
    weight = BlockWeight(kind, _random_rows(kind))
    order = torch.tensor([5, 0, 63])
    chosen = weight.select(order).columns(256, 512).joined([weight.select(slice(2, 4)).columns(256, 512)])
    _assert_same(chosen.values(), weight.values()[[5, 0, 63, 2, 3], 256:512].numpy())


def test_a_cut_within_a_block_is_refused() -> None:
    weight = BlockWeight(BlockType.Q4_K, _random_rows(BlockType.Q4_K))
    with pytest.raises(
        ConfigError, match="'q4_k' is cut at input features 0 and 128; allowed: multiples of 256"
    ):
        weight.columns(0, 128)
