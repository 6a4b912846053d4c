"""Look-ups of single rows in quantised weights that lie in panels, as a tied head has them."""

from __future__ import annotations

import torch

from specray.engine.cpu.gemm.quantized.layout import Layout
from specray.engine.cpu.gemm.vector import PANEL
from specray.engine.weights.quantization import GROUP, Quantization


class QuantizedEmbedding:
    """Token ids to hidden states; implements ``decoder.Embedding``.

    Args:
        weight: panels of one weight (``layout.pack_panels``), which a head may share.
        dtype: of the hidden states.
    """

    def __init__(self, weight: torch.Tensor, format: Quantization, dtype: torch.dtype) -> None:
        layout = Layout(format)
        self._weight, self._dtype, self._has_minimums = weight, dtype, layout.has_minimums
        num_panels, _, num_groups, group_bytes = weight.shape
        self._words = weight.view(torch.int32).view(num_panels, num_groups, group_bytes // 4)
        self._halves = weight.view(torch.float16).view(num_panels, num_groups, group_bytes // 2)
        self._num_words = layout.num_words
        self._first_half = layout.scales_offset // 2
        self._shifts = torch.tensor(layout.shifts, dtype=torch.int32)
        self._is_signed = format is Quantization.INT8
        self._mask = (1 << (32 // layout.codes_per_word)) - 1

    @property
    def num_bytes(self) -> int:
        return self._weight.nbytes

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        panel, lane = (token_ids // PANEL)[:, None], (token_ids % PANEL)[:, None]
        groups = torch.arange(self._words.shape[1])[None]
        places = torch.arange(self._num_words) * PANEL
        words = self._words[panel[..., None], groups[..., None], places + lane[..., None]]
        codes = (words[..., None] >> self._shifts) & self._mask
        if self._is_signed:
            codes = codes.to(torch.int8)
        values = codes.view(len(token_ids), -1, GROUP).float()
        values *= self._halves[panel, groups, self._first_half + lane].float()[..., None]
        if self._has_minimums:
            values += self._halves[panel, groups, self._first_half + PANEL + lane].float()[..., None]
        return values.view(len(token_ids), -1).to(self._dtype)

    def into(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self(token_ids))
