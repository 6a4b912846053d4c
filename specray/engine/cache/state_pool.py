"""The states of recurrent layers, their records, and the inputs of their convolutions: a slot per sequence.

A state is float32, whatever the model's type: outputs must be a function of the tokens alone. An open row's
record is what its step would add, ``state = decay * state + key * update``: put into the state in order,
records give the bits of plain decoding (sums of several would not), and take a hundredth of a state. Records
and inputs lie at their token's position modulo the room, so nothing is moved when rows are lost. What lies in
a slot before its sequence begins is never read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from specray.engine.cache.state_slots import StateSlots
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

    def fill(self, number: float) -> None:
        """Writes a number everywhere."""
        for tensor in (self.states, self.updates, self.decays, self.keys, self.inputs):
            tensor.fill_(number)


@dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of one sequence in a step, as recurrent layers see them."""

    slot: int
    base: int
    """Tokens in the state."""
    start: int
    """Tokens before the rows; those from ``base`` on are in records."""
    settled: int
    """Tokens before the open rows."""
    end: int
    first_row: int


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
    ) -> None:
        super().__init__(num_slots, max_open)
        # Not zeros: memory is given as it is written.
        self.layers = [_empty(shape, num_slots, max_open, dtype, device) for shape in shapes]
        self.table = torch.zeros(num_slots, NUM_COLUMNS, dtype=torch.int64, device=device)
        """What the step that runs does with each of its sequences, ``[num_slots, 6]``; those of no rows are
        padding. It stays where it is, so that captured forwards read it. Columns: ``step.SLOT`` and on."""
        self.rows: list[StateRows] = []
        """Sequences of the step that runs."""

    @contextmanager
    def step(self, rows: Sequence[SequenceRows]) -> Iterator[None]:
        """Begins a step, and ends it behind the block. If that fails, its sequences begin anew."""
        assert not any(item.visibility for item in rows), "recurrent layers see chains alone"
        bases = self.begin(rows)
        self.rows = [
            StateRows(item.state_slot, base, item.start, item.settled, item.end, item.first_row)
            for item, base in zip(rows, bases, strict=True)
        ]
        self._write_table()
        yield
        self.finish(rows)

    @property
    def has_settled_rows(self) -> bool:
        """Whether the step has rows that go into the state at once, as those of prompts do."""
        return any(item.settled > item.start for item in self.rows)

    def _write_table(self) -> None:
        table = np.zeros(self.table.shape, dtype=np.int64)
        for index, item in enumerate(self.rows):
            is_prompt = item.settled > item.start
            table[index] = (
                item.slot,
                item.settled if is_prompt else item.base,
                0 if is_prompt else item.start - item.base,
                item.settled,
                item.first_row + item.settled - item.start,
                item.end - item.settled,
            )
        self.table.copy_(torch.from_numpy(table))


def _empty(
    shape: StateShape, num_slots: int, max_open: int, dtype: torch.dtype, device: torch.device
) -> LayerStates:
    def empty(*size: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(num_slots, *size, dtype=of, device=device)

    heads = shape.num_heads
    return LayerStates(
        shape,
        empty(heads, shape.key_dim, shape.value_dim),
        empty(max_open, heads, shape.value_dim),
        empty(max_open, heads, shape.gate_dim),
        empty(max_open, shape.num_key_heads, shape.key_dim),
        empty(shape.num_taps - 1 + max_open, shape.num_channels, of=dtype),
    )
