"""Chooses experts from the products of a router, as a kernel: what ``layers.routing.Router`` does."""

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

(
    _PRODUCTS,
    _CHOSEN,
    _WEIGHTS,
    _SCRATCH,
    _BIAS,
    _NUM_ROWS,
    _NUM_EXPERTS,
    _NUM_CHOSEN,
    _HAS_SIGMOID,
    _IS_SCORED_LAST,
    _NUM_GROUPS,
    _NUM_KEPT,
    _NUM_SUMMED,
    _IS_NORMED,
    _IS_ROUNDED,
    _EPSILON,
    _FLOOR,
    _SCALE,
) = range(18)
_NUM_ARGS = 18
_NONE = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Choice:
    """How experts are chosen and weighed; the fields of ``layers.expert_config.Routing``."""

    num_chosen: int
    has_sigmoid: bool = False
    """Scores are sigmoids; else a softmax."""
    is_scored_last: bool = False
    """The score is that of the chosen ones alone."""
    num_groups: int = 1
    num_kept: int = 1
    num_summed: int = 1
    is_normed: bool = False
    is_rounded: bool = False
    """Weights are rounded to bfloat16."""
    epsilon: float = 0.0
    floor: float = 0.0
    scale: float = 1.0


def choose(
    products: torch.Tensor, bias: torch.Tensor | None, how: Choice, thread_pool: ThreadPool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, int64, and weights, float32, of the chosen experts, ``[num_rows, num_chosen]`` each.

    Of equal numbers the one of the lower expert counts as larger.

    Args:
        products: ``[num_rows, num_experts]``, float32 or bfloat16, contiguous.
        bias: added for the choice, float32 ``[num_experts]``, contiguous.
    """
    num_rows, num_experts = products.shape
    chosen = thread_pool.empty((num_rows, how.num_chosen), torch.int64)
    weights = thread_pool.empty((num_rows, how.num_chosen), torch.float32)
    scratch = thread_pool.empty(4 * num_experts, torch.float32)
    args = np.zeros(_NUM_ARGS, dtype=np.int64)
    args[:_EPSILON] = (
        *(products.data_ptr(), chosen.data_ptr(), weights.data_ptr(), scratch.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), num_rows, num_experts, how.num_chosen),
        *(how.has_sigmoid, how.is_scored_last, how.num_groups, how.num_kept, how.num_summed),
        *(how.is_normed, how.is_rounded),
    )
    args.view(np.float64)[_EPSILON:] = how.epsilon, how.floor, how.scale
    thread_pool.run(_kernel(str(products.dtype).removeprefix("torch.")), args.ctypes.data, 1)
    return chosen, weights


@kernel()
def _score(numbers: Any, has_sigmoid: int) -> None:
    """Scores in the place of products."""
    if has_sigmoid:
        for index in range(len(numbers)):
            numbers[index] = np.float32(1.0) / (np.float32(1.0) + math.exp(-numbers[index]))
        return
    largest, total = _NONE, np.float32(0.0)
    for index in range(len(numbers)):
        largest = max(largest, numbers[index])
    for index in range(len(numbers)):
        numbers[index] = math.exp(numbers[index] - largest)
        total += numbers[index]
    for index in range(len(numbers)):
        numbers[index] /= total


@kernel()
def _largest(numbers: Any, is_taken: Any, first: int, last: int) -> int:
    """The place of the largest number that is not taken, which it takes then; some are not."""
    best = -1
    for index in range(first, last):
        if is_taken[index] == 0 and (best < 0 or numbers[index] > numbers[best]):
            best = index
    is_taken[best] = np.float32(1.0)
    return best


@kernel()
def _drop_groups(numbers: Any, is_taken: Any, totals: Any, args: Any) -> None:
    """Minus infinity for all experts but those of the best groups."""
    num_groups, size = args[_NUM_GROUPS], len(numbers) // args[_NUM_GROUPS]
    for group in range(num_groups):
        totals[group] = np.float32(0.0)
        for _ in range(args[_NUM_SUMMED]):
            totals[group] += numbers[_largest(numbers, is_taken, group * size, (group + 1) * size)]
    is_taken[:] = 0
    for _ in range(args[_NUM_KEPT]):
        _largest(totals, is_taken, 0, num_groups)
    for group in range(num_groups):
        if is_taken[group] == 0:
            numbers[group * size : (group + 1) * size] = _NONE
    is_taken[:] = 0


@functools.cache
def _kernel(dtype: str) -> Kernel:
    stored, one = vectors(1, dtype), vectors(1, "float32")
    rounded = vectors(1, "bfloat16")
    load, keep, fetch = stored.load, one.store, one.load
    round_to, load_rounded = rounded.store, rounded.load

    def choose_all(address: int, part: int, num_parts: int, thread: int) -> None:
        args = carray(as_pointer(address), (_NUM_ARGS,), np.int64)
        numbers = carray(as_pointer(address), (_NUM_ARGS,), np.float64)
        num_rows, num_experts, num_chosen = args[_NUM_ROWS], args[_NUM_EXPERTS], args[_NUM_CHOSEN]
        scratch = carray(as_pointer(args[_SCRATCH]), (4, num_experts), np.float32)
        scores, choices, is_taken, totals = scratch[0], scratch[1], scratch[2], scratch[3]
        bias = carray(as_pointer(args[_BIAS]), (num_experts,), np.float32)
        all_chosen = carray(as_pointer(args[_CHOSEN]), (num_rows, num_chosen), np.int64)
        all_weights = carray(as_pointer(args[_WEIGHTS]), (num_rows, num_chosen), np.float32)
        for row in range(num_rows):
            for expert in range(num_experts):
                keep(args[_SCRATCH], expert, load(args[_PRODUCTS], row * num_experts + expert))
            if not args[_IS_SCORED_LAST]:
                _score(scores, args[_HAS_SIGMOID])
            for expert in range(num_experts):
                choices[expert] = scores[expert]
                if args[_BIAS]:
                    choices[expert] += bias[expert]
            is_taken[:] = 0
            if args[_NUM_GROUPS] > 1:
                _drop_groups(choices, is_taken, totals, args)
            chosen, weights = all_chosen[row], all_weights[row]
            for place in range(num_chosen):
                chosen[place] = _largest(choices, is_taken, 0, num_experts)
                weights[place] = scores[chosen[place]]
            if args[_IS_SCORED_LAST]:
                _score(weights, args[_HAS_SIGMOID])
            if args[_IS_NORMED]:
                total = np.float32(0.0)
                for place in range(num_chosen):
                    total += weights[place]
                total = max(np.float32(total + np.float32(numbers[_EPSILON])), np.float32(numbers[_FLOOR]))
                for place in range(num_chosen):
                    weights[place] /= total
            for place in range(num_chosen):
                weights[place] *= np.float32(numbers[_SCALE])
                if args[_IS_ROUNDED]:
                    at = row * num_chosen + place
                    round_to(args[_SCRATCH], 0, fetch(args[_WEIGHTS], at))
                    keep(args[_WEIGHTS], at, load_rounded(args[_SCRATCH], 0))

    return Kernel(f"experts-choose-{dtype}", _NUM_ARGS, lambda: choose_all)
