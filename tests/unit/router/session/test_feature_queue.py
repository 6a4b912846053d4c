"""Checks features that wait for the draft: how many there are at most, and which no question can bring."""

from __future__ import annotations

from specray.feature_rows import ITEM_BYTES, MAX_FEATURE_BYTES, FeatureRows, max_rows
from specray.router.draft_model.budgets import FeatureRoom, needs_chunk
from specray.router.session.sync import FeatureQueue
from tests.unit.router.session.harness import new_session

SIZE = MAX_FEATURE_BYTES // ITEM_BYTES // 4
"""Numbers of a row of which a message has 4."""


def rows(first: int, num_rows: int) -> FeatureRows:
    return FeatureRows(first, num_rows, bytes(ITEM_BYTES * SIZE * num_rows))


def test_more_rows_than_two_messages_are_not_kept() -> None:
    queue = FeatureQueue(SIZE)
    assert max_rows(SIZE) == 4

    for first in range(0, 12, 4):
        queue.add(rows(first, 4))

    assert (queue.end, queue.num_bytes, queue.num_wanted) == (8, 2 * MAX_FEATURE_BYTES, 0)


def test_all_features_in_two_messages_go_in_a_chunk_first() -> None:
    session = new_session()
    session.committed[:] = range(7)
    session.features.feature_size, session.draft.synced_len = SIZE, 7
    session.features.add(rows(0, 4))
    session.features.add(rows(4, 2))
    assert session.has_features and not FeatureRoom().can_ask(session)

    assert needs_chunk(session)

    chunk = session.prefill_chunk_item(0)
    assert chunk.features is not None and chunk.features.end == 4
    session.draft.in_flight = None
    session.features.confirm(chunk.features)
    assert FeatureRoom().can_ask(session) and not needs_chunk(session)
