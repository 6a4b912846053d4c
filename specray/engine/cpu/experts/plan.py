"""Sorts rows by expert in memory of a fixed size, and adds up what experts give: graphs can hold both.

A row and one of its experts are a *pair*, number ``row * num_chosen + place``. The pairs of an expert have
places one after the other, in rising order.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray

from specray.engine.cpu.simd import kernel, vectors
from specray.engine.cpu.thread_pool import Kernel, ThreadPool, as_pointer

LINE = 32
"""Numbers that are copied and added at once; rows have a multiple."""
_MIN_SHARED_SIZE = 65_536
"""Minimum numbers of all pairs for which a second thread pays off."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows each expert computes; kernels read it, and nobody on the host."""

    hits: torch.Tensor
    """int64 ``[1 + 3 * num_experts]``: how many experts are hit; which, their first places, their counts."""
    places: torch.Tensor
    """int64 ``[num_rows, num_chosen]``: of each pair."""
    num_experts: int

    @classmethod
    def of(
        cls,
        chosen: torch.Tensor,
        num_experts: int,
        thread_pool: ThreadPool,
        num_hit: torch.Tensor | None = None,
    ) -> Plan:
        """Plans int64 ``[num_rows, num_chosen]``, contiguous, each row's distinct.

        Args:
            num_hit: receives how many experts are hit, int32 ``[1]``.
        """
        assert chosen.is_contiguous(), "pairs must follow each other"
        hits = thread_pool.empty(1 + 3 * num_experts, torch.int64)
        places = thread_pool.empty((chosen.shape[0], chosen.shape[1]), torch.int64)
        told = 0 if num_hit is None else num_hit.data_ptr()
        addresses = chosen.data_ptr(), hits.data_ptr(), places.data_ptr(), told
        args = np.array([*addresses, chosen.numel(), num_experts], dtype=np.int64)
        thread_pool.run(_plan_kernel(), args.ctypes.data, 1)
        return cls(hits, places, num_experts)

    @property
    def num_rows(self) -> int:
        """Rows of the step: no expert has more."""
        return self.places.shape[0]

    @property
    def num_pairs(self) -> int:
        return self.places.numel()


@functools.cache
def _plan_kernel() -> Kernel:
    def plan(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (6,), np.int64)
        num_pairs, num_experts = args[4], args[5]
        chosen = carray(as_pointer(args[0]), (num_pairs,), np.int64)
        hits = carray(as_pointer(args[1]), (1 + 3 * num_experts,), np.int64)
        places = carray(as_pointer(args[2]), (num_pairs,), np.int64)
        experts, firsts, counts = (
            hits[1 : 1 + num_experts],
            hits[1 + num_experts : 1 + 2 * num_experts],
            hits[1 + 2 * num_experts :],
        )
        # Counts of all experts first, then next places of all, in the memory of what is written last.
        experts[:] = 0
        for pair in range(num_pairs):
            experts[chosen[pair]] += 1
        total = 0
        for expert in range(num_experts):
            firsts[expert], total = total, total + experts[expert]
        for pair in range(num_pairs):
            places[pair] = firsts[chosen[pair]]
            firsts[chosen[pair]] += 1
        num_hit = 0
        for expert in range(num_experts):
            count = experts[expert]
            if count:
                first = firsts[expert] - count
                experts[num_hit], firsts[num_hit], counts[num_hit] = expert, first, count
                num_hit += 1
        hits[0] = num_hit
        if args[3]:
            carray(as_pointer(args[3]), (1,), np.int32)[0] = num_hit

    return Kernel("experts-plan", 6, lambda: plan)


