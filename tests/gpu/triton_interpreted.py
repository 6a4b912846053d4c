"""Runs the Triton kernel on CPU over all cases; started by test_blocks with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch
from block_cases import CASES, Case, block_cache, sequence_rows

from specray.engine.blocks import attend_gathered, make_batch
from specray.engine.triton_blocks import TritonAttend


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


if __name__ == "__main__":
    from specray.engine import triton_blocks

    # So few places are split as in long sequences.
    triton_blocks._MIN_SPLIT_PLACES = 32
    for each in CASES:
        check(each, 1, torch.float32, 1e-5)
        check(each, 64, torch.float32, 1e-5)
        print("agreed")
