"""The states of recurrent layers, their records, and the inputs of their convolutions: a slot per sequence.

A state is float32, whatever the model's type: outputs must be a function of the tokens alone. An open row's
record is what its step would add, ``state = decay * state + key * update``: put into the state in order,
records give the bits of plain decoding (sums of several would not), and take a hundredth of a state. Records
and inputs lie at their token's position modulo the room, so nothing is moved when rows are lost. What lies in
a slot before its sequence begins is never read.

A snapshot is a state and the inputs before it, kept for other sequences (``snapshots`` says which). A step
takes those of prompts on its way: rows up to a mark are run, the state is copied, and the others follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specray.engine.cache.state_slots import STATE_UNIT, StateSlots
from specray.engine.inputs import StateCopy
from specray.engine.step import NUM_COLUMNS, SequenceRows, StateShape


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's tensors."""

    shape: StateShape
    states: torch.Tensor  # [num_slots, num_heads, key_dim, value_dim], float32
    updates: (
        torch.Tensor
    )  # [num_slots, max_open, num_heads, value_dim], float32: this and the next two: records
    decays: torch.Tensor  # [num_slots, max_open, num_heads, gate_dim]
    keys: torch.Tensor  # [num_slots, max_open, num_key_heads, key_dim]
    inputs: torch.Tensor  # [num_slots, num_taps - 1 + max_open, num_channels], of the model's type
    kept_states: torch.Tensor  # [num_snapshots, num_heads, key_dim, value_dim], float32
    kept_inputs: torch.Tensor  # [num_snapshots, num_taps - 1, num_channels]

    def fill(self, number: float) -> None:
        """Writes a number everywhere."""
        records = self.updates, self.decays, self.keys
        for tensor in (self.states, *records, self.inputs, self.kept_states, self.kept_inputs):
            tensor.fill_(number)

    def replayed(self, slot: int, base: int, end: int) -> torch.Tensor:
        """The state behind ``end`` tokens: that behind ``base``, and the records of those that stay."""
        state = self.states[slot]
        return self.relearned(torch.zeros_like(state) if base == 0 else state, slot, base, end)

    def relearned(self, state: torch.Tensor, slot: int, start: int, end: int) -> torch.Tensor:
        """A state behind ``start`` tokens with the records of those up to ``end``, if there are more."""
        size = self.updates.shape[1]
        for position in range(start, end):
            place = position % size
            key = for_heads(self.keys[slot, place], len(state))
            state = learned(state * self.decays[slot, place, :, :, None], key, self.updates[slot, place])
        return state

    def copy(self, copy: StateCopy) -> None:
        """Fills a snapshot from a slot, or a slot from a snapshot."""
        count, size = self.kept_inputs.shape[1], self.inputs.shape[1]
        places = [position % size for position in range(copy.num_tokens - count, copy.num_tokens)]
        if copy.base is None:
            self.states[copy.slot] = self.kept_states[copy.snapshot]
            self.inputs[copy.slot, places] = self.kept_inputs[copy.snapshot]
            return
        self.kept_states[copy.snapshot] = self.replayed(copy.slot, copy.base, copy.num_tokens)
        self.kept_inputs[copy.snapshot] = self.inputs[copy.slot, places]


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of one sequence in a step, as recurrent layers see them."""

    slot: int
    base: int
    """Tokens in the state."""
    start: int
    """Tokens before the rows; those from ``base`` on are in records."""
    settled: int
    """Tokens that the step puts into the state; if fewer than ``start``, records of the others stay."""
    end: int
    first_row: int

    @property
    def opened(self) -> int:
        """Tokens before the open rows."""
        return max(self.start, self.settled)


@dataclass(frozen=True, slots=True)
class Phase:
    """Rows of a step that are run before its others, since states behind them are kept."""

    rows: list[StateRows]
    table: torch.Tensor
    copies: list[StateCopy]
    """What is kept then."""


Mix = Callable[[torch.Tensor, "StatePool", int], torch.Tensor]
"""What lies between a recurrent layer's projections (``layers.delta.Mixer``)."""


