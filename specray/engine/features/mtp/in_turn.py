"""Several MTP layers in turn: draft token j comes from layer j modulo their number (DeepSeek-V3, 2024, 2.2).

Layer k's entry of a token joins its embedding with what layer k - 1 gave for the token before, so its first
one is k tokens later than that of the first layer. Each layer has seen all tokens before it draws one::

    tokens    t1          t2          t3          d0          d1
    layer 0   (t1, h0)    (t2, h1)    (t3, h2)                         -> d0
    layer 1               (t2, a1)    (t3, a2)    (d0, a3)             -> d1     a: what layer 0 gave
    layer 2                           (t3, b2)    (d0, b3)    (d1, b4) -> d2     b: what layer 1 gave

The last entries of a step are computed again by the next: layer k cannot go on without what layer k - 1 gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specray.engine.features.base import Context, Continued, FeatureStore
from specray.engine.features.chained.drafter import FIRST_ENTRY, Entries
from specray.engine.features.mtp.drafter import MtpDrafter
from specray.engine.step import AttentionStep, SequenceRows
from specray.engine.visibility import Visibility

_ROOT = -1


@dataclass(slots=True, eq=False)
class _Drawn:
    """What was drawn behind one context."""

    context: Context
    lasts: list[torch.Tensor]
    """What each layer gave for the context's last token, ``[hidden_size]``; empty where it had no entry."""
    given: list[torch.Tensor]
    """What the layer of the last step gave: for the context's last token, then for each node."""
    token_ids: list[int] = field(default_factory=list)
    visibility: list[Visibility] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """Node before each, or the context's last token."""
    is_chain: bool = True


class MtpInTurn(MtpDrafter):
    """A drafter with several MTP layers."""

    _depth = 0
    _rows: list[tuple[_Drawn, int]]
    """Context and node of each row of the last logits."""

    @property
    def has_masks(self) -> bool:
        """Always: a layer cannot go on from its last outputs alone."""
        return True

    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        given = self._run_layers(store, self._catch_up(store, contexts))
        drawn = []
        for index, context in enumerate(contexts):
            lasts = [outputs[index][-1:].flatten() for outputs in given]
            drawn.append(_Drawn(context, lasts, [lasts[0]]))
        self._depth, self._rows = 0, [(each, _ROOT) for each in drawn]
        return self._finish(torch.stack([each.lasts[0] for each in drawn]))

    def run_entries(self, store: FeatureStore, pieces: Sequence[Entries]) -> torch.Tensor:
        return torch.cat(self._run_layers(store, pieces)[0])

    def advance(self, continued: Sequence[Continued]) -> torch.Tensor:
        self._depth += 1
        layer = self._depth % len(self._layers)
        rows = self._rows
        self._rows = []
        going: list[_Drawn] = []
        for each in continued:
            drawn = rows[each.sources[0]][0]
            first = len(drawn.token_ids)
            drawn.token_ids += each.token_ids
            drawn.visibility += each.visibility
            drawn.parents += [rows[source][1] for source in each.sources]
            drawn.is_chain &= each.is_chain
            self._rows += [(drawn, node) for node in range(first, len(drawn.token_ids))]
            going.append(drawn)
        self._continue(layer, going)
        return self._finish(torch.stack([drawn.given[1 + node] for drawn, node in self._rows]))

    def _continue(self, layer: int, going: Sequence[_Drawn]) -> None:
        """Computes all nodes of each context by one layer."""
        token_ids: list[int] = []
        features: list[torch.Tensor] = []
        rows: list[SequenceRows] = []
        positions: list[int] = []
        counts: list[tuple[_Drawn, int]] = []
        for drawn in going:
            seen = drawn.visibility
            # The layer has no entry of earlier tokens.
            first = next(node for node, row in enumerate(seen) if row.position >= FIRST_ENTRY + layer)
            seen = seen[first:]
            masks = () if drawn.is_chain else tuple(seen)
            start = min(row.position for row in seen)
            rows.append(SequenceRows(len(token_ids), len(seen), start, drawn.context.block_ids, masks))
            token_ids += drawn.token_ids[first:]
            features += [drawn.given[1 + parent] for parent in drawn.parents[first:]]
            positions += [row.position - 1 for row in seen]
            counts.append((drawn, first))
        outputs = iter(self._layer(layer, token_ids, torch.stack(features), rows, positions))
        for drawn, first in counts:
            nodes = [next(outputs) for _ in drawn.token_ids[first:]]
            drawn.given = [drawn.lasts[layer], *drawn.given[1 : 1 + first], *nodes]

    def _run_layers(self, store: FeatureStore, pieces: Sequence[Entries]) -> list[list[torch.Tensor]]:
        """What each layer gives for the entries of each piece that it has, the last one of all last."""
        firsts = [max(FIRST_ENTRY, piece.first - len(self._layers) + 1) for piece in pieces]
        features = [
            store.read_tokens(piece.context.block_ids, first - 1, piece.end - 1)
            for piece, first in zip(pieces, firsts, strict=True)
        ]
        given: list[list[torch.Tensor]] = []
        for layer in range(len(self._layers)):
            rows: list[SequenceRows] = []
            token_ids: list[int] = []
            positions: list[int] = []
            for piece, first in zip(pieces, firsts, strict=True):
                begin, end = min(first + layer, piece.end), piece.end
                if begin < end:
                    rows.append(SequenceRows(len(token_ids), end - begin, begin, piece.context.block_ids))
                token_ids += piece.context.token_ids[begin:end]
                positions += range(begin - 1, end - 1)
            joined = torch.cat(features)
            outputs = self._layer(layer, token_ids, joined, rows, positions) if rows else joined[:0]
            own = torch.split(outputs, [len(each) for each in features])
            given.append(list(own))
            features = [each[:-1] for each in own]
        return given

    def _layer(
        self,
        layer: int,
        token_ids: Sequence[int],
        features: torch.Tensor,
        rows: Sequence[SequenceRows],
        positions: Sequence[int],
    ) -> torch.Tensor:
        device = self._parts.device
        step = AttentionStep(tuple(rows), self._cache, first_index=FIRST_ENTRY + layer)
        embedded = self._parts.embed(torch.tensor(token_ids, device=device))
        return self._layers[layer](embedded, features, torch.tensor(positions, device=device), step)
