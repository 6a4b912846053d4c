"""States of the library's recurrent layers: for each sequence, those from which it can continue.

The decoder's own keep records beside one state (``state_pool``); the library's have states alone. They are
kept before a step's open rows and behind all of its rows, and a sequence that lost some goes on from the
first: what it keeps of the open rows is computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from specray.engine.cache.state_slots import StateSlots
from specray.engine.step import SequenceRows


@dataclass(slots=True)
class LayerState:
    """What one recurrent layer has seen of a sequence; tensors by the number that the layer gives them."""

    conv: dict[int, torch.Tensor] = field(default_factory=dict)
    """Last inputs of its convolutions."""
    recurrent: dict[int, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def joined(cls, states: Sequence[LayerState]) -> LayerState:
        """A copy, which can be written to, of the states of several sequences side by side."""
        return cls(_joined([state.conv for state in states]), _joined([state.recurrent for state in states]))

    def parts(self, count: int) -> list[LayerState]:
        return [LayerState(_part(self.conv, index), _part(self.recurrent, index)) for index in range(count)]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in (self.conv, self.recurrent) for tensor in tensors.values())


def _joined(tensors: Sequence[Mapping[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    return {number: torch.cat([each[number] for each in tensors]) for number in tensors[0]}


def _part(tensors: Mapping[int, torch.Tensor], index: int) -> dict[int, torch.Tensor]:
    return {
        number: tensor[index : index + 1].clone(memory_format=torch.contiguous_format)
        for number, tensor in tensors.items()
    }


State = Mapping[int, LayerState]
"""What all recurrent layers have seen of a sequence, by a number of the layer."""
STATES_PER_SEQUENCE = 3
"""States that a sequence has at most: before a step, before its open rows, and behind all."""


class StateCache(StateSlots):
    """The states of all sequences, by slot."""

    def clear(self) -> None:
        super().clear()
        self._kept: dict[int, dict[int, State]] = {}
        """By slot and number of tokens."""

    def forget(self, slot: int) -> None:
        super().forget(slot)
        self._kept.pop(slot, None)

    def resume_len(self, slot: int, num_tokens: int) -> int:
        """The most tokens of a sequence, up to ``num_tokens``, after which a state is kept."""
        return max((length for length in self._kept.get(slot, {}) if length <= num_tokens), default=0)

    def state_before(self, rows: SequenceRows) -> State | None:
        """The state from which the rows of a sequence go on, after which what lies after it is forgotten.

        Returns:
            None where the sequence begins.
        """
        kept = self._kept.setdefault(rows.state_slot, {})
        for length in list(kept):
            if length > rows.start or rows.start == 0:
                del kept[length]
        assert rows.start == 0 or rows.start in kept, f"no state is kept behind {rows.start} tokens"
        return kept.get(rows.start)

    def keep(self, rows: SequenceRows, states: Mapping[int, State]) -> None:
        """Takes the states after some of the rows of a sequence, by number of tokens."""
        kept = self._kept[rows.state_slot]
        kept.update(states)
        wanted = {max((length for length in kept if length <= rows.settled), default=0), rows.end}
        for length in list(kept):
            if length not in wanted:
                del kept[length]

    def bytes_of(self, slot: int) -> int:
        """Bytes of one state of the sequence in that slot."""
        return max(sum(layer.num_bytes for layer in state.values()) for state in self._kept[slot].values())
