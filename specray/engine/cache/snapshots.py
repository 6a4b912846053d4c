"""Snapshots of recurrent layers' states: where sequences can go on with what others have computed.

Keys and values of a known prefix are of use up to the deepest snapshot on its path. So a sequence leaves
some behind, at multiples of ``STATE_UNIT`` tokens, named as units are (``prefix_keys``): at the end of its
prompt, before its last messages, where it leaves the path of others, every ``SPARE_TOKENS``, and one that
moves along with its output (junctions and ends: Pan et al., *Marconi*, 2024). All take equally much memory.
The one that saves the fewest tokens goes first; what was not used for long saves less (Cao and Irani,
*Cost-Aware WWW Proxy Caching Algorithms*, 1997).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specray.engine.cache.prefix import PrefixIndex
from specray.engine.cache.reuse import Found, SequencePrefix
from specray.engine.cache.state_slots import STATE_UNIT
from specray.types import SamplingParams

SPARE_TOKENS = 4096
"""Tokens of a long prompt between snapshots that go before all others."""
MAX_BORDERS = 2
"""Last borders of messages before which a prompt leaves snapshots."""


@dataclass(eq=False, slots=True)
class Snapshot:
    """One that can be found."""

    index: int
    """Its place in the pool of states."""
    path: Sequence[bytes | None]
    """Names of all multiples of ``STATE_UNIT`` tokens up to its own, which is the last."""
    is_spare: bool
    parent: Snapshot | None
    """The deepest other one on its path."""
    clock: int
    """What the pool's clock was when it was taken or last found."""
    is_found: bool = False
    """Others went on from it."""

    @property
    def name(self) -> bytes:
        name = self.path[-1]
        assert name is not None, "a unit ends behind it"
        return name

    @property
    def num_tokens(self) -> int:
        return len(self.path) * STATE_UNIT

    @property
    def num_saved(self) -> int:
        """Tokens that would be computed again without it."""
        return self.num_tokens - (0 if self.parent is None else self.parent.num_tokens)


class Snapshots:
    """All snapshots of an engine.

    Args:
        count: that there is room for.
        index: knows which prefixes have keys and values, without which a snapshot is of no use.
    """

    def __init__(self, count: int, index: PrefixIndex) -> None:
        self.index = index
        self.num_evicted = 0
        self._free = list(range(count - 1, -1, -1))
        self._held: dict[bytes, Snapshot] = {}
        self._clock = 0
        """Worth of the last one that was evicted: it makes what comes later worth more."""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def find(self, path: Sequence[bytes | None]) -> Snapshot | None:
        """The deepest snapshot on a path."""
        for name in reversed(path):
            if name is not None and (found := self._held.get(name)) is not None:
                return found
        return None

    def use(self, snapshot: Snapshot) -> None:
        """Notes that a sequence goes on from it."""
        snapshot.clock, snapshot.is_found = self._clock, True

    def take(self, num_saved: int, *, is_spare: bool = False) -> int | None:
        """A place for a snapshot that saves so many tokens; None: all others are worth more."""
        if self._free:
            return self._free.pop()
        victim = min(self._held.values(), key=self._rank, default=None)
        if victim is None or self._rank(victim) > (True, not is_spare, self._clock + num_saved):
            return None
        self._clock = max(self._clock, victim.clock + victim.num_saved)
        self.num_evicted += 1
        return self.remove(victim)

    def give(self, index: int) -> None:
        """Gives back a place in which nothing can be found."""
        self._free.append(index)

    def add(self, index: int, path: Sequence[bytes | None], *, is_spare: bool = False) -> Snapshot:
        """Lets others find what was put into a place; of two with one name the first stays."""
        added = Snapshot(index, path, is_spare, self.find(path[:-1]), self._clock)
        name = added.name
        if (known := self._held.get(name)) is not None:
            self.give(index)
            known.is_spare &= is_spare
            return known
        depth = len(path)
        for other in self._held.values():
            if other.parent is added.parent and len(other.path) > depth and other.path[depth - 1] == name:
                other.parent = added
        self._held[name] = added
        return added

    def remove(self, snapshot: Snapshot) -> int:
        """Lets nobody find a snapshot any more; returns its place, which is the caller's."""
        assert self.holds(snapshot), snapshot
        del self._held[snapshot.name]
        for other in self._held.values():
            if other.parent is snapshot:
                other.parent = snapshot.parent
        return snapshot.index

    def holds(self, snapshot: Snapshot) -> bool:
        return self._held.get(snapshot.name) is snapshot

    def check_integrity(self, taken: Sequence[int], count: int) -> None:
        """Raises AssertionError when a place is lost or used twice, or a parent is not the deepest.

        Args:
            taken: places that sequences have.
            count: of all places.
        """
        places = [*self._free, *taken, *(each.index for each in self._held.values())]
        assert sorted(places) == list(range(count)), f"places of snapshots are lost or used twice: {places}"
        for name, each in self._held.items():
            assert each.path[-1] == name and each.parent is self.find(each.path[:-1]), each

    def _rank(self, snapshot: Snapshot) -> tuple[bool, bool, int]:
        """The lowest goes first."""
        is_of_use = self.index.holder(snapshot.name) is not None
        return is_of_use, not snapshot.is_spare, snapshot.clock + snapshot.num_saved


