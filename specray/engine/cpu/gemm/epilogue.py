"""From a panel's sums to the output: bias, gate, residual, rounding.

Rows are finished between products of another panel (``amx``), which have a unit of their own. There each
instruction is one by which the processor sees less far ahead, so what is the same for all rows of a panel
is known before: an ending.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from specray.engine.cpu.gemm.rows import HEIGHT
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import kernel, vectors

PLAIN, PLUS, GATED = range(3)
"""What a layer does with its sums: nothing, add rows, or multiply with a gate whose sums lie before them."""


def finish_kernel() -> Any:
    """``(ending, first, last)``: finishes some of a panel's rows; from its last row on there are none.

    An ending is the kind; whether the output is float32; addresses of sums ``[num_rows, 32]``, bias, output
    and summand, of the panel's first row; bytes that the gate's sums lie before the others, as its bias lies
    one line before; numbers from row to row and from group to group of rows; how many rows and features.
    """
    single, half = vectors(PANEL, "float32"), vectors(PANEL, "bfloat16")
    one, one_half = vectors(1, "float32"), vectors(1, "bfloat16")
    load, store, splat, add, sub, mul, div, larger, exp = (
        single.load, single.store, single.splat, single.add, single.sub, single.mul, single.div, single.max,
        single.exp,
    )  # fmt: skip
    load_half, store_half, load_one, store_one = half.load, half.store, one.load, one.store
    load_one_half, store_one_half, add_one = one_half.load, one_half.store, one.add
    zero, unit, lowest = np.float32(0.0), np.float32(1.0), np.float32(-87.0)

    @kernel(forceinline=True)
    def gated(gate: Any, value: Any) -> Any:
        inverse = add(splat(unit), exp(sub(splat(zero), larger(gate, splat(lowest)))))
        return mul(div(gate, inverse), value)

    @kernel()
    def finish_part(ending: Any, row: int, at: int, value: Any) -> None:
        """Number by number: of a panel of which some is output."""
        kind, is_float, sums, _, out, summand, _, _, (_, width) = ending
        store(sums, row * PANEL, value)
        for place in range(width):
            number = load_one(sums, row * PANEL + place)
            if kind == PLUS:
                number = add_one(number, load_one_half(summand, at + place))
            if is_float:
                store_one(out, at + place, number)
            else:
                store_one_half(out, at + place, number)

    @kernel(forceinline=True)
    def finish(ending: Any, first: int, last: int) -> None:
        kind, is_float, sums, bias, out, summand, gate, (step, group_step), (num_rows, width) = ending
        for row in range(first, min(last, num_rows)):
            value = add(load(sums, row * PANEL), load(bias, 0))
            if kind == GATED:
                value = gated(add(load(sums - gate, row * PANEL), load(bias, -PANEL)), value)
            at = row // HEIGHT * group_step + row % HEIGHT * step
            if width < PANEL:
                finish_part(ending, row, at, value)
            else:
                if kind == PLUS:
                    value = add(value, load_half(summand, at))
                if is_float:
                    store(out, at, value)
                else:
                    store_half(out, at, value)

    return finish
