"""Packed rows: packing keeps every element, and kernels give bit-identical results for both layouts."""

from __future__ import annotations

import functools

import pytest
import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.step import AttentionStep, SequenceRows

pytest.importorskip("numba")

from specray.engine.attention.cpu import CpuAttention
from specray.engine.cpu import norm as norm_module
from specray.engine.cpu.attention.kernel import attention_kernel
from specray.engine.cpu.gemm import linear as linear_module
from specray.engine.cpu.gemm import tiles
from specray.engine.cpu.gemm.linear import TiledGate, TiledLinear
from specray.engine.cpu.gemm.rows import PackedRows, last_rows, pack, some_rows
from specray.engine.cpu.norm import FusedRMSNorm
from specray.engine.cpu.thread_pool import ThreadPool
from tests.unit.engine.cpu import test_kernels
from tests.unit.engine.cpu.test_kernels import empty_cache

needs_tiles = pytest.mark.skipif(not tiles.is_usable(), reason="no AMX here")
THREAD_POOL = ThreadPool(2)
COUNTS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 255, 256, 257, 300]


random = functools.partial(test_kernels.random, dtype=torch.bfloat16)


def unpack(rows: PackedRows) -> torch.Tensor:
    """Unpacks to ``[num_rows, num_features]``."""
    return rows.data.transpose(1, 2).reshape(-1, rows.num_features)[: rows.num_rows]


