"""The block forward: a row for the last token and masks after it draw all draft tokens at once.

What the target has computed is context: joined residuals give keys and values to every layer, once for each
token, at the token's own slot and position. Queries are of the block alone, whose rows see each other::

    slot              0    1    ...  n - 1
    context           c0   c1   ...  c(n-1)
    block, positions                          n: last token   n + 1: mask   n + 2: mask ...

A block always has all its masks, as it was trained, whatever is wanted of it: so a draft token does not
depend on how many others are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specray.engine.attention.base import HeadNorm, Rotary, rotate_heads
from specray.engine.attention.sdpa import sequence_slots
from specray.engine.features.base import (
    Context,
    Continued,
    FeatureDrafter,
    FeatureStore,
    Placed,
    TargetParts,
)
from specray.engine.features.block.attention import BlockReach, BlockStep
from specray.engine.features.block.heads import MarkovHead
from specray.engine.features.block.layout import HEAD_ROWS, BlockLayout
from specray.engine.features.decoder_layers import LayerTensors, Lowering
from specray.engine.features.shared_rows import SharedRows
from specray.engine.features.vocabulary import make_embedding, make_head
from specray.engine.model.decoder import Norm
from specray.engine.model.linear import Gate, Linear
from specray.engine.model.operators_torch import rotary_tables
from specray.engine.model.rotary import cos_sin
from specray.engine.step import CacheShape

MAX_ROWS = 2048
"""Rows of one forward, at most, while long prompts are caught up with."""


@dataclass(frozen=True, slots=True)
class _BlockLayer:
    reach: BlockReach
    input_norm: Norm
    query: Linear
    keys_values: Linear
    query_norm: HeadNorm | None
    key_norm: HeadNorm | None
    output: Linear
    post_norm: Norm
    gate: Gate
    down: Linear


@dataclass(frozen=True, slots=True)
class _ContextPart:
    """Consecutive tokens of one sequence that are caught up with."""

    context: Context
    first: int
    end: int


class BlockFuser:
    """Implements ``base.Fuser``: joins the residuals to context.

    Args:
        layout: the checkpoint.
        parts: where ``fc`` goes.
    """

    def __init__(self, layout: BlockLayout, parts: Placed) -> None:
        lowering = Lowering(parts, layout.attention)
        self.feature_layers, self.feature_size = layout.feature_layers, layout.feature_size
        self._fc, self._norm = lowering.linear(layout.fc), lowering.norm(layout.hidden_norm)
        self._dtype = parts.dtype

    def fuse(self, features: Mapping[int, torch.Tensor]) -> torch.Tensor:
        rows = [features[layer].to(self._dtype) for layer in self.feature_layers]
        return self._norm(self._fc(torch.cat(rows, -1)))


class BlockDrafter(FeatureDrafter):
    """A drafter of whole blocks.

    Args:
        layout: the checkpoint.
        parts: what is the target's.
    """

    num_unread = 1
    """The last token is of the block, whose K/V are not kept."""

    def __init__(self, layout: BlockLayout, parts: TargetParts) -> None:
        super().__init__(BlockFuser(layout, parts))
        self._layout = layout
        self._parts = parts
        self.max_draft_tokens = layout.block_size - layout.first_row
        self.token_ids = layout.token_ids
        attention = layout.attention
        self._num_heads, self._num_kv_heads = attention.num_attention_heads, attention.num_key_value_heads
        self._head_dim = attention.head_dim
        self._lowering = lowering = Lowering(parts, attention)
        self._final_norm = lowering.norm(layout.norm)
        self._layers = tuple(map(self._lower, layout.layers, layout.reaches))
        self._embed = make_embedding(layout.embedding, parts)
        self._mask = None if layout.mask_embedding is None else lowering.cast(layout.mask_embedding)
        self._logits = make_head(layout.head, layout.token_ids, parts)
        self._markov = None if layout.markov is None else MarkovHead(layout.markov, lowering)
        self._confidence = (
            None
            if layout.confidence is None
            else [
                None if tensor is None else tensor.to(parts.device, torch.float32)
                for tensor in layout.confidence
            ]
        )
        # The last masks of a block may lie beyond the longest sequence.
        length = parts.max_model_len + layout.block_size
        self._rotary: Rotary = rotary_tables(*cos_sin(attention, length, parts.device), parts.dtype)
        self._cache = parts.cache(CacheShape(len(self._layers), self._num_kv_heads, self._head_dim))
        self._shared = SharedRows()
        self._num_depths = 0
        """Draft tokens that are wanted of a path, at most."""
        self._hidden = torch.empty(0)
        """Rows of each sequence that draw, ``[num_sequences, num_rows, hidden_size]``."""
        self._drawn_from: tuple[int, torch.Tensor] = (0, torch.empty(0))
        """A depth, and logits from it on, ``[num_sequences, num_depths, num_logits]``."""
        self._states: torch.Tensor | None = None
        """The Markov head's, of the last step's rows."""
        self._judged = torch.empty(0)
        """What the confidence head reads of the last step's rows."""

    def read(self, store: FeatureStore, context: Context) -> None:
        for pieces in _passes([context]):
            self.catch_up(store, pieces)

    def start(self, store: FeatureStore, contexts: Sequence[Context]) -> torch.Tensor:
        for pieces in _passes(contexts):
            self.catch_up(store, pieces)
        block = self._run(contexts).view(len(contexts), self._layout.block_size, -1)
        self._hidden = block[:, self._layout.first_row :]
        self._num_depths = min(self._hidden.shape[1], max(context.num_wanted for context in contexts))
        self._drawn_from = (0, block[:, :0])
        self._states = None
        self._shared.begin(len(contexts))
        own = list(range(len(contexts)))
        return self._draw(own, [1] * len(own), [context.token_ids[-1] for context in contexts], own)

    def advance(self, continued: Sequence[Continued]) -> torch.Tensor:
        own = self._shared.advance(continued)
        token_ids = [token for each in continued for token in each.token_ids]
        sources = [source for each in continued for source in each.sources]
        return self._draw(own, [len(each.sources) for each in continued], token_ids, sources)

    def acceptance(self) -> list[float] | None:
        if self._confidence is None:
            return None
        weight, bias = self._confidence
        assert weight is not None, "only its bias may be absent"
        chances: list[float] = F.linear(self._judged.float(), weight, bias).sigmoid()[:, 0].tolist()
        return chances

    def _draw(
        self, own: Sequence[int], counts: Sequence[int], token_ids: Sequence[int], sources: Sequence[int]
    ) -> torch.Tensor:
        """Logits of ``counts`` rows of each sequence in ``own``; ``sources``: rows of the step before."""
        device, depth = self._parts.device, self._shared.depth
        index = torch.tensor(own, device=device)
        logits, hidden = self._base(depth)[index], self._hidden[index, depth]
        if sum(counts) > len(counts):
            repeats = torch.tensor(counts, device=device)
            logits, hidden = (rows.repeat_interleave(repeats, 0) for rows in (logits, hidden))
        self._judged = hidden
        if self._markov is not None:
            embedded = self._markov.embed(torch.tensor(token_ids, device=device))
            before = None if self._states is None else self._states[torch.tensor(sources, device=device)]
            added, self._states = self._markov.step(embedded, hidden, before)
            logits = logits + added
            if self._layout.confidence is not None and self._reads_embedding:
                self._judged = torch.cat((hidden, embedded), -1)
        scale = self._layout.logit_scale
        return logits if scale == 1.0 else logits * scale

    @property
    def _reads_embedding(self) -> bool:
        """The confidence head reads the token before a row, too."""
        confidence = self._layout.confidence
        return confidence is not None and confidence[0].shape[1] > self._layout.hidden_size

    def _base(self, depth: int) -> torch.Tensor:
        """Logits of all sequences at a depth, without the Markov head's."""
        first, logits = self._drawn_from
        if depth >= first + logits.shape[1]:
            # Nothing is drawn from these any more; their memory is for the next.
            del logits
            self._drawn_from = depth, self._hidden[:, :0]
            count = max(1, min(self._num_depths - depth, HEAD_ROWS // len(self._hidden)))
            rows = self._hidden[:, depth : depth + count].contiguous()
            logits = self._logits(rows.flatten(0, 1)).view(len(rows), rows.shape[1], -1)
            self._drawn_from = first, logits = depth, logits
        return logits[:, depth - first]

    def catch_up(self, store: FeatureStore, pieces: Sequence[_ContextPart]) -> None:
        device, size = self._parts.device, self._cache.block_size
        slots = [
            sequence_slots(each.context.block_ids, each.first, each.end, size, device) for each in pieces
        ]
        rows = torch.cat([store.rows[each] for each in slots])
        cos, sin = self._rotary.at(
            torch.cat([torch.arange(each.first, each.end, device=device) for each in pieces])
        )
        places = (
            slots[0]
            if len(slots) == 1
            else torch.cat(
                [
                    torch.arange(each.start, each.stop, device=device) if isinstance(each, slice) else each
                    for each in slots
                ]
            )
        )
        for index, layer in enumerate(self._layers):
            heads = self._keys_values(layer, rows, cos, sin)
            self._cache.write(index, places, heads)

    def _run(self, contexts: Sequence[Context]) -> torch.Tensor:
        device, layout, size = self._parts.device, self._layout, self._layout.block_size
        lengths = torch.tensor([len(context.token_ids) - 1 for context in contexts], device=device)
        positions = (lengths[:, None] + torch.arange(size, device=device)).flatten()
        anchors = torch.tensor([context.token_ids[-1] for context in contexts], device=device)
        token_ids = torch.full((len(contexts), size), layout.mask_id, device=device)
        token_ids[:, 0] = anchors
        hidden = self._embed(token_ids.flatten())
        if self._mask is not None:
            is_mask = torch.arange(len(hidden), device=device) % size > 0
            hidden = torch.where(is_mask[:, None], self._mask, hidden)
        step = BlockStep(self._cache, contexts, size)
        cos, sin = self._rotary.at(positions)
        for index, layer in enumerate(self._layers):
            entering = layer.input_norm(hidden)
            query = layer.query(entering).view(len(hidden), self._num_heads, self._head_dim)
            rotate_heads(query, layer.query_norm, cos, sin)
            heads = self._keys_values(layer, entering, cos, sin)
            attended = step.attend(index, layer.reach, query, heads, self._head_dim**-0.5)
            hidden = layer.output.plus(attended, hidden)
            hidden = layer.down.plus(layer.gate(layer.post_norm(hidden)), hidden)
        return self._final_norm(hidden)

    def _keys_values(
        self, layer: _BlockLayer, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """Keys and values, ``[num_rows, 2 * num_kv_heads, head_dim]``."""
        heads = layer.keys_values(rows).view(len(rows), 2 * self._num_kv_heads, self._head_dim)
        rotate_heads(heads.narrow(1, 0, self._num_kv_heads), layer.key_norm, cos, sin)
        return heads

    def _lower(self, layer: LayerTensors, reach: BlockReach) -> _BlockLayer:
        lowering, eps = self._lowering, self._layout.attention.rms_norm_eps
        weight, bias = layer.qkv
        at = self._num_heads * self._head_dim
        query_norm = key_norm = None
        if layer.head_norms is not None:
            query, key = layer.head_norms
            query_norm = HeadNorm(lowering.head_norm(query, self._num_heads), eps)
            key_norm = HeadNorm(lowering.head_norm(key, self._num_kv_heads), eps)
        assert layer.input_norm is not None, "the reader takes one"
        return _BlockLayer(
            reach=reach,
            input_norm=lowering.norm(layer.input_norm),
            query=lowering.linear((weight[:at], None if bias is None else bias[:at])),
            keys_values=lowering.linear((weight[at:], None if bias is None else bias[at:])),
            query_norm=query_norm,
            key_norm=key_norm,
            output=lowering.linear(layer.output),
            post_norm=lowering.norm(layer.post_norm),
            gate=lowering.gate(layer.gate, layer.up),
            down=lowering.linear(layer.down),
        )


def _passes(contexts: Sequence[Context]) -> Iterator[list[_ContextPart]]:
    pieces: list[_ContextPart] = []
    room = MAX_ROWS
    for context in contexts:
        first, end = context.num_valid, len(context.token_ids) - 1
        while first < end:
            size = min(room, end - first)
            pieces.append(_ContextPart(context, first, first + size))
            first, room = first + size, room - size
            if room == 0:
                yield pieces
                pieces, room = [], MAX_ROWS
    if pieces:
        yield pieces
