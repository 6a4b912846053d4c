"""Adapters in an engine's memory: who stays, who leaves, against a model of the same in plain lists."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specray.adapter_slots import AdapterSlots, LoadedAdapter
from specray.errors import OverloadedError

MOST = 3
DIGESTS = st.sampled_from([bytes([number]) * 32 for number in range(6)])


class Slots(RuleBasedStateMachine):
    """Loads, uses, ends and unloads in any order; the model says who must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterSlots(MOST)
        self.places: dict[bytes, int] = {}
        """Slots of those that are there, in the order of their loads."""
        self.leaving: set[bytes] = set()
        self.uses: list[bytes] = []

    @rule(digest=DIGESTS)
    def load(self, digest: bytes) -> None:
        assert self.slots.keep(digest) == (digest in self.places)
        self.leaving.discard(digest)
        if digest in self.places:
            return
        if len(self.places) == MOST:
            with pytest.raises(OverloadedError, match=f"{MOST} adapters are loaded; allowed: {MOST}"):
                self.slots.free_slot()
            return
        slot = self.slots.free_slot()
        assert 0 <= slot < MOST and slot not in self.places.values()
        self.slots.add(LoadedAdapter(digest, "folder", slot))
        self.places[digest] = slot

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from([*self.places]))
        assert self.slots.use(digest) == self.places[digest]
        self.uses.append(digest)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.uses))
        self.uses.remove(digest)
        leaves = digest in self.leaving and digest not in self.uses
        assert self.slots.end_use(digest) == (self.gone(digest) if leaves else None)

    @rule(digest=DIGESTS)
    def unload(self, digest: bytes) -> None:
        leaves = digest in self.places and digest not in self.uses
        if digest in self.places:
            self.leaving.add(digest)
        assert self.slots.unload(digest) == (self.gone(digest) if leaves else None)

    def gone(self, digest: bytes) -> int:
        self.leaving.discard(digest)
        return self.places.pop(digest)

    @invariant()
    def is_as_told(self) -> None:
        assert {each.digest: each.slot for each in self.slots.loaded} == self.places
        assert [digest in self.slots for digest in self.places] == [
            digest not in self.leaving for digest in self.places
        ]
        assert set(self.uses) <= self.places.keys()


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