class PromptChunks(NamedTuple):
    """Rows that go into states at once, in chunks, on the device; int32."""

    sequences: torch.Tensor
    """``[num_prompts, 5]``: slot, tokens in the state, tokens before the rows, first chunk, how many."""
    chunks: torch.Tensor
    """``[num_chunks, 2]``: first row, number of rows."""


class StatePool(StateSlots):
    """Slots with memory.

    Args:
        shapes: of each recurrent layer.
        dtype: of the model.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        *,
        num_slots: int,
        max_open: int,
        dtype: torch.dtype,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        super().__init__(num_slots, max_open, num_snapshots)
        sizes = num_slots, max_open, num_snapshots
        # Not zeros: memory is given as it is written.
        self.layers = [_empty(shape, sizes, dtype, device) for shape in shapes]
        self._own_table = torch.zeros(num_slots, NUM_COLUMNS, dtype=torch.int32, device=device)
        # It stays where it is, so that a CPU's captured forwards read it.
        self.table = self._own_table
        """What the step that runs does with each of its sequences, ``[num_sequences, 6]``; those of no rows
        are padding. Columns: ``step.SLOT`` and on."""
        self.rows: list[StateRows] = []
        """Rows of the step that runs, or of its phase: of each sequence those that follow each other. Empty
        while ``table`` alone describes them."""
        self._phases: list[Phase] = []
        """What is run before these rows."""
        self._chunks: dict[int, PromptChunks | None] = {}
        """Chunks of the step, by the identity of its lists of rows."""

    @contextmanager
    def step(self, rows: Sequence[SequenceRows]) -> Iterator[None]:
        """Begins a step, and ends it behind the block. If that fails, its sequences begin anew."""
        assert not any(item.visibility for item in rows), "recurrent layers see chains alone"
        bases = self.begin(rows)
        pieces = [_pieces(item, base) for item, base in zip(rows, bases, strict=True)]
        self._phases = [
            self._phase(
                [
                    (own[number], item.marks[number])
                    for item, own in zip(rows, pieces, strict=True)
                    if len(item.marks) > number
                ]
            )
            for number in range(max((len(item.marks) for item in rows), default=0))
        ]
        self.rows = [last for *_, last in pieces if last.end > last.start]
        self._chunks.clear()
        # As in ``paged.DeviceBatch.load``: not pinned, so it may be given up at once.
        self.table.copy_(self._table_of(self.rows), non_blocking=True)
        yield
        self.finish(rows)

    def begin_open(self, rows: Sequence[SequenceRows]) -> list[StateRows]:
        """Begins a step whose rows are all open, for who describes it in a table of his own and ends it."""
        bases = self.begin(rows)
        return [_pieces(item, base)[-1] for item, base in zip(rows, bases, strict=True)]

    @contextmanager
    def described_by(self, table: torch.Tensor) -> Iterator[None]:
        """A step that others have begun: its rows are what ``table`` says when it runs, and all are open."""
        self.rows, self._phases, self.table = [], [], table
        try:
            yield
        finally:
            self.table = self._own_table

    @property
    def has_settled_rows(self) -> bool:
        """Whether the step has rows that go into the state at once, as those of prompts do."""
        return bool(self._phases) or any(item.settled > item.start for item in self.rows)

    def run(self, mix: Mix, projected: torch.Tensor, place: int) -> torch.Tensor:
        """Runs the rows of the step through a layer, and keeps the states that the step is to keep.

        Args:
            projected: what the mixer takes of all rows.
            place: of the layer among those with states.
        """
        if not self._phases:
            return mix(projected, self, place)
        last = Phase(self.rows, self.table.clone(), [])
        out: torch.Tensor | None = None
        for phase in (*self._phases, last):
            self.rows = phase.rows
            self.table.copy_(phase.table)
            part = mix(projected, self, place)
            out = torch.empty_like(part) if out is None else out
            for item in phase.rows:
                own = slice(item.first_row, item.first_row + item.end - item.start)
                out[own] = part[own]
            for copy in phase.copies:
                self.layers[place].copy(copy)
        assert out is not None
        return out

    def copy(self, copy: StateCopy) -> None:
        """Fills a snapshot from a slot, or a slot from a snapshot, in all layers."""
        if copy.base is None:
            self.bases[copy.slot] = self.ends[copy.slot] = copy.num_tokens
        for layer in self.layers:
            layer.copy(copy)

    def _phase(self, items: Sequence[tuple[StateRows, tuple[int, int]]]) -> Phase:
        rows = [row for row, _ in items]
        copies = [StateCopy(row.slot, snapshot, end, base=end) for row, (end, snapshot) in items]
        return Phase(rows, self._table_of(rows).to(self.table.device), copies)

    def _table_of(self, rows: Sequence[StateRows]) -> torch.Tensor:
        table = np.empty(self._own_table.shape, dtype=np.int32)
        write_table(table, rows)
        return torch.from_numpy(table)

    @property
    def chunks(self) -> PromptChunks | None:
        """The rows that settle at once; None: all are open."""
        key = id(self.rows)
        if key not in self._chunks:
            prompts = [item for item in self.rows if item.settled > item.start]
            self._chunks[key] = _chunks(prompts, self.table.device) if prompts else None
        return self._chunks[key]


def write_table(table: NDArray[np.int32], rows: Sequence[StateRows]) -> None:
    """Writes what a step does with its sequences, ``[num_sequences, 6]``, and padding behind them."""
    for index, item in enumerate(rows):
        first_open = item.first_row + item.opened - item.start
        table[index] = item.slot, item.base, item.start, item.settled, first_open, item.end - item.opened
    table[len(rows) :] = 0


def _chunks(prompts: Sequence[StateRows], device: torch.device) -> PromptChunks:
    sequences: list[tuple[int, ...]] = []
    chunks: list[tuple[int, ...]] = []
    for item in prompts:
        first_end = item.start // STATE_UNIT * STATE_UNIT + STATE_UNIT
        cuts = [item.start, *range(first_end, item.settled, STATE_UNIT), item.settled]
        sequences.append((item.slot, item.base, item.start, len(chunks), len(cuts) - 1))
        chunks += [(item.first_row + begin - item.start, end - begin) for begin, end in pairwise(cuts)]
    packed = torch.from_numpy(np.array([*chain(*sequences, *chunks)], dtype=np.int32))
    both = packed.to(device, non_blocking=True).tensor_split((5 * len(sequences),))
    return PromptChunks(both[0].view(-1, 5), both[1].view(-1, 2))


def _pieces(item: SequenceRows, base: int) -> list[StateRows]:
    """The rows of a sequence up to each mark, and those behind the last, if any."""
    pieces: list[StateRows] = []
    start = item.start
    for end, _ in item.marks:
        assert start < end <= item.settled, (item, end)
        pieces.append(StateRows(item.state_slot, base, start, end, end, item.first_row + start - item.start))
        base = start = end
    first_row = item.first_row + start - item.start
    return [*pieces, StateRows(item.state_slot, base, start, item.settled, item.end, first_row)]


def for_heads(each: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What heads of keys have, ``[..., num_key_heads, size]``, for all heads."""
    return each.repeat_interleave(num_heads // max(1, each.shape[-2]), -2)


def learned(state: torch.Tensor, key: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """States ``[num_heads, key_dim, value_dim]`` and what a token adds to them."""
    return state + key[:, :, None] * update[:, None, :]


def _empty(
    shape: StateShape, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> LayerStates:
    num_slots, max_open, num_snapshots = sizes

    def empty(*size: int, of: torch.dtype = torch.float32, count: int = num_slots) -> torch.Tensor:
        return torch.empty(count, *size, dtype=of, device=device)

    heads = shape.num_heads
    return LayerStates(
        shape,
        empty(heads, shape.key_dim, shape.value_dim),
        empty(max_open, heads, shape.value_dim),
        empty(max_open, heads, shape.gate_dim),
        empty(max_open, shape.num_key_heads, shape.key_dim),
        empty(shape.num_taps - 1 + max_open, shape.num_channels, of=dtype),
        empty(heads, shape.key_dim, shape.value_dim, count=num_snapshots),
        empty(shape.num_taps - 1, shape.num_channels, of=dtype, count=num_snapshots),
    )
