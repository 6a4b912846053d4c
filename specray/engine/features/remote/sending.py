"""The target's side of a drafter elsewhere: rows of features for the verdicts that are to bring some."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specray.engine.cache.sequence import EngineSequence
from specray.engine.features.base import FeatureStore
from specray.engine.features.remote.wire import write_rows
from specray.feature_rows import ITEM_BYTES, MAX_FEATURE_BYTES, FeatureRows
from specray.types import VerifyItem

_log = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """Rows of one item."""

    place: int
    """Index of the item."""
    first: int
    num_rows: int


class FeatureSender:
    """Gives the features of kept tokens, whenever those were computed: they lie where the tap stored them.

    So nothing is remembered of what was sent: who has lost some asks for them again.

    Args:
        store: what the tap fills.
        max_bytes: most bytes of one step's rows, all together.
    """

    def __init__(self, store: FeatureStore, *, max_bytes: int = MAX_FEATURE_BYTES) -> None:
        self._store = store
        self.feature_size = store.rows.shape[1]
        """Numbers of a row."""
        self._max_rows = max(1, max_bytes // (ITEM_BYTES * self.feature_size))

    def rows(self, asked: Sequence[tuple[VerifyItem, EngineSequence]]) -> list[FeatureRows | None]:
        """Rows for each item, after its verdict; None: its draft has to wait. Never raises."""
        try:
            return self._rows(asked)
        except Exception:
            # Verdicts are worth more than what travels with them.
            _log.exception("no features were sent for %d requests", len(asked))
            return [None] * len(asked)

    def _rows(self, asked: Sequence[tuple[VerifyItem, EngineSequence]]) -> list[FeatureRows | None]:
        found: list[FeatureRows | None] = [None] * len(asked)
        shared = self._shared_out(asked)
        if not shared:
            return found
        pieces = [
            self._store.read_tokens(
                asked[each.place][1].block_table.block_ids, each.first, each.first + each.num_rows
            )
            for each in shared
        ]
        # One copy to the host for all.
        joined = write_rows(torch.cat(pieces))
        start = 0
        for each in shared:
            data = joined[start : start + each.num_rows].tobytes()
            found[each.place] = FeatureRows(each.first, each.num_rows, data)
            start += each.num_rows
        return found

    def _shared_out(self, asked: Sequence[tuple[VerifyItem, EngineSequence]]) -> list[_Wanted]:
        """Rows of each item that are there and fit: the rounds' first, then prompts'."""
        wanted = []
        for index, (item, sequence) in enumerate(asked):
            end = min(sequence.num_computed_tokens, len(sequence.token_ids))
            num_rows = min(item.num_features, end - item.first_feature)
            if num_rows > 0:
                wanted.append(_Wanted(index, item.first_feature, num_rows))
        left = self._max_rows
        shared = []
        for each in sorted(wanted, key=lambda each: each.num_rows):
            each = each._replace(num_rows=min(each.num_rows, left))
            left -= each.num_rows
            if each.num_rows:
                shared.append(each)
        return shared
