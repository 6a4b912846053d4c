"""The lowered decoder on CPU, taped: each shape of step runs as it is twice, then from a recording."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specray.engine.forward import CacheShape, Forward, Step
from specray.engine.fused import FusedAttention
from specray.engine.kernels.arena import Arena
from specray.engine.kernels.linear import TiledGate, TiledLinear
from specray.engine.kernels.norm import FusedRMSNorm
from specray.engine.kernels.tape import Tape
from specray.engine.lowered import LoweredForward
from specray.engine.lowering import TableEmbedding
from specray.engine.packed import PackedForward, packed

if TYPE_CHECKING:
    from specray.engine.cache import BlockCache

_MAX_ROWS = 320
"""With more, Python between the kernels is a small part."""
_MAX_TAPES = 256
_RUNS_BEFORE = 2
"""Of a shape, until it is recorded: of a target of 200M, that takes 10 ms and saves 1 to 2 of each run."""
_MAX_COUNTED = 4096

_Shape = tuple[int, int]
"""Rows, and how many of the last ones want logits."""


@dataclass(frozen=True, slots=True)
class _Taped:
    tape: Tape
    hidden: torch.Tensor
    logits: torch.Tensor
    """In the arena: they are there until another tape runs."""
    cache: BlockCache


class TapedForward:
    """Implements ``forward.Forward``. Not for two threads at once.

    Args:
        forward: of kernels only (``taped`` says of which that is so).
    """

    def __init__(
        self, forward: LoweredForward | PackedForward, attention: FusedAttention, table: torch.Tensor
    ) -> None:
        self._forward = forward
        self._attention = attention
        self._table = table
        self._arena = Arena()
        # Least recently used first.
        self._tapes: OrderedDict[_Shape, _Taped] = OrderedDict()
        self._num_runs: Counter[_Shape] = Counter()
        """Of shapes without a tape."""

    @property
    def name(self) -> str:
        return self._forward.name

    @property
    def cache_shape(self) -> CacheShape:
        return self._forward.cache_shape

    def __call__(self, step: Step) -> torch.Tensor:
        num_rows = len(step.token_ids)
        if num_rows > _MAX_ROWS or isinstance(step.logit_rows, torch.Tensor):
            return self._forward(step)
        first = 0 if step.logit_rows is None else step.logit_rows.start
        shape = (num_rows, num_rows - first)
        taped = self._tapes.get(shape)
        if taped is None or taped.cache is not step.attention.cache:
            return self._record(shape, step) if self._is_due(shape) else self._forward(step)
        self._tapes.move_to_end(shape)
        torch.index_select(self._table, 0, step.token_ids, out=taped.hidden)
        taped.tape.run(self._attention.prepare(step.attention, step.positions).call)
        # A copy, since the next step overwrites them.
        return taped.logits.clone()

    def _is_due(self, shape: _Shape) -> bool:
        """Counts runs of a shape that has no tape: whether this one is to be recorded."""
        if len(self._num_runs) == _MAX_COUNTED:
            self._num_runs.clear()
        self._num_runs[shape] += 1
        return self._num_runs[shape] > _RUNS_BEFORE

    def _record(self, shape: _Shape, step: Step) -> torch.Tensor:
        team = self._attention.team
        tape = Tape(team, self._attention.kernel, self._arena)
        hidden = self._forward.embedding(step.token_ids)
        team.recorder = tape
        try:
            logits = self._forward.decode(hidden, step)
        finally:
            team.recorder = None
        tape.finish()
        self._tapes[shape] = _Taped(tape, hidden, logits, step.attention.cache)
        if len(self._tapes) > _MAX_TAPES:
            self._tapes.popitem(last=False)
        return logits.clone()


def taped(forward: Forward) -> Forward:
    """The forward, taped if it is made of kernels alone, else as it is."""
    if not isinstance(forward, LoweredForward) or not isinstance(forward.attention, FusedAttention):
        return forward
    norms: list[object] = [forward.final_norm]
    linears: list[object] = [forward.head]
    for layer in forward.layers:
        norms += [layer.input_norm, layer.post_attention_norm]
        linears += [layer.qkv, layer.output, layer.gate, layer.down]
    is_kernels = all(isinstance(norm, FusedRMSNorm) for norm in norms) and all(
        isinstance(linear, TiledLinear | TiledGate) for linear in linears
    )
    if not is_kernels or not isinstance(forward.embedding, TableEmbedding):
        return forward
    return TapedForward(packed(forward) or forward, forward.attention, forward.embedding.table)
