"""Comparisons of a device's attention kernels with torch's operators, for the interpreter and for a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from specray.engine.attention.base import HeadNorm
from specray.engine.attention.packed import make_batch
from specray.engine.attention.paged import AttendPaged, PagedAttention, store_rows
from specray.engine.attention.select import gathered
from specray.engine.model.operators_torch import rotary_tables
from tests.gpu.block_cases import Case, block_cache, sequence_rows
from tests.unit.engine.attention.test_trees import SHAPE, torch_tables
from tests.unit.engine.attention.test_trees import attend as attend_tree
from tests.unit.engine.attention.trees import Tree, random_rows
from tests.unit.engine.attention.trees import expected as expected_of_tree


def check_case(
    attend: AttendPaged, case: Case, device: torch.device, dtype: torch.dtype, atol: float
) -> None:
    """A kernel attends as torch's operators do."""
    rows = sequence_rows(case)
    cache = block_cache(case, dtype)
    shape = case.shape
    query = torch.randn(sum(item.num_rows for item in rows), shape.num_heads, shape.head_dim).to(dtype)
    options = {"block_size": case.block_size, "scale": shape.scale, "window": case.window}
    layer = cache.layers[0]
    if case.has_sinks:
        options["sinks"] = torch.linspace(-3.0, 5.0, shape.num_heads)
    batch = make_batch(rows, case.block_size, query.device)
    expected = gathered(shape)(query.double(), layer.double(), batch, **options)  # type: ignore[arg-type]
    batch = make_batch(rows, case.block_size, device)
    if case.has_sinks:
        options["sinks"] = torch.linspace(-3.0, 5.0, shape.num_heads, device=device)
    output = attend(query.to(device), layer.to(device), batch, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(output.double().cpu(), expected, atol=atol, rtol=0)


def check_tree(attend: AttendPaged, tree: Tree, device: torch.device) -> None:
    """A kernel attends to a tree as a dense mask in float64 has it."""
    cos, sin = (table.to(device) for table in torch_tables())
    rotary = rotary_tables(cos, sin, torch.float32)
    attention = PagedAttention(rotary, SHAPE, attend)
    output = attend_tree(attention, tree, torch.float32, 16, device)[:-1]
    reference = expected_of_tree(tree, random_rows(tree, SHAPE), SHAPE)
    torch.testing.assert_close(output.double().cpu(), reference, atol=1e-5, rtol=0)


def check_store(case: Case, device: torch.device) -> None:
    """The kernel norms, rotates and stores as torch's operators do."""
    # Not before a test runs: without triton they are collected all the same.
    from specray.engine.attention import store_triton

    shape, num_rows = case.shape, 3
    num_normed = shape.num_heads + shape.num_kv_heads
    heads = torch.randn(num_rows, num_normed + shape.num_kv_heads, shape.head_dim, device=device)
    cos, sin = torch.randn(2, num_rows, 1, shape.head_dim, device=device)
    slots = torch.tensor([7, 0, 5], device=device)
    # So far below 1 that it matters what is added to the mean.
    head_norm = HeadNorm(torch.rand(num_normed, shape.head_dim, device=device) + 0.5, 0.3)
    for own in (None, head_norm, replace(head_norm, eps=1e-6)):
        caches = [block_cache(case).layers[0].to(device) for _ in range(2)]
        queries = [
            store(heads.clone(), cache, slots, cos, sin, own)
            for store, cache in zip((store_rows, store_triton.store_rows), caches, strict=True)
        ]
        torch.testing.assert_close(queries[1], queries[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=1e-5)
