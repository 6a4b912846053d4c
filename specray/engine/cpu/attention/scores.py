"""Dot products of queries with a tile of sixteen keys, without horizontal sums.

Each token's products stay in a register of their own; then two registers are folded into one, repeatedly,
until one register holds a sum per token. The order of summation depends on the head size alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

TILE = 16
"""Tokens per tile."""
_INT32, _INT64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()


def scores_kernel(head_dim: int) -> Any:
    """Makes ``(query, other, tile, out, other_out)``, which multiplies two queries with a tile of keys.

    Arguments are addresses of float32: ``tile`` is ``[16, head_dim]``, outputs are ``[16]``.
    """
    lanes = next(lanes for lanes in (16, 8, 4, 2, 1) if head_dim % lanes == 0)
    kind = ir.VectorType(_FLOAT, lanes)

    def at(builder: Any, address: Any, index: int) -> Any:
        byte = builder.add(address, ir.Constant(_INT64, 4 * index))
        return builder.inttoptr(byte, kind.as_pointer())

    def load(builder: Any, address: Any, index: int) -> Any:
        value = builder.load(at(builder, address, index))
        value.align = 4
        return value

    def product(builder: Any, query: Sequence[Any], key: Sequence[Any]) -> Any:
        name, signature = f"llvm.fma.v{lanes}f32", ir.FunctionType(kind, [kind] * 3)
        fma = cgutils.get_or_insert_function(builder.module, signature, name)
        total = builder.fmul(query[0], key[0])
        for x, y in zip(query[1:], key[1:], strict=True):
            total = builder.call(fma, [x, y, total])
        return total

    def folded(builder: Any, queries: Sequence[Sequence[Any]], tile: Any, tokens: Sequence[int]) -> list[Any]:
        """Returns a register per query, whose lanes hold partial sums of the tokens in turn."""
        if len(tokens) == 1:
            key = [load(builder, tile, tokens[0] * head_dim + part) for part in range(0, head_dim, lanes)]
            return [product(builder, query, key) for query in queries]
        distance = lanes // len(tokens)
        # Lanes whose bit is clear add the first's lane and the one `distance` above; others the second's,
        # below it.
        kept = [lane if not lane & distance else lanes + lane for lane in range(lanes)]
        added = [lane + distance if not lane & distance else lanes + lane - distance for lane in range(lanes)]
        masks = [ir.Constant(ir.VectorType(_INT32, lanes), mask) for mask in (kept, added)]
        firsts = folded(builder, queries, tile, tokens[::2])
        seconds = folded(builder, queries, tile, tokens[1::2])
        return [
            builder.fadd(*(builder.shuffle_vector(first, second, mask) for mask in masks))
            for first, second in zip(firsts, seconds, strict=True)
        ]

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        *query_addresses, tile, out, other_out = args
        queries = [
            [load(builder, query, part) for part in range(0, head_dim, lanes)] for query in query_addresses
        ]
        for first in range(0, TILE, lanes):
            sums = folded(builder, queries, tile, range(first, first + lanes))
            for value, address in zip(sums, (out, other_out), strict=True):
                builder.store(value, at(builder, address, first)).align = 4
        return context.get_dummy_value()

    def scores(context: Any, query: Any, other: Any, tile: Any, out: Any, other_out: Any) -> Any:
        return types.void(*[types.int64] * 5), code

    return intrinsic(scores)
