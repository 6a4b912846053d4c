"""What drafters have in common that go on with their own output: EAGLE, and MTP layers.

The entry of token j joins the embedding of token j with the feature of token j - 1, and its K/V lie at token
j's slot, though its rotary position is j - 1. So it depends on tokens 0..j alone, as everything at that slot
does; slot 0 has none.

::

    slot                 0      1            2            ...
    features             f0     f1           f2
    entries, K/V         -      (t1, f0)     (t2, f1)     ...    -> draft token
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specray.engine.features.base import Context, Continued, FeatureDrafter, FeatureStore, Fuser, TargetParts
from specray.engine.step import SequenceRows

FIRST_ENTRY = 1
"""KV index of the first entry."""
MAX_ROWS = 512
"""Rows of one forward, at most, while long prompts are caught up with: each has a mask over its text."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Consecutive entries of one sequence: tokens ``first..end - 1``, with the features before them."""

    context: Context
    first: int
    end: int
    num_masks: int = 0
    """Masks after them, in the place of draft tokens that are not known yet."""


class ChainedDrafter(FeatureDrafter):
    """A drafter that goes on with its own output; the entry of a context's last token is read, too.

    Args:
        parts: what is the target's.
    """

    def __init__(self, parts: TargetParts, fuser: Fuser) -> None:
        super().__init__(fuser)
        self._parts = parts
        self._recycled = torch.empty(0)
        """Outputs of the last step's rows, which stand for the features of their tokens."""

    @property
    def has_masks(self) -> bool:
        """Whether the drafter draws all its tokens in one forward, without its own output."""
        return False

    @property
    def outputs(self) -> torch.Tensor:
        """Outputs of the last step's rows, which the next step goes on from, ``[num_rows, hidden_size]``."""
        return self._recycled

    @outputs.setter
    def outputs(self, rows: torch.Tensor) -> None:
        self._recycled = rows

    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        last = self._catch_up(store, contexts)
        return self._finish(self.run_entries(store, last)[self._last_rows(last)])

    def read(self, store: FeatureStore, context: Context) -> None:
        first, end = max(FIRST_ENTRY, context.num_valid), len(context.token_ids)
        for start in range(first, end, MAX_ROWS):
            self.run_entries(store, [Entries(context, start, min(end, start + MAX_ROWS))])

    def advance(self, continued: Sequence[Continued]) -> torch.Tensor:
        device = self._parts.device
        rows: list[SequenceRows] = []
        positions: list[int] = []
        for each in continued:
            seen, blocks = each.visibility, each.context.block_ids
            start = min(row.position for row in seen)
            # All that is before a chain's next token is what it sees: no mask is needed.
            masks = () if each.is_chain else seen
            rows.append(SequenceRows(len(positions), len(seen), start, blocks, masks))
            positions += [row.position - 1 for row in seen]
        sources = torch.tensor([source for each in continued for source in each.sources], device=device)
        tokens = torch.tensor([token for each in continued for token in each.token_ids], device=device)
        output = self._forward(
            tokens, self._recycled[sources], tuple(rows), torch.tensor(positions, device=device)
        )
        return self._finish(output)

    def _catch_up(self, store: FeatureStore, contexts: Sequence[Context]) -> list[Entries]:
        most = max(1, MAX_ROWS // len(contexts))
        last: list[Entries] = []
        for context in contexts:
            first, end = max(FIRST_ENTRY, context.num_valid), len(context.token_ids)
            while end - first > most:
                # Alone it has all the rows that a pass takes.
                size = min(MAX_ROWS, end - first - most)
                self.run_entries(store, [Entries(context, first, first + size)])
                first += size
            last.append(Entries(context, min(first, end - 1), end, self._num_masks(context)))
        return last

    def _last_rows(self, pieces: Sequence[Entries]) -> torch.Tensor:
        ends, at = [], -1
        for entries in pieces:
            at += entries.end - entries.first
            ends.append(at)
            at += entries.num_masks
        return torch.tensor(ends, device=self._parts.device)

    def run_entries(self, store: FeatureStore, pieces: Sequence[Entries]) -> torch.Tensor:
        device = self._parts.device
        features: list[torch.Tensor] = []
        rows: list[SequenceRows] = []
        positions: list[int] = []
        token_ids: list[int] = []
        for piece in pieces:
            first, end, blocks = piece.first, piece.end, piece.context.block_ids
            features.append(store.read_tokens(blocks, first - 1, end - 1))
            rows.append(SequenceRows(len(token_ids), end - first + piece.num_masks, first, blocks))
            positions.extend(range(first - 1, end - 1 + piece.num_masks))
            token_ids.extend(piece.context.token_ids[first:end])
            if piece.num_masks:
                token_id, feature = self._mask()
                features.append(feature.expand(piece.num_masks, -1))
                token_ids.extend([token_id] * piece.num_masks)
        return self._forward(
            torch.tensor(token_ids, device=device),
            torch.cat(features),
            tuple(rows),
            torch.tensor(positions, device=device),
        )

    def _num_masks(self, context: Context) -> int:
        return 0

    def _mask(self) -> tuple[int, torch.Tensor]:
        """Token and feature of a mask. Drafters with ``_num_masks`` above 0 have them."""
        raise AssertionError("a drafter without masks wants none")

    @abstractmethod
    def _forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        rows: tuple[SequenceRows, ...],
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """What leaves the last layer, ``[num_rows, hidden_size]``."""

    @abstractmethod
    def _finish(self, output: torch.Tensor) -> torch.Tensor:
        """Logits of rows that left the last layer, which the next step goes on with."""
