"""All forwards and draws of a proposal as one captured piece of work: the host waits once for K tokens.

The host writes a step of few rows per sequence (what the sequence lacks, its last token included), its block
tables and the numbers that draws depend on. Everything else stays on the device: a draw gives the
token of the next forward, whose position and slot follow from those before. Rows of sequences that want fewer
tokens, or that belong to nobody, write to a spare slot.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.engine.attention.packed import BatchShape, DeviceBatch, HostBatch
from specray.engine.cache.blocks import BlockCache
from specray.engine.runner.cuda_graphs import SEQUENCES, Capture
from specray.engine.sampling.device.kernels import Kernels, processed
from specray.engine.sampling.device.rows import NO_NOISE, RowTable
from specray.engine.sampling.device.sampler import draw_truncated
from specray.engine.step import AttentionStep, Forward, PagedBatch, SequenceRows, Step

_log = logging.getLogger(__name__)

MAX_WIDTH = 2
"""Tokens that a sequence may lack: after a round, the last accepted token and the one after it."""
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8)
"""Draft tokens of a piece of work; longer proposals take several."""
_CUT_LENGTHS = (4, 8)
"""Draft tokens, rounded up, where tails are cut or distributions truncated."""
_LIKELY_LENGTHS = (4, 3, 5, 2, 6, 1, 8, 7)
"""Draft tokens of a piece of work, the likeliest number first."""
_LIKELY_SEQUENCES = 8
"""Sequences, at most, whose proposals are captured first."""
_LIKELY_CUT_SEQUENCES = 4
"""Sequences, at most, whose proposals with cut tails or truncated distributions are captured first."""


class LoopShape(NamedTuple):
    """A shape for which proposals are captured."""

    num_sequences: int
    num_tokens: int
    """Draft tokens of each sequence, at most."""
    cuts: bool = False
    """Whether tails are cut."""
    truncates: bool = False
    """Whether any token is drawn from a truncated distribution, for rejection verification."""


@dataclass(frozen=True, slots=True)
class LoopRow:
    """What one sequence's proposal depends on besides its tokens."""

    num_wanted: int
    """Draft tokens, at least 1."""
    key: tuple[int, int, int]
    """Words of the noise of the first draw, as a row table has them."""
    settings: tuple[float, float, float, float]
    """Divisor, top-k, top-p and log of min-p, as a row table has them."""
    truncated_key: tuple[int, int, int] | None = None
    """Key of the first draw from the truncated distribution; None: tokens are not drawn from it."""


class LoopAnswer(NamedTuple):
    """What was drawn, on the host; draws after those that a sequence wants mean nothing."""

    token_ids: list[list[int]]
    """Token of each draw and sequence: ``[num_tokens][num_sequences]``."""
    leads: list[list[float]]
    """How far each token leads, as ``draws.Draw`` has it."""
    truncated: list[list[list[float]]]
    """Support and probabilities, one after the other, of each draw and sequence; empty without truncation."""


def loop_shapes(max_num_sequences: int, max_num_tokens: int | None) -> list[LoopShape]:
    """All shapes of a draft's proposals, the likeliest first.

    Args:
        max_num_sequences: in one batch.
        max_num_tokens: draft tokens of a proposal, at most; None: any number.
    """
    most = LENGTHS[-1] if max_num_tokens is None else min(max_num_tokens, LENGTHS[-1])
    lengths = [length for length in _LIKELY_LENGTHS if length <= most]
    if max_num_tokens is not None:
        lengths = list(dict.fromkeys((most, *lengths)))
    # The last holds the longest proposal.
    cut_lengths = [length for index, length in enumerate(_CUT_LENGTHS) if most > (0, *_CUT_LENGTHS)[index]]
    sequences = [count for index, count in enumerate(SEQUENCES) if max_num_sequences > (0, *SEQUENCES)[index]]
    plain = [LoopShape(*each) for each in product(sequences, lengths)]
    cut = [
        LoopShape(count, length, cuts, truncates)
        for cuts, truncates in ((True, False), (False, True), (True, True))
        for count, length in product(sequences, cut_lengths)
    ]
    likely = [shape for shape in plain if shape.num_sequences <= _LIKELY_SEQUENCES]
    likely += [shape for shape in cut if shape.num_sequences <= _LIKELY_CUT_SEQUENCES]
    return list(dict.fromkeys((*likely, *plain, *cut)))


