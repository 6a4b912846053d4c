"""Blocks have exactly one owner, whatever is reserved, truncated and released in whatever order."""

import os
import resource
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specray.bench.soak.memory import anonymous_bytes
from specray.engine import device
from specray.engine.cache.blocks import BlockAllocator, BlockCache, BlockTable, bytes_per_token
from specray.engine.step import CacheShape, LayerShape
from specray.errors import OutOfBlocksError


def test_allocate_exactly_all() -> None:
    allocator = BlockAllocator(3, 16)
    assert sorted(allocator.allocate(3)) == [0, 1, 2]
    assert allocator.num_free == 0


def test_one_too_many_changes_nothing() -> None:
    allocator = BlockAllocator(3, 16)
    first = allocator.allocate(2)
    with pytest.raises(OutOfBlocksError, match=r"2 cache blocks of 16 tokens are needed, 1 of 3 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1
    allocator.free(first)
    assert sorted(allocator.allocate(3)) == [0, 1, 2]


def test_a_block_freed_twice_is_refused_and_changes_nothing() -> None:
    allocator = BlockAllocator(4, 16)
    used = allocator.allocate(2)
    with pytest.raises(AssertionError):
        allocator.free([used[0], used[0]])
    allocator.free(used[:1])
    with pytest.raises(AssertionError):
        allocator.free(used)
    assert allocator.num_free == 3
    allocator.check_integrity()


def test_integrity_sees_a_lost_block() -> None:
    allocator = BlockAllocator(4, 16)
    allocator._blank.pop()
    with pytest.raises(AssertionError):
        allocator.check_integrity()


def test_integrity_sees_a_block_with_two_owners() -> None:
    allocator = BlockAllocator(4, 16)
    tables = [BlockTable(allocator), BlockTable(allocator)]
    tables[0].reserve(16)
    tables[1].block_ids = list(tables[0].block_ids)
    with pytest.raises(AssertionError, match="owners of the used blocks"):
        allocator.check_integrity(tables)


def test_integrity_sees_a_used_block_without_owner() -> None:
    allocator = BlockAllocator(4, 16)
    allocator.allocate(1)
    allocator.check_integrity()
    with pytest.raises(AssertionError):
        allocator.check_integrity([])


def test_a_full_block_needs_no_second() -> None:
    table = BlockTable(BlockAllocator(4, 16))
    table.reserve(16)
    assert (len(table.block_ids), table.capacity) == (1, 16)
    table.reserve(17)
    assert (len(table.block_ids), table.capacity) == (2, 32)


def test_truncate_keeps_the_block_of_the_last_token() -> None:
    allocator = BlockAllocator(4, 16)
    table = BlockTable(allocator)
    table.reserve(48)
    kept = table.block_ids[:2]
    table.truncate(17)
    assert table.block_ids == kept
    table.truncate(16)
    assert table.block_ids == kept[:1]
    table.truncate(40)
    assert table.block_ids == kept[:1], "truncate never grows"


def test_failed_reserve_keeps_what_was_there() -> None:
    allocator = BlockAllocator(2, 16)
    table = BlockTable(allocator)
    table.reserve(20)
    held = list(table.block_ids)
    with pytest.raises(OutOfBlocksError):
        table.reserve(33)
    assert table.block_ids == held
    allocator.check_integrity([table])


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["reserve", "truncate", "release"]), st.integers(0, 3), st.integers(0, 40)),
    max_size=60,
)


