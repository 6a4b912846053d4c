"""GEMM epilogue, from a panel's sums to the output: bias, gate, residual, rounding.

With AMX, rows are finished between products of another panel, which run in the tile unit. There each extra
instruction shortens the processor's look-ahead, so everything that all rows of a panel share is computed once
before: the ``epilogue`` tuple.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specray.engine.activation import Activation, Clamp, Joint
from specray.engine.cpu.gemm.rows import HEIGHT
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.cpu.simd import kernel, vectors

_LINEAR = np.float32(2.0 * math.sqrt(2.0 / math.pi))
_CUBIC = np.float32(2.0 * math.sqrt(2.0 / math.pi) * 0.044715)
"""Coefficients of twice the hyperbolic tangent's argument in GELU."""
PLAIN, PLUS, GATED = range(3)
"""Kinds of layers by what they do with sums: nothing, add rows, multiply by a gate whose sums precede
them."""


def epilogue_kernel(joint: Joint = Activation.SILU, *, has_delta: bool = False) -> Any:
    """Makes ``(epilogue, first, last)``, which finishes those of a panel's rows that exist.

    An epilogue is: the kind; whether output and summand are float32 (else bfloat16); addresses of sums
    ``[num_rows, 32]``, bias, output and summand for the panel's first row; bytes by which the gate's sums
    precede the others (its bias precedes by one line); elements from row to row and from group to group; of
    what is added to sums (``low_rank``) the address, bytes from row to row, and bytes by which the gate's
    precede; numbers of rows and features.

    Args:
        joint: of gates.
        has_delta: whether float32 numbers are added to sums before all else; else they are not read.
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
    has_tanh, has_clamp = joint is Activation.GELU_TANH, isinstance(joint, Clamp)
    gain, limit = (np.float32(x) for x in ((joint.gain, joint.limit) if isinstance(joint, Clamp) else (1, 1)))

    @kernel(forceinline=True)
    def gated(gate: Any, value: Any) -> Any:
        exponent = gate
        if has_clamp:
            # The smaller of two numbers is the negative of the larger of theirs.
            none = splat(zero)
            gate = sub(none, larger(sub(none, gate), splat(-limit)))
            value = sub(none, larger(sub(none, larger(value, splat(-limit))), splat(-limit)))
            value, exponent = add(value, splat(unit)), mul(gate, splat(gain))
        if has_tanh:
            # (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)).
            cubic = add(mul(mul(gate, gate), splat(_CUBIC)), splat(_LINEAR))
            exponent = mul(gate, cubic)
        inverse = add(splat(unit), exp(sub(splat(zero), larger(exponent, splat(lowest)))))
        return mul(div(gate, inverse), value)

    @kernel()
    def finish_part(epilogue: Any, row: int, at: int, value: Any) -> None:
        """Finishes a row of a partial panel, element by element."""
        kind, is_float, sums, _, out, summand, _, _, _, (_, width) = epilogue
        store(sums, row * PANEL, value)
        for place in range(width):
            number = load_one(sums, row * PANEL + place)
            if is_float:
                if kind == PLUS:
                    number = add_one(number, load_one(summand, at + place))
                store_one(out, at + place, number)
            else:
                if kind == PLUS:
                    number = add_one(number, load_one_half(summand, at + place))
                store_one_half(out, at + place, number)

    @kernel(forceinline=True)
    def total(sums: int, row: int, delta: int, delta_step: int) -> Any:
        value = load(sums, row * PANEL)
        if has_delta:
            value = add(value, load(delta + row * delta_step, 0))
        return value

    @kernel(forceinline=True)
    def finish(epilogue: Any, first: int, last: int) -> None:
        kind, is_float, sums, bias, out, summand, gate, steps, deltas, (num_rows, width) = epilogue
        (step, group_step), (delta, delta_step, gate_delta) = steps, deltas
        for row in range(first, min(last, num_rows)):
            value = add(total(sums, row, delta, delta_step), load(bias, 0))
            if kind == GATED:
                gate_sums = total(sums - gate, row, delta - gate_delta, delta_step)
                value = gated(add(gate_sums, load(bias, -PANEL)), value)
            at = row // HEIGHT * group_step + row % HEIGHT * step
            if width < PANEL:
                finish_part(epilogue, row, at, value)
            else:
                if is_float:
                    if kind == PLUS:
                        value = add(value, load(summand, at))
                    store(out, at, value)
                else:
                    if kind == PLUS:
                        value = add(value, load_half(summand, at))
                    store_half(out, at, value)

    return finish
