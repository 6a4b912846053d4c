"""Rows of logits by all tokens that lead to them."""

from __future__ import annotations

from collections.abc import Sequence

from specray.engine.sampling.state import RowGroup, SamplingState, chain_rows
from specray.types import SamplingParams


def row_group(sampling: SamplingParams, token_ids: Sequence[int], num_rows: int) -> RowGroup:
    """The last rows of a sequence: the last one predicts the token after all of ``token_ids``."""
    first = len(token_ids) - num_rows + 1
    return chain_rows(SamplingState(sampling, token_ids[:first]), token_ids[first:])