class _Numbers:
    """The numbers of all sequences as one array of words, on the host or on the device."""

    def __init__(self, words: Tensor) -> None:
        self.words = words
        """int64 ``[num_sequences, 12]``."""
        self.num_wanted = words[:, 0]
        self.is_truncated = words[:, 1]
        self.keys = words[:, 2:5]
        self.truncated_keys = words[:, 5:8]
        self.settings = words[:, 8:12].view(torch.float64)

    @classmethod
    def empty(cls, num_sequences: int, device: torch.device) -> _Numbers:
        """The numbers of sequences that want nothing."""
        numbers = cls(torch.zeros(num_sequences, 12, dtype=torch.int64, device=device))
        numbers.fill(())
        return numbers

    def fill(self, rows: Sequence[LoopRow]) -> None:
        """Writes the rows, and padding after them."""
        nothing = LoopRow(0, (0, 0, NO_NOISE), (1.0, 0.0, 1.0, -np.inf))
        padded = [*rows, *[nothing] * (len(self.words) - len(rows))]
        own = [row.truncated_key for row in padded]
        self.num_wanted.copy_(torch.tensor([row.num_wanted for row in padded]))
        self.is_truncated.copy_(torch.tensor([key is not None for key in own]))
        self.keys.copy_(torch.tensor([row.key for row in padded]))
        self.truncated_keys.copy_(torch.tensor([key or (0, 0, 0) for key in own]))
        self.settings.copy_(torch.tensor([row.settings for row in padded], dtype=torch.float64))

    def table(self, cuts: bool) -> RowTable:
        divisors, top_k, top_p, log_min_p = self.settings.T.contiguous().unbind(0)
        return RowTable(self.keys.contiguous(), divisors, top_k.long(), top_p, log_min_p, cuts)


@dataclass(frozen=True, slots=True)
class _PreparedProposal:
    host: HostBatch
    on_device: DeviceBatch
    numbers: _Numbers
    on_host: _Numbers
    run: Callable[[], Tensor]


