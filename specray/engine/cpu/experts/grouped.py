"""Products of all experts that are hit in one job, whose parts find out themselves whose rows they multiply.

A job has parts for as many experts as a step can hit; a part reads the step's plan, returns where fewer are
hit, and else runs a part of the expert's own kernel on its rows. So nothing waits for the routing, a graph
can hold the job, and threads share the experts that are hit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numba import carray
from numpy.typing import NDArray

from specray.engine.cpu.experts.plan import LINE, Plan, add_up, spread
from specray.engine.cpu.simd import kernel
from specray.engine.cpu.thread_pool import APART, MAX_PARTS, Kernel, ThreadPool, as_pointer, call_kernel

_PARTS_PER_THREAD = 16
"""Parts per thread of all experts together, at least: experts have different numbers of rows."""
MIN_SHARED_WEIGHTS = 262_144
"""Minimum weights of the experts that a step can hit for which a second thread pays off."""
_PLAN, _NUM_EXPERTS, _LAYERS, _PARTS_EACH, _ROWS_AT_ONCE, _ROWS_EACH, _MEMORY, _STEPS = range(8)
_NUM_STEPS = 3
_HEAD = _STEPS + _NUM_STEPS


@dataclass(frozen=True, slots=True)
class ArgPlaces:
    """Which arguments of a layer's kernel differ between experts; places in its arguments."""

    num_args: int
    num_rows: int
    layer: tuple[int, ...]
    """What is the layer's own: addresses of weights and biases."""
    rows: tuple[int, int, int]
    """Addresses of rows: those of an expert follow its first place. One may be there twice."""


class GroupableLayer(Protocol):
    """A layer made of one kernel, all of whose weights one address leads to."""

    @property
    def places(self) -> ArgPlaces: ...

    @property
    def kernel(self) -> Kernel: ...

    @property
    def args(self) -> NDArray[np.int64]:
        """Arguments of the kernel; those of a step are written by ``prepare_group``."""
        ...

    @property
    def num_panels(self) -> int:
        """Most parts of the kernel."""
        ...

    @property
    def num_weights(self) -> int: ...

    def prepare_group(self, rows: torch.Tensor, most: int, out: torch.Tensor) -> Prepared:
        """Sets ``args`` as if for an expert with the first ``most`` of all pairs' rows.

        Args:
            out: ``[num_pairs, whole panels]``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a step of a group works with."""

    steps: tuple[int, int, int]
    """Bytes from a row to the next of each of ``ArgPlaces.rows``; 0: where one is there twice."""
    kept: Sequence[torch.Tensor]
    """Memory that the arguments point to."""
    rows_at_once: int
    """Most rows of one run of the kernel."""
    rows_each: int = 1
    """Rows of the kernel for each row."""


class _Kind:
    """Experts whose layers are made of one kind of kernel.

    Args:
        layers: by the number of the expert.
    """

    def __init__(self, layers: Mapping[int, GroupableLayer], num_experts: int) -> None:
        # Its arguments are set anew in each call, of the group as of the layer itself.
        self.layers, self.any = layers, next(iter(layers.values()))
        places = self.any.places
        self.table = np.zeros((num_experts, 1 + len(places.layer)), dtype=np.int64)
        for expert, layer in layers.items():
            self.table[expert] = layer.kernel.address, *layer.args[list(places.layer)]
        self.kernel = _grouped_kernel(places)


