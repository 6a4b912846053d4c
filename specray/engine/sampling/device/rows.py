"""What is one number for each row of logits: key of the noise, temperature, top-k, top-p, min-p."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specray.engine.sampling.device.upload import Sent, Upload, UploadPiece
from specray.engine.sampling.noise import NoiseKey, signed
from specray.engine.sampling.processors import cuts_tail, divisor_of
from specray.engine.sampling.state import RowGroup

NO_NOISE = -1
"""Purpose in the key of a row without noise."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """The numbers of each row, on the device."""

    keys: Tensor
    """int64 ``[num_rows, 3]``: seed, position and purpose, or ``NO_NOISE``."""
    divisors: Tensor
    """float64 ``[num_rows]``: the temperature; 1 for a greedy row."""
    top_k: Tensor
    """int64 ``[num_rows]``; 0: all."""
    top_p: Tensor
    """float64 ``[num_rows]``; 1: all."""
    log_min_p: Tensor
    """float64 ``[num_rows]``; minus infinity: none."""
    cuts: bool
    """Whether any row has a top-k, top-p or min-p."""
    has_top_k: bool = True
    """Whether any row may have a top-k: False spares the search."""
    has_top_p: bool = True
    """Whether any row may have a top-p: False spares the search."""


class TailCut(NamedTuple):
    """What top-k, top-p and min-p leave of each row: every logit above a threshold, and of those equal to it
    the ones up to a token id. Logits are those after the division by the temperature."""

    thresholds: Tensor
    """float32 ``[num_rows]``."""
    last_tied: Tensor
    """int32 ``[num_rows]``: last token id that is kept of those with the threshold's logit."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A row table that is yet to arrive."""

    keys: UploadPiece
    settings: UploadPiece
    """float64 ``[4, num_rows]``: divisors, top-k, top-p, log of min-p."""
    cuts: bool
    has_top_k: bool
    has_top_p: bool

    def table(self, sent: Sent) -> RowTable:
        """Returns the table, when its numbers have been sent."""
        divisors, top_k, top_p, log_min_p = sent[self.settings].unbind(0)
        return RowTable(
            sent[self.keys],
            divisors,
            top_k.long(),
            top_p,
            log_min_p,
            self.cuts,
            self.has_top_k,
            self.has_top_p,
        )


def plan_rows(upload: Upload, groups: Sequence[RowGroup], keys: Sequence[NoiseKey | None]) -> RowPlan:
    """Adds the numbers of all groups' rows to what is sent.

    Args:
        keys: of each row; None: it has no noise.
    """
    settings = np.array([row_settings(group) for group in groups], dtype=np.float64).reshape(-1, 4)
    by_row = np.repeat(settings, [group.num_rows for group in groups], axis=0)
    return RowPlan(
        upload.add(key_words(keys)),
        upload.add(by_row.T),
        any(cuts_tail(group.sampling) for group in groups),
        bool((settings[:, 1] > 0).any()),
        bool((settings[:, 2] < 1.0).any()),
    )


def key_words(keys: Sequence[NoiseKey | None]) -> NDArray[np.int64]:
    """Keys as a row table has them: ``[len(keys), 3]``."""
    rows = [
        (0, 0, NO_NOISE) if key is None else (signed(key.seed), key.position, key.purpose) for key in keys
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def row_settings(group: RowGroup) -> tuple[float, float, float, float]:
    """Divisor, top-k, top-p and log of min-p of a group's rows."""
    sampling = group.sampling
    if sampling.is_greedy:
        return 1.0, 0.0, 1.0, -math.inf
    log_min_p = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
    return divisor_of(sampling), float(max(0, sampling.top_k)), sampling.top_p, log_min_p