class DraftLoop:
    """Runs proposals as captured work. Not for two threads at once.

    All is captured at the start: a capture takes many times what a proposal takes, for which a request would
    wait.

    Args:
        forward: whose attention reads ``AttentionStep.batch``.
        cache: with one block more than sequences use, its last, for rows that belong to nobody.
        max_model_len: most tokens of a sequence.
        kernels: that draw.
        capture: how work is captured.
        known: from a forward's logits to rows of all tokens that may be drawn.
        max_num_draft_probs: support of the truncated distribution under rejection verification.
    """

    def __init__(
        self,
        forward: Forward,
        cache: BlockCache,
        *,
        max_model_len: int,
        kernels: Kernels,
        capture: Capture,
        known: Callable[[Tensor], Tensor],
        max_num_draft_probs: int,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._device = cache.layers[0].device
        self._max_num_blocks = -(-max_model_len // cache.block_size)
        self._kernels = kernels
        self._capture = capture
        self._known = known
        self._max_num_draft_probs = max_num_draft_probs
        self._prepared: dict[LoopShape, _PreparedProposal] = {}
        self._chosen: dict[LoopShape, LoopShape | None] = {}
        """What ``shape_for`` has found, by what was asked for."""

    @property
    def shapes(self) -> tuple[LoopShape, ...]:
        return tuple(self._prepared)

    @torch.inference_mode()
    def prepare(
        self, shapes: Iterable[LoopShape], limit_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Captures shapes in their order, as far as time and memory go."""
        shapes, began = list(shapes), clock()
        for shape in shapes:
            if clock() - began >= limit_s:
                break
            try:
                self._prepared[shape] = self._make(shape)
            except RuntimeError as error:
                # torch's allocator has a type of its own for it; the driver, which keeps graphs, has not.
                if "out of memory" not in str(error):
                    raise
                _log.warning("no memory to capture proposals of %s: %s", shape, error)
                break
        self._chosen.clear()
        _log.log(
            logging.INFO if len(self._prepared) >= len(shapes) else logging.WARNING,
            "%d of %d proposals captured in %.1f s; others take larger ones, shorter ones, or single steps",
            len(self._prepared),
            len(shapes),
            clock() - began,
        )

    def shape_for(
        self, num_sequences: int, num_tokens: int, *, cuts: bool = False, truncates: bool = False
    ) -> LoopShape | None:
        """The smallest captured shape that holds a proposal, or as much of its beginning as any does.

        Returns:
            None where nothing was captured for that many sequences of this kind.
        """
        wanted = LoopShape(num_sequences, num_tokens, cuts, truncates)
        if wanted not in self._chosen:
            self._chosen[wanted] = self._choose(wanted)
        return self._chosen[wanted]

    def _choose(self, wanted: LoopShape) -> LoopShape | None:
        same = [shape for shape in self._prepared if shape[2:] == wanted[2:]]
        holding = [shape for shape in same if shape.num_sequences >= wanted.num_sequences]
        least = min((shape.num_sequences for shape in holding), default=0)
        fitting = [shape for shape in holding if shape.num_sequences == least]
        longer = [shape for shape in fitting if shape.num_tokens >= wanted.num_tokens]
        return min(longer, default=None) or max(fitting, default=None)

    def run(
        self,
        shape: LoopShape,
        sequences: Sequence[SequenceRows],
        token_ids: Sequence[int],
        rows: Sequence[LoopRow],
    ) -> LoopAnswer:
        """Computes what the sequences lack, then draws and computes their draft tokens; in inference mode.

        The last draft token that a sequence wants is drawn but not computed.

        Args:
            shape: a captured one.
            sequences: rows that each one lacks, at most ``MAX_WIDTH``, with blocks for its draft tokens.
            token_ids: of all rows.
            rows: of each sequence.
        """
        prepared = self._prepared[shape]
        prepared.host.fill(sequences, token_ids, num_ahead=[row.num_wanted - 1 for row in rows])
        prepared.on_host.fill(rows)
        prepared.on_device.load(prepared.host)
        prepared.numbers.words.copy_(prepared.on_host.words, non_blocking=True)
        answer: list[list[list[float]]] = prepared.run()[:, : len(rows)].cpu().tolist()
        return LoopAnswer(
            [[int(numbers[0]) for numbers in draw] for draw in answer],
            [[numbers[1] for numbers in draw] for draw in answer],
            [[numbers[2:] for numbers in draw] for draw in answer] if shape.truncates else [],
        )

    def _make(self, shape: LoopShape) -> _PreparedProposal:
        count = shape.num_sequences
        batch_shape = BatchShape(
            num_sequences=count,
            num_rows=count * MAX_WIDTH,
            max_num_blocks=self._max_num_blocks,
            max_rows=MAX_WIDTH,
        )
        host = HostBatch(batch_shape, block_size=self._cache.block_size, spare_slot=self._spare_slot)
        on_device = DeviceBatch(batch_shape, self._device)
        host.fill((), ())
        on_device.load(host)
        numbers = _Numbers.empty(count, self._device)
        # One copy of both to the device would need one tensor of both; two small ones cost the same to the K
        # forwards after them.
        on_host = _Numbers.empty(count, torch.device("cpu"))

        def work() -> Tensor:
            return self._loop(shape, on_device, numbers)

        return _PreparedProposal(host, on_device, numbers, on_host, self._capture(work))

    @property
    def _spare_slot(self) -> int:
        return (self._cache.num_blocks - 1) * self._cache.block_size

    def _loop(self, shape: LoopShape, on_device: DeviceBatch, numbers: _Numbers) -> Tensor:
        """What is captured. Returns float64 ``[num_tokens, num_sequences, 2 or more]``."""
        batch = on_device.batch()
        table = numbers.table(shape.cuts)
        last_rows = (batch.first_rows[1:] - 1).clamp(min=0).long()
        step = Step(on_device.token_ids, batch.positions, AttentionStep((), self._cache, batch), last_rows)
        draws = []
        for index in range(shape.num_tokens):
            draw = self._draw(shape, index, self._forward(step).logits, table, numbers)
            draws.append(draw)
            if index + 1 < shape.num_tokens:
                step = self._next_step(index, draw[:, 0].long(), batch, numbers.num_wanted)
        return torch.stack(draws)

    def _draw(
        self, shape: LoopShape, index: int, logits: Tensor, table: RowTable, numbers: _Numbers
    ) -> Tensor:
        """Draws one token of each sequence, with how far it leads and, where wanted, its distribution."""
        logits = self._known(logits).float().contiguous()
        own = replace(table, keys=_behind(table.keys, index))
        cut = self._kernels.cut(logits, own) if shape.cuts else None
        tokens, leads = self._kernels.draw(logits, own, cut, is_judged=True)
        # Token ids are exact in float64.
        columns = torch.stack((tokens.double(), leads.double()), -1)
        if not shape.truncates:
            return columns
        size = min(logits.shape[1], self._max_num_draft_probs)
        keys = _behind(numbers.truncated_keys, index)
        truncated = draw_truncated(self._kernels, processed(logits, own, cut), keys, size)
        chosen = torch.where(numbers.is_truncated > 0, truncated[:, 0], columns[:, 0])
        return torch.cat((chosen[:, None], columns[:, 1:], truncated[:, 1:]), -1)

    def _next_step(self, index: int, token_ids: Tensor, first: PagedBatch, num_wanted: Tensor) -> Step:
        is_active = num_wanted > index + 1
        positions = torch.where(is_active, first.lengths + index, 0).int()
        size = self._cache.block_size
        block = first.block_tables.gather(1, (positions // size).long()[:, None])[:, 0]
        slots = torch.where(is_active, block.long() * size + positions % size, self._spare_slot)
        batch = PagedBatch(
            torch.arange(len(positions) + 1, dtype=torch.int32, device=positions.device),
            positions + 1,
            first.block_tables,
            slots,
            positions,
            positions,
            positions,
            positions,
            torch.ones_like(slots),
            max_rows=1,
            has_masks=False,
        )
        return Step(token_ids, positions, AttentionStep((), self._cache, batch), None)


def _behind(keys: Tensor, count: int) -> Tensor:
    """Noise keys shifted by n positions."""
    seeds, positions, purposes = keys.unbind(-1)
    return torch.stack((seeds, positions + count, purposes), -1)