class Group:
    """A linear layer, or a gated pair, of every expert.

    Args:
        layers: of one shape; each expert's own. Those of one kind are one job.
    """

    def __init__(self, layers: Sequence[GroupableLayer], thread_pool: ThreadPool) -> None:
        self._thread_pool, self.num_experts = thread_pool, len(layers)
        kinds: dict[ArgPlaces, dict[int, GroupableLayer]] = {}
        for expert, layer in enumerate(layers):
            kinds.setdefault(layer.places, {})[expert] = layer
        self._kinds = [_Kind(each, len(layers)) for each in kinds.values()]

    def __call__(self, rows: torch.Tensor, plan: Plan) -> torch.Tensor:
        """Multiplies each row by its expert.

        Not thread-safe.

        Args:
            rows: ``[num_pairs, in_features]``, by place; zeros fill up the last line.

        Returns:
            ``[num_pairs, size]``, by place; zeros fill up the last panel.
        """
        width = self._kinds[0].any.num_panels * LINE
        out = self._thread_pool.empty((len(rows), width), rows.dtype)
        for kind in self._kinds:
            self._run(kind, rows, plan, out)
        return out

    def _run(self, kind: _Kind, rows: torch.Tensor, plan: Plan, out: torch.Tensor) -> None:
        pool, layer = self._thread_pool, kind.any
        prepared = layer.prepare_group(rows, plan.num_rows, out)
        most_hit = min(self.num_experts, plan.num_pairs)
        parts_each = 1
        if most_hit * layer.num_weights >= MIN_SHARED_WEIGHTS and pool.size > 1:
            wanted = max(2 * pool.size, -(-_PARTS_PER_THREAD * pool.size // most_hit))
            parts_each = max(1, min(wanted, layer.num_panels, (MAX_PARTS - 1) // most_hit))
        memory = pool.empty(pool.size * APART, torch.uint8)
        head = (
            *(plan.hits.data_ptr(), plan.num_experts, kind.table.ctypes.data, parts_each),
            *(prepared.rows_at_once, prepared.rows_each, memory.data_ptr(), *prepared.steps),
        )
        args = np.concatenate((np.array(head, dtype=np.int64), layer.args))
        is_alone = parts_each == 1 and most_hit * layer.num_weights < MIN_SHARED_WEIGHTS
        if is_alone:
            # One part goes through all experts: no other thread is woken for so little.
            args[_PARTS_EACH] = 0
        pool.run(kind.kernel, args.ctypes.data, 1 if is_alone else most_hit * parts_each)


@functools.cache
def _grouped_kernel(places: ArgPlaces) -> Kernel:
    num_args, at_num_rows = places.num_args, places.num_rows
    layer_places = np.array(places.layer, dtype=np.int64)
    row_places = np.array(places.rows, dtype=np.int64)
    num_numbers, num_own = _HEAD + num_args, 1 + len(places.layer)

    def make() -> Any:
        @kernel()
        def run_expert(address: int, slot: int, piece: int, num_pieces: int, thread: int) -> None:
            head = carray(as_pointer(address), (num_numbers,), np.int64)
            num_experts = head[_NUM_EXPERTS]
            hits = carray(as_pointer(head[_PLAN]), (1 + 3 * num_experts,), np.int64)
            if slot >= hits[0]:
                return
            expert, first = hits[1 + slot], hits[1 + num_experts + slot]
            count = hits[1 + 2 * num_experts + slot]
            own_address = head[_MEMORY] + thread * APART
            own = carray(as_pointer(own_address), (num_args,), np.int64)
            layer = carray(as_pointer(head[_LAYERS] + 8 * num_own * expert), (num_own,), np.int64)
            if layer[0] == 0:
                # It is of another kind.
                return
            for index in range(num_args):
                own[index] = head[_HEAD + index]
            for index in range(num_own - 1):
                own[layer_places[index]] = layer[1 + index]
            begin = 0
            while begin < count:
                num_rows = min(head[_ROWS_AT_ONCE], count - begin)
                own[at_num_rows] = num_rows * head[_ROWS_EACH]
                for index in range(_NUM_STEPS):
                    step, place = head[_STEPS + index], row_places[index]
                    if step:
                        own[place] = head[_HEAD + place] + (first + begin) * step
                call_kernel(layer[0], own_address, piece, num_pieces, thread)
                begin += num_rows

        def grouped(address: int, part: int, num_parts: int, thread: int) -> None:
            head = carray(as_pointer(address), (num_numbers,), np.int64)
            parts_each = head[_PARTS_EACH]
            if parts_each:
                run_expert(address, part // parts_each, part % parts_each, parts_each, thread)
            else:
                hits = carray(as_pointer(head[_PLAN]), (1,), np.int64)
                for slot in range(hits[0]):
                    run_expert(address, slot, 0, 1, thread)

        return grouped

    name = "-".join(map(str, (num_args, at_num_rows, *places.layer, *places.rows)))
    return Kernel(f"grouped-{name}", num_numbers, make)


@dataclass(frozen=True, slots=True)
class KernelExperts:
    """Implements ``layers.experts.ExpertMlps``."""

    gate: Group
    down: Group
    hidden_size: int
    thread_pool: ThreadPool

    @property
    def can_be_captured(self) -> bool:
        """Torch fills up rows that end within a line."""
        return self.hidden_size % LINE == 0

    @property
    def is_fixed(self) -> bool:
        return True

    def __call__(
        self,
        rows: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        hits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        plan = Plan.of(chosen, self.gate.num_experts, self.thread_pool, hits)
        rows = F.pad(rows, (0, -self.hidden_size % LINE)) if self.hidden_size % LINE else rows
        gated = self.gate(spread(rows, plan, self.thread_pool), plan)
        out = add_up(self.down(gated, plan), weights, plan, self.thread_pool)
        return out if out.shape[1] == self.hidden_size else out[:, : self.hidden_size].contiguous()
