"""Tensors of a recording reuse the memory of freed tensors, and of no others."""

from __future__ import annotations

import gc

import torch

from specray.engine.cpu.memory_pool import MemoryPool


def started() -> MemoryPool:
    memory_pool = MemoryPool()
    memory_pool.begin()
    return memory_pool


def test_room_of_a_tensor_that_is_gone_is_used_next() -> None:
    memory_pool = started()
    first = memory_pool.empty((3, 64), torch.float32)
    address = first.data_ptr()
    del first
    assert memory_pool.empty((6, 64), torch.bfloat16).data_ptr() == address


def test_a_view_keeps_the_room_of_its_tensor() -> None:
    memory_pool = started()
    view = memory_pool.empty((3, 64), torch.float32)[1:].view(-1, 32)
    gc.collect()
    other = memory_pool.empty((3, 64), torch.float32)
    assert abs(other.data_ptr() - (view.data_ptr() - 256)) >= 3 * 64 * 4
    address = view.data_ptr() - 256
    del view
    assert memory_pool.empty((3, 64), torch.float32).data_ptr() == address


def test_tensors_that_live_at_once_do_not_overlap() -> None:
    memory_pool = started()
    tensors = [
        memory_pool.empty((rows, 100), dtype)
        for rows in (1, 7, 33)
        for dtype in (torch.bfloat16, torch.float32)
        for _ in range(3)
    ]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert [float(tensor.min()) for tensor in tensors] == list(range(18))
    assert [float(tensor.max()) for tensor in tensors] == list(range(18))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)


def test_a_new_recording_begins_where_the_last_one_did() -> None:
    memory_pool = started()
    kept = [memory_pool.empty((8, 64), torch.float32) for _ in range(4)]
    memory_pool.begin()
    again = [memory_pool.empty((8, 64), torch.float32) for _ in range(4)]
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in kept]
    # Memory that an older recording frees is not reused by the new one.
    del kept
    assert memory_pool.empty((8, 64), torch.float32).data_ptr() not in {tensor.data_ptr() for tensor in again}


def test_more_than_there_is_room_for_lies_elsewhere_and_leaves_what_was_there() -> None:
    memory_pool = started()
    small = memory_pool.empty(1000, torch.uint8)
    small.fill_(7)
    num_bytes = memory_pool.num_bytes
    large = memory_pool.empty(5 * num_bytes, torch.uint8)
    large.fill_(9)
    assert int(small.min()) == int(small.max()) == 7
    assert memory_pool.num_bytes == 6 * num_bytes


def test_nothing_needs_no_room() -> None:
    memory_pool = started()
    assert memory_pool.empty((0, 64), torch.float32).shape == (0, 64)
    assert memory_pool.num_bytes == 0
