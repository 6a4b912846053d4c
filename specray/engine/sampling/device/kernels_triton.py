"""The parts of sampling in ``kernels``, with Triton. Importing it needs triton."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from specray.engine.sampling.device.cut_triton import (
    DIGIT_BITS,
    NUM_BINS,
    NUM_FLOATS,
    NUM_INTS,
    NUM_LOADS,
    SEARCH_STEPS,
    finish_cut_kernel,
    narrow_kernel,
)
from specray.engine.sampling.device.draw_triton import (
    draw_kernel,
    join_kernel,
    join_residual_kernel,
    join_sums_kernel,
    residual_kernel,
    sums_kernel,
)
from specray.engine.sampling.device.kernels import Kernels, Residuals
from specray.engine.sampling.device.philox_triton import gumbel_kernel, words_kernel
from specray.engine.sampling.device.rows import RowTable, TailCut

_LANES = 256
"""Lanes of a program that draws; each takes four tokens at a time."""
_CUT_LANES = 256
"""Lanes of a program that searches where tails are cut."""
_NUM_WORDS = 64
"""Words of a program that is asked for those of some tokens; as many as a draft's support has by default."""
_MAX_SPLITS = 64
"""Most parts of one row, a power of two."""


class TritonKernels(Kernels):
    """Kernels compiled by Triton.

    Args:
        num_processors: of the device; programs for four times as many are wanted.
        lanes: of each program, a power of two.
    """

    def __init__(self, num_processors: int, *, lanes: int = _LANES, cut_lanes: int = _CUT_LANES) -> None:
        self._num_wanted = 4 * num_processors
        self._lanes = lanes
        self._cut_lanes = cut_lanes

    def words(self, keys: Tensor, token_ids: Tensor) -> Tensor:
        num_rows, width = token_ids.shape
        token_ids = token_ids.contiguous()
        out = torch.empty_like(token_ids)
        grid = (num_rows, triton.cdiv(width, _NUM_WORDS))
        words_kernel[grid](keys.contiguous(), token_ids, out, width, SIZE=_NUM_WORDS)
        return out

    def gumbel(self, keys: Tensor, vocab_size: int) -> Tensor:
        out = torch.empty(len(keys), vocab_size, dtype=torch.float64, device=keys.device)
        grid = (len(keys), triton.cdiv(vocab_size, 4 * self._lanes))
        gumbel_kernel[grid](keys.contiguous(), out, vocab_size, LANES=self._lanes)
        return out

    def cut(self, logits: Tensor, rows: RowTable) -> TailCut:
        num_rows, vocab_size = logits.shape
        num_splits, split_size = self._splits(num_rows, vocab_size, NUM_LOADS * self._cut_lanes)
        device, num_slots = logits.device, 2 * SEARCH_STEPS * num_rows
        ints = torch.empty(num_slots, NUM_INTS, dtype=torch.int32, device=device)
        floats = torch.empty(num_slots, NUM_FLOATS, dtype=torch.float64, device=device)
        counts = torch.empty(num_slots, num_splits, NUM_BINS, dtype=torch.int32, device=device)
        weights = torch.empty(num_slots, num_splits, NUM_BINS, dtype=torch.float64, device=device)
        largest, totals = self.sums(logits, rows, None)
        states = (ints, floats, counts, weights)
        first, end = (0 if rows.has_top_k else SEARCH_STEPS), (1 + rows.has_top_p) * SEARCH_STEPS
        for step in range(first, end):
            shift = DIGIT_BITS * (SEARCH_STEPS - 1 - step % SEARCH_STEPS)
            narrow_kernel[(num_rows, num_splits)](
                logits, rows.divisors, rows.top_k, rows.top_p, largest, totals, *states, step, shift,
                vocab_size, split_size, LANES=self._cut_lanes, SPLITS=_MAX_SPLITS, num_warps=8,
            )  # fmt: skip
        cut = TailCut(
            torch.empty(num_rows, dtype=torch.float32, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
        )
        finish_cut_kernel[(num_rows,)](
            logits, rows.divisors, rows.top_k, rows.top_p, rows.log_min_p, largest, *states, *cut,
            vocab_size, num_splits, LANES=self._cut_lanes, SPLITS=_MAX_SPLITS,
        )  # fmt: skip
        return cut

    def draw(
        self, logits: Tensor, rows: RowTable, cut: TailCut | None, *, is_judged: bool
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = logits.shape
        num_splits, split_size = self._splits(num_rows, vocab_size, 4 * self._lanes)
        best, where = self._parts(num_rows, num_splits, logits.device)
        totals = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
        draw_kernel[(num_rows, num_splits)](
            logits, rows.keys, rows.divisors, *_cut_of(cut, rows), best, where, totals,
            vocab_size, split_size, 0, HAS_CUT=cut is not None, IS_JUDGED=is_judged, LANES=self._lanes,
        )  # fmt: skip
        tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        leads = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        join_kernel[(num_rows,)](
            best,
            where,
            totals,
            tokens,
            leads,
            num_splits,
            vocab_size,
            IS_JUDGED=is_judged,
            SPLITS=_MAX_SPLITS,
        )
        return tokens, leads

    def draw_best(self, logits: Tensor, rows: RowTable, first_token_id: int) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = logits.shape
        num_splits, split_size = self._splits(num_rows, vocab_size, 4 * self._lanes)
        best, where = self._parts(num_rows, num_splits, logits.device)
        draw_kernel[(num_rows, num_splits)](
            logits, rows.keys, rows.divisors, *_cut_of(None, rows), best, where, best,
            vocab_size, split_size, first_token_id // 4, HAS_CUT=False, IS_JUDGED=False, LANES=self._lanes,
        )  # fmt: skip
        # Parts are in the order of their tokens: of equal scores the first one's counts.
        scores, split = best.max(-1, keepdim=True)
        return scores[:, 0], where.gather(1, split)[:, 0].long() + first_token_id

    def sums(self, logits: Tensor, rows: RowTable, cut: TailCut | None) -> tuple[Tensor, Tensor]:
        num_rows, vocab_size = logits.shape
        num_splits, split_size = self._splits(num_rows, vocab_size, 4 * self._lanes)
        sums = torch.empty(num_rows, num_splits, dtype=torch.float64, device=logits.device)
        highest = torch.empty(num_rows, num_splits, dtype=torch.float32, device=logits.device)
        sums_kernel[(num_rows, num_splits)](
            logits, rows.divisors, *_cut_of(cut, rows), highest, sums, vocab_size, split_size,
            HAS_CUT=cut is not None, LANES=self._lanes,
        )  # fmt: skip
        largest, total = torch.empty_like(highest[:, 0]), torch.empty_like(sums[:, 0])
        join_sums_kernel[(num_rows,)](highest, sums, largest, total, num_splits, SPLITS=_MAX_SPLITS)
        return largest, total

    def draw_residuals(
        self,
        logits: Tensor,
        rows: RowTable,
        cut: TailCut | None,
        sums: tuple[Tensor, Tensor],
        residuals: Residuals,
    ) -> Tensor:
        count, vocab_size = len(residuals.rows), logits.shape[1]
        num_splits, split_size = self._splits(count, vocab_size, 4 * self._lanes)
        parts = (
            *self._parts(count, num_splits, logits.device),
            *self._parts(count, num_splits, logits.device),
        )
        residual_kernel[(count, num_splits)](
            logits, residuals.rows.contiguous(), residuals.keys.contiguous(), rows.divisors,
            *_cut_of(cut, rows), *sums, residuals.draft_probs, *parts, vocab_size, split_size,
            HAS_CUT=cut is not None, LANES=self._lanes,
        )  # fmt: skip
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        join_residual_kernel[(count,)](*parts, tokens, num_splits, vocab_size, SPLITS=_MAX_SPLITS)
        return tokens

    def _splits(self, num_rows: int, vocab_size: int, at_once: int) -> tuple[int, int]:
        """Number and size of the parts of a row; the size is a multiple of what a program takes at a time."""
        steps = triton.cdiv(vocab_size, at_once)
        wanted = max(1, min(_MAX_SPLITS, steps, self._num_wanted // num_rows))
        size = triton.cdiv(steps, wanted) * at_once
        return triton.cdiv(vocab_size, size), size

    def _parts(self, num_rows: int, num_splits: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return (
            torch.empty(num_rows, num_splits, dtype=torch.float64, device=device),
            torch.empty(num_rows, num_splits, dtype=torch.int32, device=device),
        )


def _cut_of(cut: TailCut | None, rows: RowTable) -> tuple[Tensor, Tensor]:
    return (rows.divisors, rows.keys) if cut is None else (cut.thresholds, cut.last_tied)
