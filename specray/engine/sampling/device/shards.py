"""Draws of a group whose ranks have the logits of some tokens each: they exchange their best alone.

A draw is an argmax, so it is the best of the ranks' bests: two numbers of each row instead of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specray.engine.sampling.device.kernels import Kernels
from specray.engine.sampling.device.rows import RowTable, key_words
from specray.engine.sampling.device.upload import Upload
from specray.engine.sampling.noise import NoiseKey

SHARD_MULTIPLE = 4
"""Divisor of every rank's first token id: a Philox block holds the words of as many."""
_ROW_LEN = 4


class ShardDraws(NamedTuple):
    """What draws of some rows depend on; nothing is cut, forbidden or tested."""

    keys: Sequence[NoiseKey | None]
    """Key of each row's noise; None: it has none."""
    divisors: Sequence[float]
    """Temperature of each row; 1 for a greedy one."""

    def encode(self) -> list[int]:
        """The draws as integers."""
        divisors = np.array(self.divisors, np.float64).view(np.int64)
        encoded: list[int] = np.column_stack((key_words(self.keys), divisors)).reshape(-1).tolist()
        return encoded


class ShardDrawer:
    """One rank's part of the draws.

    Args:
        first_token_id: of the rank's logits.
    """

    def __init__(self, kernels: Kernels, first_token_id: int) -> None:
        assert first_token_id % SHARD_MULTIPLE == 0, first_token_id
        self._kernels = kernels
        self._first_token_id = first_token_id

    def best(self, logits: Tensor, encoded: Sequence[int]) -> Tensor:
        """The best of the rank's tokens: float64 ``[num_rows, 2]``, score and token id."""
        upload = Upload()
        words = np.array(encoded, np.int64).reshape(-1, _ROW_LEN)
        keys = upload.add(words[:, :3])
        divisors = upload.add(np.ascontiguousarray(words[:, 3]).view(np.float64))
        sent = upload.send(logits.device)
        none = torch.zeros(len(words), dtype=torch.float64, device=logits.device)
        table = RowTable(sent[keys], sent[divisors], none.long(), none + 1.0, none, cuts=False)
        own = logits.float().contiguous()
        scores, token_ids = self._kernels.draw_best(own, table, self._first_token_id)
        return torch.stack((scores, token_ids.double()), -1)


def best_of_ranks(parts: Tensor) -> list[int]:
    """Token ids from what all ranks found best, ``[world_size, num_rows, 2]``; of equal ones the first."""
    winner = parts[..., 0].argmax(0)
    token_ids: list[float] = parts[..., 1].gather(0, winner[None])[0].cpu().tolist()
    return [int(token_id) for token_id in token_ids]
