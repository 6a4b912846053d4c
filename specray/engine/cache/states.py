"""States of recurrent layers: for each sequence, those from which it can continue.

K/V of a token stay where they are when later tokens are refused; the state of a recurrent layer is one for
all tokens before it, and cannot be taken back. So states are kept after some tokens of a sequence, and a
sequence that was cut goes on from the last of them; the tokens from there on are computed again::

    tokens    [0 ............ start) [start ..... settled_len) [settled_len .... end)
               computed before        told by the router        draft tokens
    states kept after        ^                          ^                    ^

If some draft tokens are refused, those accepted are computed again with the next step: fewer than that step
had. If all or none are, nothing is. Of a prompt that is scored in chunks, all but a chunk's last token count
as settled: the next chunk begins with the logits of that token, so one is computed again with each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

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
"""States that a sequence has at most: after the tokens before a step, the settled ones, and all."""


class StateCache:
    """The states of all sequences of a block cache. A sequence is known by its first block."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[int, State]] = {}
        """By first block and number of tokens."""

    def resume_len(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """The most tokens of a sequence, up to ``num_tokens``, after which it can continue."""
        kept = self._kept.get(block_ids[0], {})
        return max((length for length in kept if length <= num_tokens), default=0)

    def begin(self, rows: SequenceRows) -> State | None:
        """The state from which the rows of a sequence go on, after which what lies after it is forgotten.

        Returns:
            None where the sequence begins.
        """
        kept = self._kept.setdefault(rows.block_ids[0], {})
        settled = max((length for length in kept if length <= min(rows.start, rows.num_settled)), default=0)
        for length in list(kept):
            if length not in (rows.start, settled) or rows.start == 0:
                del kept[length]
        assert rows.start == 0 or rows.start in kept, f"no state is kept behind {rows.start} tokens"
        return kept.get(rows.start)

    def keep(self, rows: SequenceRows, states: Mapping[int, State]) -> None:
        """Takes the states after some of the rows of a sequence, by number of tokens."""
        kept = self._kept[rows.block_ids[0]]
        kept.update(states)
        settled = sorted(length for length in kept if length <= rows.num_settled)
        wanted = {*settled[-2:], rows.end}
        for length in list(kept):
            if length not in wanted:
                del kept[length]

    def drop(self, block_ids: Iterable[int]) -> None:
        """Forgets the sequences that begin with one of some blocks."""
        for block_id in block_ids:
            self._kept.pop(block_id, None)

    def clear(self) -> None:
        self._kept.clear()

    def lengths(self, block_id: int) -> list[int]:
        """Numbers of tokens after which states are kept of the sequence with that first block."""
        return sorted(self._kept.get(block_id, {}))

    def bytes_of(self, block_id: int) -> int:
        """Bytes of one state of the sequence with that first block."""
        states = self._kept[block_id].values()
        return max(sum(layer.num_bytes for layer in state.values()) for state in states)

    def __len__(self) -> int:
        return len(self._kept)