def spread(rows: torch.Tensor, plan: Plan, thread_pool: ThreadPool) -> torch.Tensor:
    """Copies the row of each pair to its place: ``[num_rows, size]`` to ``[num_pairs, size]``."""
    assert rows.is_contiguous(), "rows must follow each other"
    out = thread_pool.empty((plan.num_pairs, rows.shape[1]), rows.dtype)
    _run(_spread_kernel(), plan, rows, out, 0, rows.shape[1] * rows.itemsize // 4, thread_pool)
    return out


def add_up(outputs: torch.Tensor, weights: torch.Tensor, plan: Plan, thread_pool: ThreadPool) -> torch.Tensor:
    """Weighs and adds up what a row's experts gave, in the order of choice, in float32.

    Args:
        outputs: ``[num_pairs, size]``, by place.
        weights: float32 ``[num_rows, num_chosen]``, contiguous.

    Returns:
        ``[num_rows, size]``, of the outputs' type.
    """
    assert weights.is_contiguous(), "pairs must follow each other"
    out = thread_pool.empty((plan.num_rows, outputs.shape[1]), outputs.dtype)
    name = str(outputs.dtype).removeprefix("torch.")
    _run(_sum_kernel(name), plan, outputs, out, weights.data_ptr(), outputs.shape[1], thread_pool)
    return out


def add_rows(
    rows: torch.Tensor, summand: torch.Tensor, thread_pool: ThreadPool, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """``rows * sigmoid(gate) + summand`` in a tensor of its own, rounded as torch's operators round.

    Args:
        rows: ``[num_rows, size]``, contiguous, as the summand is.
        gate: ``[num_rows, 1]``, contiguous, of the rows' type; None: a factor of one.
    """
    assert rows.is_contiguous(), "rows must follow each other"
    assert summand.is_contiguous(), "rows must follow each other"
    out = thread_pool.empty((rows.shape[0], rows.shape[1]), rows.dtype)
    addresses = rows.data_ptr(), summand.data_ptr(), out.data_ptr(), 0 if gate is None else gate.data_ptr()
    args = np.array([*addresses, rows.shape[0], rows.shape[1]], dtype=np.int64)
    num_parts = thread_pool.size if rows.numel() >= _MIN_SHARED_SIZE else 1
    thread_pool.run(_add_kernel(str(rows.dtype).removeprefix("torch.")), args.ctypes.data, num_parts)
    return out


@dataclass(frozen=True, slots=True)
class RowSum:
    """Implements ``decoder.Projection`` for rows of the residual stream's size, on one rank."""

    thread_pool: ThreadPool

    def plus(self, rows: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
        return add_rows(rows, summand, self.thread_pool)


def _run(
    job: Kernel,
    plan: Plan,
    source: torch.Tensor,
    out: torch.Tensor,
    weights: int,
    size: int,
    thread_pool: ThreadPool,
) -> None:
    addresses = source.data_ptr(), out.data_ptr(), weights, plan.places.data_ptr()
    num_rows, num_chosen = plan.places.shape
    args = np.array([*addresses, num_rows, num_chosen, size], dtype=np.int64)
    is_shared = plan.num_pairs * size >= _MIN_SHARED_SIZE
    thread_pool.run(job, args.ctypes.data, thread_pool.size if is_shared else 1)


@functools.cache
def _spread_kernel() -> Kernel:
    line = vectors(LINE // 2)
    load, store = line.load, line.store

    def spread_rows(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (7,), np.int64)
        num_rows, num_chosen, size = args[4], args[5], args[6]
        places = carray(as_pointer(args[3]), (num_rows, num_chosen), np.int64)
        for row in range(num_rows * part // num_parts, num_rows * (part + 1) // num_parts):
            for choice in range(num_chosen):
                first = places[row, choice] * size
                for at in range(0, size, LINE // 2):
                    store(args[1], first + at, load(args[0], row * size + at))

    return Kernel("experts-spread", 7, lambda: spread_rows)


@functools.cache
def _sum_kernel(dtype: str) -> Kernel:
    wide, stored = vectors(LINE), vectors(LINE, dtype)
    load, store, splat, mul, add = stored.load, stored.store, wide.splat, wide.mul, wide.add
    zero = np.float32(0.0)

    @kernel()
    def sum_line(outputs: int, weights: Any, places: Any, row: int, size: int, at: int) -> Any:
        total = splat(zero)
        for choice in range(places.shape[1]):
            numbers = load(outputs, places[row, choice] * size + at)
            total = add(total, mul(numbers, splat(weights[row, choice])))
        return total

    def sum_rows(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (7,), np.int64)
        num_rows, num_chosen, size = args[4], args[5], args[6]
        places = carray(as_pointer(args[3]), (num_rows, num_chosen), np.int64)
        weights = carray(as_pointer(args[2]), (num_rows, num_chosen), np.float32)
        for row in range(num_rows * part // num_parts, num_rows * (part + 1) // num_parts):
            for at in range(0, size, LINE):
                store(args[1], row * size + at, sum_line(args[0], weights, places, row, size, at))

    return Kernel(f"experts-sum-{dtype}", 7, lambda: sum_rows)


@functools.cache
def _add_kernel(dtype: str) -> Kernel:
    stored, wide, one = vectors(LINE, dtype), vectors(LINE), vectors(1, dtype)
    load, store, add, mul, splat = stored.load, stored.store, wide.add, wide.mul, wide.splat
    load_one, keep_one, unit = one.load, vectors(1).store, np.float32(1.0)
    item_size = 2 if dtype == "bfloat16" else 4

    @kernel()
    def sigmoid(gate: int, row: int, room: int) -> Any:
        keep_one(room, 0, load_one(gate, row))
        number = carray(as_pointer(room), (1,), np.float32)[0]
        return np.float32(unit / (unit + np.float32(math.exp(-number))))

    def add_all(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (6,), np.int64)
        rows, summand, out, gate, num_rows, size = args[0], args[1], args[2], args[3], args[4], args[5]
        for row in range(num_rows * part // num_parts, num_rows * (part + 1) // num_parts):
            factor = sigmoid(gate, row, out + row * size * item_size) if gate else unit
            for at in range(row * size, (row + 1) * size, LINE):
                numbers = load(rows, at)
                if gate:
                    # What is stored is rounded.
                    store(out, at, splat(factor))
                    store(out, at, mul(numbers, load(out, at)))
                    numbers = load(out, at)
                store(out, at, add(load(summand, at), numbers))

    return Kernel(f"add-rows-{dtype}", 6, lambda: add_all)
