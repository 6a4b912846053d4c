"""Tensors on huge pages, of any size."""

import gc
from itertools import pairwise

import pytest
import torch

from specray.engine.cpu.huge_pages import empty_on_huge_pages

pytestmark = pytest.mark.slow


def test_huge_pages_hold_a_tensor_of_any_size() -> None:
    """Sizes that end within a page; the tensor outlives the mapping's own reference."""
    for shape in ((3, 5), (1024, 1025), (2 << 20,)):
        tensor = empty_on_huge_pages(shape, torch.bfloat16)
        assert tensor.shape == shape and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        gc.collect()
        tensor.fill_(1.0)
        assert tensor.sum(dtype=torch.float64) == tensor.numel()


def test_small_tensors_share_huge_pages_and_no_byte() -> None:
    """As many as fill two mappings, some with ends within a cache line; others go on when one is gone."""
    tensors = [empty_on_huge_pages((count,), torch.int16) for count in (3, 1 << 20, 5_000_001) * 6]
    assert empty_on_huge_pages((0, 4), torch.int16).shape == (0, 4)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
    assert all(first + size <= second for (first, size), (second, _) in pairwise(places))
    assert all(first % 64 == 0 for first, _ in places)
    # Of a mapping's own first ones.
    assert [second - first for (first, _), (second, _) in pairwise(places)].count(64) >= 2
    del tensors[::2]
    gc.collect()
    assert all(bool((tensor == 2 * place + 1).all()) for place, tensor in enumerate(tensors))
