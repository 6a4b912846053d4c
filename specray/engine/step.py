"""Types of a forward pass's input and output: the rows of one step, and the shapes of a model.

These types are shared by runners, forwards and attention, so this file imports none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from specray.engine.visibility import Visibility

Slots = slice | torch.Tensor
"""Slots of the cache: a slice, or an int64 tensor ``[num_tokens]``."""

SLOT, BASE, START, SETTLED, FIRST_ROW, NUM_OPEN = range(6)
"""Columns of a step's table for recurrent layers, int32: of each sequence its slot, tokens in the state,
tokens before its rows (those from the state on are in records), tokens that the step puts into the state, the
first open row, which follows the later of these two, and the number of such rows. Padding is zeros: a
sequence of no rows."""
NUM_COLUMNS = 6
"""Number of these columns."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The attention heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    own_scale: float | None = None
    """Factor on the dot products where a model names one; None: that of most, from the size of a head."""
    latent_dim: int = 0
    """First numbers of a key that are its value, and that are not rotated; 0: values are stored."""

    @property
    def value_dim(self) -> int:
        """Numbers of a value, and of what a query head attends to."""
        return self.latent_dim or self.head_dim

    @property
    def num_stored(self) -> int:
        """Heads that are stored of a token: keys, and values where they are not a part of these."""
        return self.num_kv_heads * (1 if self.latent_dim else 2)

    @property
    def of_layer(self) -> LayerShape:
        """What a layer keeps of a token."""
        return LayerShape(self.num_kv_heads, self.head_dim, 0 if self.latent_dim else self.head_dim)

    @property
    def scale(self) -> float:
        """Factor on the dot products."""
        return float(self.head_dim**-0.5) if self.own_scale is None else self.own_scale


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of a token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    """Numbers of a value; 0: values are a part of the keys (latent attention)."""

    @property
    def num_numbers(self) -> int:
        """Numbers of one token, keys and values."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a recurrent layer keeps of a sequence: float32 states by head, and inputs of its convolution."""

    num_heads: int
    """Heads, ``[key_dim, value_dim]`` each; 0: the layer is a convolution alone."""
    num_key_heads: int
    """Keys of a record, each shared by as many heads as another."""
    key_dim: int
    value_dim: int
    gate_dim: int
    """Numbers by which a head forgets: 1, or one for each of a key's."""
    num_channels: int
    num_taps: int
    """Inputs that an output of the convolution is made of."""

    @property
    def num_state_numbers(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim

    @property
    def num_record_numbers(self) -> int:
        """Numbers of one open row besides its input of the convolution."""
        return self.num_heads * (self.value_dim + self.gate_dim) + self.num_key_heads * self.key_dim

    def num_bytes(self, max_open: int, item_bytes: int) -> int:
        """Bytes of a sequence; ``item_bytes`` of a number of the model's type."""
        numbers = self.num_state_numbers + max_open * self.num_record_numbers
        return 4 * numbers + item_bytes * self.num_channels * (self.num_taps - 1 + max_open)

    def num_snapshot_bytes(self, item_bytes: int) -> int:
        """Bytes of a state that is kept for other sequences: it has no records."""
        return self.num_bytes(0, item_bytes)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model keeps per token on this rank."""

    num_layers: int
    num_kv_heads: int
    """Kv heads of every layer, if ``unlike`` is empty; as ``head_dim``."""
    head_dim: int
    unlike: tuple[LayerShape, ...] = ()
    """Shape of each layer, where layers differ, or keys and values do; empty: all are alike."""
    states: tuple[StateShape, ...] = ()
    """What each recurrent layer keeps of a sequence."""

    @classmethod
    def of_layers(cls, layers: Sequence[LayerShape], states: tuple[StateShape, ...] = ()) -> CacheShape:
        """The shape of layers, alike or not."""
        first = layers[0]
        alike = cls(len(layers), first.num_kv_heads, first.key_dim, states=states)
        return alike if tuple(layers) == alike.layers else replace(alike, unlike=tuple(layers))

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return self.unlike or (LayerShape(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    @property
    def num_numbers(self) -> int:
        """Numbers of one token in all layers."""
        return sum(layer.num_numbers for layer in self.layers)


class KVCache(Protocol):
    """What attention needs of ``cache.blocks.BlockCache``, where the tensors are described."""

    @property
    def block_size(self) -> int: ...

    @property
    def layers(self) -> Sequence[torch.Tensor]: ...

    @property
    def keys(self) -> Sequence[torch.Tensor]: ...

    @property
    def values(self) -> Sequence[torch.Tensor]: ...

    @property
    def states(self) -> object:
        """What recurrent layers have seen of sequences."""
        ...

    def write(self, layer: int, slots: Slots, keys_values: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a step."""

    first_row: int
    num_rows: int
    start: int
    """Lowest position of the rows; in a chain that of the first."""
    block_ids: Sequence[int]
    visibility: Sequence[Visibility] = ()
    """Visibility of each row, KV indices ascending; empty: a chain from ``start`` on."""
    state_slot: int = 0
    """Slot of the sequence's states in recurrent layers."""
    num_open: int = 0
    """Last tokens that the sequence may lose again: of these rows, and maybe of steps before."""
    marks: Sequence[tuple[int, int]] = ()
    """States that are kept on the way, see ``inputs.SequenceInput``."""

    @property
    def settled(self) -> int:
        """Tokens after which the sequence may go on with others."""
        return self.end - self.num_open

    @property
    def end(self) -> int:
        """KV index after the last row."""
        return self.visibility[-1].kv_index + 1 if self.visibility else self.start + self.num_rows

    @property
    def positions(self) -> Sequence[int]:
        """The position of each row."""
        if self.visibility:
            return [row.position for row in self.visibility]
        return range(self.start, self.start + self.num_rows)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The rows of a step on the device; int32 but for slots and masks. Rows at the end may be padding."""

    first_rows: (
        torch.Tensor
    )  # [num_sequences + 1]: sequence i has the rows first_rows[i]..first_rows[i + 1] - 1
    lengths: torch.Tensor  # [num_sequences]: KV indices that are valid once the step has written
    block_tables: torch.Tensor  # [num_sequences, max_num_blocks]
    slots: torch.Tensor  # [num_rows], int64: where each row is put
    positions: torch.Tensor  # [num_rows]
    kv_indices: torch.Tensor  # [num_rows]: of the rows themselves
    prefix_lens: torch.Tensor  # [num_rows]: this and the next two: ``visibility.Visibility``
    first_indices: torch.Tensor  # [num_rows]
    ancestors: torch.Tensor  # [num_rows], int64
    max_rows: int
    """Most rows of one sequence."""
    has_masks: bool
    """True if visibility is read; False: each sequence's rows are a chain of its last tokens."""
    states: torch.Tensor | None = None  # [num_sequences, 6]: a step's table for recurrent layers, if any


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Slots at which the rows of one step are written, and the tokens that each sequence may see.

    Each sequence must hold blocks for ``rows.end`` tokens.
    """

    rows: tuple[SequenceRows, ...]
    cache: KVCache
    batch: PagedBatch | None = None
    """The rows as tensors of a fixed shape, for captured forwards; ``rows`` are empty then."""
    first_index: int = 0
    """KV index before which nothing is seen; above 0 only where torch's operators attend."""


@dataclass(frozen=True, slots=True)
class Step:
    """One ragged forward: the new tokens of all sequences, one after the other."""

    token_ids: torch.Tensor  # [num_rows], int64
    positions: Slots  # of each row in its sequence; a slice for a single sequence
    attention: AttentionStep
    logit_rows: Slots | None  # the rows whose logits are wanted, in order; None: all
    logits: torch.Tensor | None = None
    """Tensor of their size that a forward may write the logits to; None: a new one."""


class ForwardOutput(NamedTuple):
    """What a forward pass computes."""

    logits: torch.Tensor
    """Logits, float32, ``[number of logit_rows, vocab_size]``; ``Step.logits`` itself, if written there."""
    features: Mapping[int, torch.Tensor] | None = None
    """Residual stream of all rows by layer: what enters layer k, ``[num_rows, hidden_size]``.

    Numbers are those of ``output_hidden_states``, but for the last: k = number of layers is what leaves the
    last layer, before the final norm, and one more is what the head reads, after the norm. None where no
    layer was asked for when the forward was built.
    """


class Forward(Protocol):
    """A model's forward pass over the block cache."""

    @property
    def name(self) -> str:
        """``decoder`` or ``hf``."""
        ...

    @property
    def cache_shape(self) -> CacheShape: ...

    def __call__(self, step: Step) -> ForwardOutput:
        """Fills the cache and returns logits, and features of the layers that it was built for."""
        ...
