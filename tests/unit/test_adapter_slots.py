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
        self.order: list[bytes] = []
        """Who is there, the least recently used one first."""
        self.pinned: set[bytes] = set()
        self.leaving: set[bytes] = set()
        self.uses: list[bytes] = []

    @rule(digest=DIGESTS, is_pinned=st.booleans())
    def load(self, digest: bytes, is_pinned: bool) -> None:
        if digest in self.order:
            assert self.slots.keep(digest, is_pinned=is_pinned)
            self.order.remove(digest)
            self.leaving.discard(digest)
        else:
            assert not self.slots.keep(digest, is_pinned=is_pinned)
            idle = [each for each in self.order if each not in self.pinned and each not in self.uses]
            if len(self.order) == MOST and not idle:
                with pytest.raises(
                    OverloadedError, match=f"{MOST} adapters are loaded, all in use or pinned"
                ):
                    self.slots.make_room()
                return
            left = self.slots.make_room()
            assert left == (() if len(self.order) < MOST else (idle[0],))
            self.order = [each for each in self.order if each not in left]
            self.slots.add(LoadedAdapter(digest, "folder"), is_pinned=is_pinned)
        self.order.append(digest)
        if is_pinned:
            self.pinned.add(digest)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.order))
        self.slots.use(digest)
        self.uses.append(digest)
        self.order.remove(digest)
        self.order.append(digest)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(self.uses))
        self.uses.remove(digest)
        leaves = digest in self.leaving and digest not in self.uses
        assert self.slots.end_use(digest) == ((digest,) if leaves else ())
        if leaves:
            self.gone(digest)

    @rule(digest=DIGESTS)
    def unload(self, digest: bytes) -> None:
        leaves = digest in self.order and digest not in self.uses
        assert self.slots.unload(digest) == ((digest,) if leaves else ())
        self.pinned.discard(digest)
        if leaves:
            self.gone(digest)
        elif digest in self.order:
            self.leaving.add(digest)

    def gone(self, digest: bytes) -> None:
        self.order.remove(digest)
        self.leaving.discard(digest)
        self.pinned.discard(digest)

    @invariant()
    def is_as_told(self) -> None:
        assert [each.digest for each in self.slots.loaded] == self.order
        assert len(self.order) <= MOST
        assert [digest in self.slots for digest in self.order] == [
            digest not in self.leaving for digest in self.order
        ]
        assert set(self.uses) <= set(self.order)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
