"""A trimmed vocabulary: logits of some token ids alone, processed as a row of all would be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specray.engine.sampling.processors import process_logits, shifts_logits
from specray.engine.sampling.state import RowGroup


class TrimmedVocabulary:
    """The token ids that a draft's head knows. All others count as impossible.

    Args:
        token_ids: of the logits, ascending.
        vocab_size: number of all token ids.
        device: device of the logits.
    """

    def __init__(self, token_ids: NDArray[np.int64], *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self.token_ids = token_ids
        """Token ids of the logits, ascending."""
        self._on_device = torch.from_numpy(token_ids).to(device)
        self._listed: list[int] = token_ids.tolist()

    def token_id(self, index: int) -> int:
        return self._listed[index]

    def process(self, logits: Tensor, groups: Sequence[RowGroup]) -> Tensor:
        """Applies each group's processors, as ``process_logits`` does; but a row may have no token left.

        What is done to single tokens, by id, is done to rows of all tokens; the others need none.

        Args:
            logits: ``[sum of num_rows, len(token_ids)]``, left unchanged.

        Returns:
            Of the same shape.
        """
        if not any(shifts_logits(group) for group in groups):
            return process_logits(logits, groups)
        return process_logits(self.whole(logits), groups).index_select(1, self._on_device)

    def whole(self, logits: Tensor) -> Tensor:
        """Rows of all tokens ``[num_rows, vocab_size]``, in which the others are impossible."""
        whole = logits.new_full((len(logits), self._vocab_size), -math.inf)
        return whole.index_copy_(1, self._on_device, logits)
