"""Which adapters an engine has loaded: sequences that use them, pins, and who leaves for another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from specray.errors import OverloadedError


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """An adapter in memory."""

    digest: bytes
    folder: str


class AdapterSlots:
    """The adapters in memory, the least recently used one first.

    One that a sequence uses stays until no sequence does, also when it was told to leave; a pinned one stays
    until it is told to.

    Args:
        most: most adapters at a time, >= 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._loaded: dict[bytes, LoadedAdapter] = {}
        self._pinned: set[bytes] = set()
        self._leaving: set[bytes] = set()
        """Adapters that are to go once no sequence uses them."""
        self._uses: Counter[bytes] = Counter()

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        return tuple(self._loaded.values())

    def __contains__(self, digest: bytes) -> bool:
        """Whether new sequences may use it."""
        return digest in self._loaded and digest not in self._leaving

    def keep(self, digest: bytes, *, is_pinned: bool) -> bool:
        """Takes notice that one is asked for; returns whether it is there, and then it stays."""
        if digest not in self._loaded:
            return False
        self._leaving.discard(digest)
        self._touch(digest)
        if is_pinned:
            self._pinned.add(digest)
        return True

    def make_room(self) -> tuple[bytes, ...]:
        """The adapters that left for another one.

        Raises:
            OverloadedError: all are in use or pinned; nothing has left.
        """
        if len(self._loaded) < self._most:
            return ()
        for digest in self._loaded:
            if not self._uses[digest] and digest not in self._pinned:
                self._drop(digest)
                return (digest,)
        raise OverloadedError(
            f"{self._most} adapters are loaded, all in use or pinned; allowed: {self._most}"
        )

    def add(self, adapter: LoadedAdapter, *, is_pinned: bool = False) -> None:
        """Adds one that is not there, after ``make_room``."""
        assert adapter.digest not in self._loaded and len(self._loaded) < self._most
        self._loaded[adapter.digest] = adapter
        if is_pinned:
            self._pinned.add(adapter.digest)

    def use(self, digest: bytes) -> None:
        """A sequence uses it from now on; it is loaded."""
        assert digest in self._loaded
        self._uses[digest] += 1
        self._touch(digest)

    def end_use(self, digest: bytes) -> tuple[bytes, ...]:
        """A sequence has ended; returns the adapter if it has left with it."""
        self._uses[digest] -= 1
        assert self._uses[digest] >= 0
        return self._left([digest])

    def unload(self, digest: bytes) -> tuple[bytes, ...]:
        """Tells one to leave; returns it if it has, and () where it is in use or unknown."""
        if digest not in self._loaded:
            return ()
        self._pinned.discard(digest)
        self._leaving.add(digest)
        return self._left([digest])

    def _left(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        gone = tuple(each for each in digests if each in self._leaving and not self._uses[each])
        for each in gone:
            self._drop(each)
        return gone

    def _drop(self, digest: bytes) -> None:
        del self._loaded[digest], self._uses[digest]
        self._leaving.discard(digest)
        self._pinned.discard(digest)

    def _touch(self, digest: bytes) -> None:
        self._loaded[digest] = self._loaded.pop(digest)