@pytest.mark.parametrize("num_rows", COUNTS)
def test_unpacked_rows_are_those_that_were_packed(num_rows: int) -> None:
    rows = random(num_rows, 96)
    packed = pack(rows, THREAD_POOL)
    assert packed.data.shape == (-(-num_rows // 32), 3, min(num_rows, 32), 32)
    assert (packed.num_rows, packed.num_features) == (num_rows, 96)
    assert torch.equal(unpack(packed), rows)


def test_a_block_is_32_rows_of_32_features_row_by_row() -> None:
    rows = random(40, 96)
    packed = pack(rows, THREAD_POOL)
    assert torch.equal(packed.data[0, 2], rows[:32, 64:])
    assert torch.equal(packed.data[1, 1, :8], rows[32:, 32:64])


def test_one_row_lies_as_it_did() -> None:
    row = random(1, 96)
    assert torch.equal(pack(row, THREAD_POOL).data.flatten(), row.flatten())


@pytest.mark.parametrize(("num_rows", "first"), [(5, 4), (40, 0), (40, 31), (40, 33), (100, 60), (64, 64)])
def test_last_rows_are_packed_anew(num_rows: int, first: int) -> None:
    rows = random(num_rows, 64)
    taken = last_rows(pack(rows, THREAD_POOL), first, THREAD_POOL)
    assert taken.num_rows == num_rows - first
    assert torch.equal(unpack(taken), rows[first:])


@pytest.mark.parametrize("wanted", [[3], [0, 31, 32, 39], [39, 0, 5], list(range(0, 40, 2))])
def test_some_rows_come_in_the_order_that_is_asked_for(wanted: list[int]) -> None:
    rows, indexes = random(40, 64), torch.tensor(wanted)
    assert torch.equal(unpack(some_rows(pack(rows, THREAD_POOL), indexes, THREAD_POOL)), rows[indexes])


@pytest.mark.parametrize("num_rows", COUNTS)
def test_norm_of_packed_rows(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is right even when threads split the rows of a group."""
    monkeypatch.setattr(norm_module, "MIN_SHARED_SIZE", 1)
    rows, norm = random(num_rows, 96), FusedRMSNorm(random(96, seed=1), 1e-5, THREAD_POOL)
    assert torch.equal(unpack(norm.packed(pack(rows, THREAD_POOL))), norm(rows))


@needs_tiles
@pytest.mark.parametrize("num_rows", COUNTS)
def test_linear_layers_of_packed_rows(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of up to 32 rows, full groups and a partial one, more rows than are multiplied at once. A bias
    belongs to output features: odd numbers of rows have one, even ones do not."""
    has_bias = num_rows % 2 == 1
    monkeypatch.setattr(linear_module, "MIN_SHARED_WEIGHTS", 1)
    rows, weight, other = random(num_rows, 1088), random(352, 1088, seed=1), random(352, 1088, seed=2)
    bias, other_bias = (random(352, seed=3), random(352, seed=4)) if has_bias else (None, None)
    summand = random(num_rows, 352, seed=5)
    linear, gate = (
        TiledLinear(weight, bias, THREAD_POOL),
        TiledGate(weight, other, bias, other_bias, THREAD_POOL),
    )
    packed = pack(rows, THREAD_POOL)
    assert torch.equal(unpack(linear.packed(packed)), linear(rows))
    assert torch.equal(linear.packed_precise(packed), linear.precise(rows))
    assert torch.equal(
        unpack(linear.packed_plus(packed, pack(summand, THREAD_POOL))), linear.plus(rows, summand)
    )
    assert torch.equal(unpack(gate.packed(packed)), gate(rows))


@needs_tiles
@pytest.mark.parametrize("max_bytes", [2 * 288 * 256, 2 * 256 * 1088 - 1])
def test_wide_rows_are_multiplied_a_range_of_features_at_a_time(
    max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of some panels wait for their next features; there are more rows and panels than fit at once."""
    rows, weight, other = random(300, 1088), random(700, 1088, seed=1), random(700, 1088, seed=2)
    linear, gate = TiledLinear(weight, None, THREAD_POOL), TiledGate(weight, other, None, None, THREAD_POOL)
    expected = linear.precise(rows), gate(rows)
    monkeypatch.setattr(linear_module, "MAX_BYTES_AT_ONCE", max_bytes)
    assert torch.equal(linear.precise(rows), expected[0])
    assert torch.equal(gate(rows), expected[1])


@needs_tiles
@pytest.mark.parametrize("size", [20, 300, 700])
@pytest.mark.parametrize("max_bytes", [2 * 64 * 96, 2 * 64 * 32])
def test_many_rows_are_multiplied_some_at_a_time(
    size: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One panel alone, whose sums the next rows need; whole rows, and ranges of their features."""
    rows, weight, other = random(300, 96), random(size, 96, seed=1), random(size, 96, seed=2)
    bias, other_bias, summand = random(size, seed=3), random(size, seed=4), random(300, size, seed=5)
    linear, gate = (
        TiledLinear(weight, bias, THREAD_POOL),
        TiledGate(weight, other, bias, other_bias, THREAD_POOL),
    )
    expected = linear.precise(rows), gate(rows), linear.plus(rows, summand)
    monkeypatch.setattr(linear_module, "MAX_ROWS_AT_ONCE", 64)
    monkeypatch.setattr(linear_module, "MAX_BYTES_AT_ONCE", max_bytes)
    found = linear.precise(rows), gate(rows), linear.plus(rows, summand)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@needs_tiles
def test_logits_are_rows_of_any_number_of_tokens() -> None:
    rows, head = random(40, 64), TiledLinear(random(77, 64, seed=1), None, THREAD_POOL)
    logits = head.packed_precise(pack(rows, THREAD_POOL))
    assert logits.shape == (40, 77)
    assert torch.equal(logits, head.precise(rows))


@needs_tiles
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("has_norm", [False, True])
def test_attention_of_packed_rows(head_dim: int, has_norm: bool) -> None:
    """Halves of a head in one block and in several; the caches are left alike."""
    kernel = attention_kernel(head_dim, "bfloat16")
    table = torch.rand(96, head_dim // 2, generator=torch.Generator().manual_seed(7))
    attention = CpuAttention(kernel, THREAD_POOL, 4, 2, head_dim, table.cos(), table.sin(), head_dim**-0.5)
    norm = HeadNorm(random(6, head_dim, seed=1), 1e-6) if has_norm else None
    caches = []
    qkv = random(75, 8 * head_dim)
    results = []
    for is_packed in (False, True):
        cache = empty_cache(9, 16, 2, head_dim, torch.bfloat16)
        cache.layers[0].zero_()
        spans = (SequenceRows(0, 70, 0, [4, 5, 6, 0, 1]), SequenceRows(70, 5, 11, [8]))
        step = attention.prepare(AttentionStep(spans, cache), slice(0, 0))
        if is_packed:
            results.append(unpack(step.attend_packed(0, pack(qkv, THREAD_POOL), norm, None)))
        else:
            results.append(step.attend(0, qkv.clone(), norm, None))
        caches.append(cache.layers[0])
    assert torch.equal(*results)
    assert torch.equal(*caches)
    assert results[0].abs().max() > 0.1


@needs_tiles
def test_no_rows_are_no_work() -> None:
    """A step that only fills the cache has no rows after its last attention."""
    rows, linear = random(40, 64), TiledLinear(random(64, 64, seed=1), None, THREAD_POOL)
    none = last_rows(pack(rows, THREAD_POOL), 40, THREAD_POOL)
    assert linear.packed_plus(none, none).num_rows == 0
    assert linear.packed_precise(none).shape == (0, 64)
