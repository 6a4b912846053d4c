"""What the leader of a group says to the other ranks, as integers.

A step is encoded per sequence: start, num_logits, num_tokens, base, num_shared, num_new, num_masks,
state_slot, num_open, num_marks, adapter_slot, then tokens, new blocks, masks (three integers each) and marks
(two). Both sides remember the block tables of the step before: ``base`` is one more than the index of the
table there whose first ``num_shared`` blocks begin this one; 0: none. So a decode step says no more of a long
sequence than of a short one. A copy is: first, num_tokens, num_blocks, sources, destinations; one of states:
slot, snapshot, num_tokens, base, -1 for none. What is to be done with adapters is: slot, is_cleared, number
of the folder's bytes, these, bytes of the digest.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.engine.inputs import AdapterInput, CopyInput, SequenceInput, StateCopy
from specray.engine.visibility import Visibility

_HEADER_LEN = 11


class SentTables:
    """Block tables of the last step, as both sides of a group know them."""

    def __init__(self) -> None:
        self._tables: list[list[int]] = []
        self._by_first: dict[int, int] = {}
        self._by_last: dict[int, int] = {}

    def encode(self, inputs: Sequence[SequenceInput]) -> list[int]:
        """A step as integers; it is the last one from now on."""
        encoded: list[int] = []
        for index, item in enumerate(inputs):
            base, num_shared = self._base(item.block_ids, index)
            new = item.block_ids[num_shared:]
            encoded += (
                item.start,
                item.num_logits,
                len(item.token_ids),
                base + 1,
                num_shared,
                len(new),
                len(item.visibility),
                item.state_slot,
                item.num_open,
                len(item.marks),
                item.adapter_slot,
            )
            encoded += item.token_ids
            encoded += new
            for row in item.visibility:
                encoded += (row.prefix_len, row.first_index, row.signed_ancestors)
            for mark in item.marks:
                encoded += mark
        self._remember([list(item.block_ids) for item in inputs])
        return encoded

    def decode(self, encoded: Sequence[int]) -> list[SequenceInput]:
        """The inverse of :meth:`encode`, on the other side."""
        inputs: list[SequenceInput] = []
        tables: list[list[int]] = []
        at = 0
        while at < len(encoded):
            header = encoded[at : at + _HEADER_LEN]
            start, num_logits, num_tokens, base, num_shared, num_new, num_masks, *others = header
            state_slot, num_open, num_marks, adapter_slot = others
            tokens_at = at + _HEADER_LEN
            blocks_at = tokens_at + num_tokens
            rows_at = blocks_at + num_new
            marks_at = rows_at + 3 * num_masks
            at = marks_at + 2 * num_marks
            shared = self._tables[base - 1][:num_shared] if base else []
            tables.append([*shared, *encoded[blocks_at:rows_at]])
            visibility = tuple(
                Visibility.from_signed(*encoded[row : row + 3]) for row in range(rows_at, marks_at, 3)
            )
            marks = tuple(zip(encoded[marks_at:at:2], encoded[marks_at + 1 : at : 2], strict=True))
            token_ids, table = encoded[tokens_at:blocks_at], tables[-1]
            own = start, table, num_logits, visibility, state_slot, num_open, marks, adapter_slot
            inputs.append(SequenceInput(token_ids, *own))
        self._remember(tables)
        return inputs

    def _base(self, block_ids: Sequence[int], index: int) -> tuple[int, int]:
        """Index of a known table that begins like this one, and how many blocks they share; -1, 0: none."""
        # The last block of a sequence is its own, the first ones may be those of a common prefix.
        candidates = [self._by_last.get(block) for block in block_ids[:-4:-1]]
        candidates += [index if index < len(self._tables) else None]
        candidates += [self._by_first.get(block_ids[0])] if block_ids else []
        best = (-1, 0)
        for candidate in candidates:
            if candidate is not None:
                shared = _num_equal(self._tables[candidate], block_ids)
                best = max(best, (candidate, shared), key=lambda pair: pair[1])
                if shared == len(self._tables[candidate]):
                    break
        return best if best[1] else (-1, 0)

    def _remember(self, tables: list[list[int]]) -> None:
        self._tables = tables
        self._by_first = {table[0]: index for index, table in enumerate(tables) if table}
        self._by_last = {table[-1]: index for index, table in enumerate(tables) if table}


def _num_equal(known: Sequence[int], block_ids: Sequence[int]) -> int:
    count = min(len(known), len(block_ids))
    if list(known[:count]) == list(block_ids[:count]):
        return count
    return next(i for i in range(count) if known[i] != block_ids[i])


def encode_state_copy(copy: StateCopy) -> list[int]:
    return [copy.slot, copy.snapshot, copy.num_tokens, -1 if copy.base is None else copy.base]


def decode_state_copy(encoded: Sequence[int]) -> StateCopy:
    slot, snapshot, num_tokens, base = encoded
    return StateCopy(slot, snapshot, num_tokens, None if base < 0 else base)


def encode_copy(copy: CopyInput) -> list[int]:
    sources = copy.source_block_ids
    return [copy.first, copy.num_tokens, len(sources), *sources, *copy.destination_block_ids]


def decode_copy(encoded: Sequence[int]) -> CopyInput:
    first, num_tokens, num_sources = encoded[:3]
    return CopyInput(encoded[3 : 3 + num_sources], encoded[3 + num_sources :], first, num_tokens)


def encode_adapter(work: AdapterInput) -> list[int]:
    folder = work.folder.encode()
    return [work.slot, int(work.is_cleared), len(folder), *folder, *work.digest]


def decode_adapter(encoded: Sequence[int]) -> AdapterInput:
    slot, is_cleared, size = encoded[:3]
    folder, digest = bytes(encoded[3 : 3 + size]).decode(), bytes(encoded[3 + size :])
    return AdapterInput(folder, digest, slot, bool(is_cleared))
