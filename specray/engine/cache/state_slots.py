"""Slots for the states of recurrent layers: which are free, and what their owners can go on from.

Recurrent layers keep one state of all tokens of a sequence, which cannot be cut as keys can. So the last rows
of a step, its *open* ones, leave the state as it is and leave records beside it; those that stay are put into
the state, in order, when the next step begins::

    tokens   [0 ............... base) [base ........ end)
              in the state             records of open rows

A sequence can go on after any token from ``base`` to ``end``. A draft, whose tokens come one by one before it
hears of any, leaves the state where it is for some steps, each of which begins with all records.
"""

from __future__ import annotations

from collections.abc import Sequence

from specray.engine.step import SequenceRows
from specray.prefix_keys import SNAPSHOT_TOKENS

STATE_UNIT = SNAPSHOT_TOKENS
"""Tokens between the places where a prompt can be cut without another bit in recurrent layers."""
MAX_OPEN_ROWS = 8
"""Open tokens of a target's sequence, at most: a sampled one and seven draft tokens. Each has records, of a
hundredth of a state."""
DRAFT_OPEN_ROWS = 33
"""Open tokens of a draft's sequence, at most: a committed one, 16 under verification, and 16 drafted behind
them."""


class StateSlots:
    """Hands out slots ``0..num_slots - 1``, lowest first, and knows how many tokens each has seen.

    Args:
        num_slots: sequences at once, with the one of the health check.
        max_open: most open rows of a sequence in one step.
        num_snapshots: states that can be kept besides, for other sequences.
    """

    def __init__(self, num_slots: int, max_open: int, num_snapshots: int = 0) -> None:
        self.num_slots = num_slots
        self.max_open = max_open
        self.num_snapshots = num_snapshots
        self.clear()

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self) -> int:
        """A free slot; there is one for each sequence that an engine holds."""
        return self._free.pop()

    def give(self, slot: int) -> None:
        """Gives a slot back. What it holds stays, and is never read."""
        assert slot not in self._free, f"slot {slot} is not in use"
        self.forget(slot)
        self._free.append(slot)

    def forget(self, slot: int) -> None:
        """Lets the slot's sequence begin anew."""
        self.bases[slot] = self.ends[slot] = 0

    def clear(self) -> None:
        """Frees all slots."""
        self._free = list(range(self.num_slots - 1, -1, -1))
        self.bases = [0] * self.num_slots
        """Tokens in each slot's state; 0: what lies there is nobody's."""
        self.ends = [0] * self.num_slots
        """Tokens in each slot's state and records."""

    def resume_len(self, slot: int, num_tokens: int) -> int:
        """The most tokens of a sequence, up to ``num_tokens``, after which it can continue."""
        return min(num_tokens, self.ends[slot]) if num_tokens >= self.bases[slot] else 0

    def begin(self, rows: Sequence[SequenceRows]) -> list[int]:
        """Begins a step, whose states are nobody's until it ends; returns each sequence's base."""
        bases = []
        for item in rows:
            slot, base = item.state_slot, 0 if item.start == 0 else self.bases[item.state_slot]
            assert item.num_open <= self.max_open and base <= item.settled, (item, base, self.max_open)
            assert base <= item.start <= max(base, self.ends[slot]), (item, base, self.ends[slot])
            self.forget(slot)
            bases.append(base)
        return bases

    def finish(self, rows: Sequence[SequenceRows]) -> None:
        """Ends a step."""
        for item in rows:
            self.bases[item.state_slot], self.ends[item.state_slot] = item.settled, item.end
