"""Runs the Triton kernel on CPU over all cases; started by test_blocks with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from specray.engine.attention import triton as triton_attention
from specray.engine.attention.paged import PagedAttention, attend_gathered, make_batch, store_rows
from specray.engine.attention.select import Backend, Model, check_backend
from specray.engine.attention.triton import TritonAttend
from specray.engine.model import operators_triton as operators_triton
from specray.engine.model.operators_torch import rotary_tables
from specray.engine.step import HeadShape
from tests.gpu.block_cases import CASES, SOME_TREES, Case, block_cache, sequence_rows
from tests.unit.engine.attention.test_trees import SHAPE, torch_tables
from tests.unit.engine.attention.test_trees import attend as attend_tree
from tests.unit.engine.attention.trees import Tree, random_rows
from tests.unit.engine.attention.trees import expected as expected_of_tree


def check(case: Case, num_processors: int, dtype: torch.dtype, atol: float) -> None:
    rows = sequence_rows(case)
    cache = block_cache(case, dtype)
    shape = case.shape
    query = torch.randn(sum(item.num_rows for item in rows), shape.num_heads, shape.head_dim).to(dtype)
    batch = make_batch(rows, case.block_size, query.device)
    arguments = (query, cache.layers[0], batch)
    options = {"block_size": case.block_size, "scale": shape.scale, "window": case.window}
    expected = attend_gathered(*arguments, **options)  # type: ignore[arg-type]
    attend = TritonAttend(num_processors)
    output = attend(*arguments, **options)  # type: ignore[arg-type]
    torch.testing.assert_close(output, expected, atol=atol, rtol=0)


def check_tree(tree: Tree, num_processors: int) -> None:
    rotary = rotary_tables(*torch_tables(), torch.float32)
    attention = PagedAttention(rotary, SHAPE, TritonAttend(num_processors))
    output = attend_tree(attention, tree, torch.float32, 16)[:-1]
    reference = expected_of_tree(tree, random_rows(tree, SHAPE), SHAPE)
    torch.testing.assert_close(output.double(), reference, atol=1e-5, rtol=0)


def check_store(case: Case) -> None:
    shape = case.shape
    num_rows = 3
    heads = torch.randn(num_rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
    cos, sin = torch.randn(2, num_rows, 1, shape.head_dim)
    slots = torch.tensor([7, 0, 5])
    caches = [block_cache(case).layers[0] for _ in range(2)]
    queries = [
        store(heads.clone(), cache, slots, cos, sin)
        for store, cache in zip((store_rows, operators_triton.store_rows), caches, strict=True)
    ]
    torch.testing.assert_close(queries[1], queries[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=0)


if __name__ == "__main__":
    # So few places are split as in long sequences.
    triton_attention._MIN_SPLIT_PLACES = 32
    for each in CASES:
        check(each, 1, torch.float32, 1e-5)
        check(each, 64, torch.float32, 1e-5)
        check_store(each)
        print("agreed")
    for tree in SOME_TREES:
        check_tree(tree, 64)
        print("agreed")
    # The interpreter cannot compute with bfloat16.
    for dtype in (torch.float32, torch.float16):
        # What an engine does at its start before it trusts the kernels.
        operators_triton.check_gate(torch.device("cpu"), dtype)
        model = Model(HeadShape(6, 2, 32), dtype, torch.device("cpu"))
        check_backend(Backend("triton", TritonAttend(64), operators_triton.store_rows, 16), model)
        print("agreed")