@settings(deadline=None, max_examples=80)
@given(operations=OPERATIONS, num_blocks=st.integers(1, 12), block_size=st.integers(1, 7))
def test_integrity_after_every_operation(
    operations: list[tuple[str, int, int]], num_blocks: int, block_size: int
) -> None:
    allocator = BlockAllocator(num_blocks, block_size)
    tables = [BlockTable(allocator) for _ in range(4)]
    num_held = [0] * 4  # the model: blocks that each table must hold
    for verb, index, num_tokens in operations:
        table, needed = tables[index], -(-num_tokens // block_size)
        if verb == "reserve":
            if needed - num_held[index] > num_blocks - sum(num_held):
                with pytest.raises(OutOfBlocksError):
                    table.reserve(num_tokens)
            else:
                table.reserve(num_tokens)
                num_held[index] = max(num_held[index], needed)
        elif verb == "truncate":
            table.truncate(num_tokens)
            num_held[index] = min(num_held[index], needed)
        else:
            table.release()
            num_held[index] = 0
        allocator.check_integrity(tables)
        assert [len(table.block_ids) for table in tables] == num_held
        assert allocator.num_free == num_blocks - sum(num_held)
    for table in tables:
        table.release()
    assert allocator.num_free == num_blocks


def make_cache(
    shape: CacheShape, num_blocks: int, block_size: int, dtype: torch.dtype = torch.bfloat16
) -> BlockCache:
    device = torch.device("cpu")
    return BlockCache(shape, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)


def small_cache() -> BlockCache:
    return make_cache(CacheShape(2, 2, 8), 3, 4, torch.float32)


def test_write_by_slice_and_by_index_are_the_same() -> None:
    by_slice, by_index = small_cache(), small_cache()
    keys_values = torch.randn(3, 4, 8)
    by_slice.write(1, slice(5, 8), keys_values)
    by_index.write(1, torch.tensor([5, 6, 7]), keys_values)
    assert torch.equal(by_slice.layers[1], by_index.layers[1])
    assert torch.equal(by_slice.keys[1][:, 0, 5:8].transpose(0, 1), keys_values[:, :2])
    assert torch.equal(by_slice.values[1][:, 0, 5:8].transpose(0, 1), keys_values[:, 2:])
    assert not by_slice.layers[0].any()


def test_copy_takes_every_layer() -> None:
    cache = small_cache()
    for layer in range(2):
        cache.write(layer, slice(0, 3), torch.randn(3, 4, 8))
    cache.copy(slice(0, 3), torch.tensor([8, 9, 10]))
    for layer in cache.layers:
        assert torch.equal(layer[8:11], layer[0:3])
        assert layer[0:3].any()


def test_layers_that_differ_and_keys_that_differ_from_values() -> None:
    """As of latents (no values), of latent attention expanded, and of layers with other heads."""
    layers = [LayerShape(1, 5, 0), LayerShape(2, 6, 4), LayerShape(3, 4, 4)]
    shape = CacheShape.of_layers(layers)
    cache = make_cache(shape, 3, 4, torch.float32)
    assert [list(keys.shape) for keys in cache.keys] == [[1, 1, 12, 5], [2, 1, 12, 6], [3, 1, 12, 4]]
    assert [list(values.shape) for values in cache.values] == [[1, 1, 12, 0], [2, 1, 12, 4], [3, 1, 12, 4]]
    rows = torch.arange(40.0).view(2, 20)
    cache.write(1, slice(5, 7), rows)
    cache.copy(torch.tensor([5, 6]), torch.tensor([9, 0]))
    for slot, row in ((5, rows[0]), (6, rows[1]), (9, rows[0]), (0, rows[1])):
        assert cache.keys[1][:, 0, slot].flatten().tolist() == row[:12].tolist()
        assert cache.values[1][:, 0, slot].flatten().tolist() == row[12:].tolist()
    assert sum(layer.nbytes for layer in cache.layers) == 12 * bytes_per_token(shape, torch.float32)
    assert bytes_per_token(shape, torch.bfloat16) == 2 * (5 + 20 + 24)
    assert CacheShape.of_layers(layers[2:] * 2) == CacheShape(2, 3, 4)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_taken_when_written_and_not_before() -> None:
    before = resident_bytes()
    cache = make_cache(CacheShape(4, 4, 64), 64, 1024)
    total = sum(layer.nbytes for layer in cache.layers)
    assert total == 2**28
    assert resident_bytes() - before < total // 8
    assert cache.layers[3].data_ptr() % 64 == 0
    assert not cache.layers[3][-1].any()
    # It is the process's own then: where memory is watched, it is not taken for shared with others.
    own_before = anonymous_bytes(os.getpid())
    cache.layers[0].fill_(1)
    own = anonymous_bytes(os.getpid())
    assert own is not None and own_before is not None and own - own_before > 0.9 * cache.layers[0].nbytes


LARGE = 2 << 20
"""Bytes of a large page; in one layer, of 2048 tokens with 4 kv heads of 64."""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("block_size", "most_bytes", "expected"),
    [
        (2048, 1 << 30, 2 * 4 * LARGE),  # all there is
        (2048, 7 * LARGE, 2 * 3 * LARGE),  # as many to each of two layers
        (2048, LARGE, 0),
        (2047, 1 << 30, 0),  # a sequence does not fill a large page
    ],
)
def test_memory_given_at_once(block_size: int, most_bytes: int, expected: int) -> None:
    cache = make_cache(CacheShape(2, 4, 64), 4, block_size)
    before = resident_bytes()
    cache.take_large_pages(most_bytes)
    cache.layers[0][:7] = 3
    assert cache.populate() == expected
    assert abs(resident_bytes() - before - expected) < 2 * LARGE
    assert (cache.layers[0][:7] == 3).all()
    assert not cache.layers[1].any()
    assert cache.populate() == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_given_aside_is_given_once() -> None:
    cache = make_cache(CacheShape(2, 4, 64), 4, 2048)
    cache.take_large_pages(1 << 30)
    before = resident_bytes()
    cache.populate_aside(0)
    cache.populate_aside(0)
    while any(thread.name == "specray-populate" for thread in threading.enumerate()):
        time.sleep(0.001)
    assert abs(resident_bytes() - before - 2 * 4 * LARGE) < 2 * LARGE


def test_who_waits_to_give_memory_does_not_keep_a_cache() -> None:
    cache = make_cache(CacheShape(2, 4, 64), 4, 2048)
    cache.take_large_pages(1 << 30)
    cache.populate_aside(60)
    alive = weakref.ref(cache)
    del cache
    assert alive() is None


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, None, 8_000 << 10),
        ("max", "5", 8_000 << 10),
        ("3000000", "1000000", 2_000_000),
        ("99000000", "1", 8_000 << 10),
        ("1000", "2000", 0),
    ],
)
def test_memory_at_hand_is_the_systems_within_the_containers_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, used: str | None, expected: int
) -> None:
    info = tmp_path / "meminfo"
    monkeypatch.setattr(device, "MEMORY_INFO", info)
    monkeypatch.setattr(device, "CGROUP_MEMORY", tmp_path)
    assert device.available_memory() == 0
    info.write_text("MemTotal:  16000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n")
    for name, text in (("max", limit), ("current", used)):
        if text is not None:
            (tmp_path / f"memory.{name}").write_text(text + "\n")
    assert device.available_memory() == expected


def test_bytes_per_token_is_what_the_tensors_take() -> None:
    cache = small_cache()
    total = sum(layer.nbytes for layer in cache.layers)
    assert total == 12 * bytes_per_token(CacheShape(2, 2, 8), torch.float32)