@dataclass(frozen=True, slots=True)
class Mark:
    """A snapshot that a step takes on its way."""

    num_tokens: int
    index: int
    is_spare: bool


class SequenceSnapshots:
    """The snapshots that one sequence leaves behind.

    Args:
        prefix: names its tokens.
        keeps_outputs: whether it leaves one behind its output, whose bits are not those of a prompt.
    """

    __slots__ = (
        "_borders",
        "_deepest",
        "_junction",
        "_keeps_outputs",
        "_last",
        "_moving",
        "_pool",
        "_prefix",
        "found",
        "marks",
    )

    def __init__(
        self, pool: Snapshots, prefix: SequencePrefix, sampling: SamplingParams, *, keeps_outputs: bool
    ) -> None:
        self._pool = pool
        self._prefix = prefix
        self._keeps_outputs = keeps_outputs
        last = self._last = sampling.num_prompt_tokens - 1
        """Tokens before the prompt's last, which give the first ones of its output."""
        self._borders = {_unit_before(border) for border in (last, *sampling.message_borders[-MAX_BORDERS:])}
        self._junction = 0
        self._deepest = 0
        """Tokens behind which it has left or found a snapshot."""
        self._moving: Snapshot | None = None
        """The one behind its output, which gives way to a later one unless others have found it."""
        self.marks: list[Mark] = []
        """Taken in a step, and not known to others yet."""
        self.found: Snapshot | None = None
        """The one from which it goes on now."""

    def resume(self, found: Found | None, start: int) -> Found | None:
        """The part of a known prefix behind which there is a snapshot, deeper than ``start`` tokens."""
        self.found = None
        self._forget_marks(start)
        if found is None:
            return None
        index = self._pool.index
        # Where others went on: whoever comes next goes on from there.
        self._junction = max(self._junction, _unit_before(found.length))
        snapshot = self._pool.find(index.names(found.keys, STATE_UNIT))
        if snapshot is None or snapshot.num_tokens <= start:
            return None
        self._pool.use(snapshot)
        self.found, self._deepest = snapshot, snapshot.num_tokens
        return Found(found.start, self._deepest, found.keys[: index.num_units(self._deepest)])

    def mark(self, start: int, settled: int) -> None:
        """Takes places for the states behind some of the tokens ``start .. settled - 1`` of a step."""
        spares = set(range(start // SPARE_TOKENS * SPARE_TOKENS, settled + 1, SPARE_TOKENS))
        wanted = self._borders | {self._junction}
        before = max(start, self._deepest)
        for place in sorted(each for each in wanted | spares if before < each <= settled):
            is_spare = place not in wanted
            if not self._pool.index.ends_unit(place):
                continue
            index = self._pool.take(place - before, is_spare=is_spare)
            if index is not None:
                self.marks.append(Mark(place, index, is_spare))
                before = self._deepest = place

    def settle(self, base: int) -> tuple[int, int] | None:
        """Lets others find the states behind known tokens.

        Args:
            base: tokens in the sequence's state, from which records lead on to all known ones.

        Returns:
            A state to be kept now, if there is one: its tokens, and its place.
        """
        known_len = self._prefix.known_len
        ready = [mark for mark in self.marks if mark.num_tokens <= known_len]
        end = _unit_before(known_len)
        is_crossed = self._keeps_outputs and max(self._last, self._deepest) < end and 0 < base <= end
        if not ready and not is_crossed:
            return None
        path = self._pool.index.names(self._prefix.keys, STATE_UNIT)
        for mark in ready:
            self._pool.add(mark.index, path[: mark.num_tokens // STATE_UNIT], is_spare=mark.is_spare)
        self.marks = [mark for mark in self.marks if mark.num_tokens > known_len]
        if not is_crossed or path[-1] is None:
            return None
        return self._move(end, path)

    def release(self) -> None:
        self._forget_marks(0)

    def _move(self, end: int, path: Sequence[bytes | None]) -> tuple[int, int] | None:
        """Puts the one behind the output further on."""
        pool, moving = self._pool, self._moving
        if moving is not None and not moving.is_found and pool.holds(moving):
            index: int | None = pool.remove(moving)
        else:
            index = pool.take(end - self._deepest)
        self._moving = None
        if index is None:
            return None
        added = pool.add(index, path)
        self._deepest = end
        if added.index != index:
            return None  # Another sequence's.
        self._moving = added
        return end, index

    def _forget_marks(self, start: int) -> None:
        """Gives back what lies behind tokens that are computed again."""
        for mark in self.marks:
            if mark.num_tokens > start:
                self._pool.give(mark.index)
        self.marks = [mark for mark in self.marks if mark.num_tokens <= start]
        self._deepest = min(self._deepest, start)


def _unit_before(num_tokens: int) -> int:
    return num_tokens // STATE_UNIT * STATE_UNIT
