"""The rows of a step: whose they are, and which give logits."""

from __future__ import annotations

from collections.abc import Sequence

from specray.engine.inputs import SequenceInput
from specray.engine.step import SequenceRows


def single_rows(item: SequenceInput) -> SequenceRows:
    return SequenceRows(
        0,
        len(item.token_ids),
        item.start,
        item.block_ids,
        state_slot=item.state_slot,
        num_open=item.num_open,
        marks=item.marks,
    )


def token_ids_of(inputs: Sequence[SequenceInput]) -> list[int]:
    return [token for item in inputs for token in item.token_ids]


def sequence_rows(inputs: Sequence[SequenceInput]) -> list[SequenceRows]:
    rows: list[SequenceRows] = []
    first = 0
    for item in inputs:
        count = len(item.token_ids)
        assert count >= 1 and 0 <= item.num_logits <= count, item
        start = item.start
        if item.visibility:
            assert len(item.visibility) == count, item
            start = min(row.position for row in item.visibility)
        rows.append(
            SequenceRows(
                first,
                count,
                start,
                item.block_ids,
                item.visibility,
                item.state_slot,
                item.num_open,
                item.marks,
            )
        )
        first += count
    return rows


def logit_rows_of(inputs: Sequence[SequenceInput], rows: Sequence[SequenceRows]) -> list[int]:
    """The rows whose logits are wanted: the last ones of each sequence."""
    wanted: list[int] = []
    for item, own in zip(inputs, rows, strict=True):
        end = own.first_row + own.num_rows
        wanted.extend(range(end - item.num_logits, end))
    return wanted
