"""Which adapters an engine has loaded, in which of its slots, and which sequences use them.

Who has adapters loaded makes room first: none leaves by itself for another.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from specray.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory."""

    digest: bytes
    folder: str
    slot: int
    """Its place in memory, from 0 on."""


class AdapterSlots:
    """The adapters in memory, in the order of their loads.

    One that a sequence uses stays until no sequence does, also when it was told to leave.

    Args:
        most: most adapters at a time, >= 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._loaded: dict[bytes, LoadedAdapter] = {}
        self._leaving: set[bytes] = set()
        """Adapters that are to go once no sequence uses them."""
        self._uses: Counter[bytes] = Counter()

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        return tuple(self._loaded.values())

    def __contains__(self, digest: bytes) -> bool:
        """Whether new sequences may use it."""
        return digest in self._loaded and digest not in self._leaving

    def keep(self, digest: bytes) -> bool:
        """Takes notice that one is asked for; returns whether it is there, and then it stays."""
        self._leaving.discard(digest)
        return digest in self._loaded

    def free_slot(self) -> int:
        """Raises OverloadedError where there is none."""
        if len(self._loaded) == self._most:
            raise OverloadedError(f"{self._most} adapters are loaded; allowed: {self._most}")
        return min(set(range(self._most)) - {each.slot for each in self._loaded.values()})

    def add(self, adapter: LoadedAdapter) -> None:
        """Adds one that is not there, in a free slot."""
        assert adapter.digest not in self._loaded
        self._loaded[adapter.digest] = adapter

    def use(self, digest: bytes) -> int:
        """A sequence uses it from now on; returns its slot. It is loaded."""
        self._uses[digest] += 1
        return self._loaded[digest].slot

    def end_use(self, digest: bytes) -> int | None:
        """A sequence has ended; returns the slot of the adapter if it has left with it."""
        self._uses[digest] -= 1
        assert self._uses[digest] >= 0
        return self._left(digest)

    def unload(self, digest: bytes) -> int | None:
        """Tells one to leave; returns its slot if it has, and None where it is in use or unknown."""
        if digest not in self._loaded:
            return None
        self._leaving.add(digest)
        return self._left(digest)

    def _left(self, digest: bytes) -> int | None:
        if digest not in self._leaving or self._uses[digest]:
            return None
        self._leaving.discard(digest)
        del self._uses[digest]
        return self._loaded.pop(digest).slot
