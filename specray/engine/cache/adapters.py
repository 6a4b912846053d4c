"""The adapters that sequences of an engine may use, and the slots in which its ranks have them."""

from __future__ import annotations

from typing import Protocol

from specray.adapter_slots import AdapterSlots, LoadedAdapter
from specray.errors import ConfigError, SpecrayError


class AdapterMissingError(SpecrayError):
    """The adapter of a new sequence is not loaded; nothing was changed."""


class AdapterRanks(Protocol):
    """What an engine has its ranks do with adapters; slots are numbered from 0."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_rank(self) -> int: ...

    def prepare(self, folder: str, digest: bytes) -> bytes:
        """Reads the adapter in a folder on all ranks, and keeps it ready; returns the digest of its bytes.

        Args:
            digest: what that must be; empty: whatever it is.

        Raises:
            ConfigError: it cannot be loaded; nothing has changed.
        """
        ...

    def put(self, slot: int) -> None:
        """Puts what is ready into a slot, in the place of what is in it."""
        ...

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        ...


class LoadedAdapters:
    """The adapters of a target, by digest.

    Args:
        ranks: None: the engine knows none.
    """

    def __init__(self, ranks: AdapterRanks | None) -> None:
        self._ranks = ranks
        self._slots = AdapterSlots(1 if ranks is None else ranks.num_slots)
        self._numbers: dict[bytes, int] = {}

    @property
    def loaded(self) -> tuple[LoadedAdapter, ...]:
        return self._slots.loaded

    @property
    def most(self) -> int:
        """Most adapters at a time; 0: the engine knows none."""
        return 0 if self._ranks is None else self._ranks.num_slots

    @property
    def max_rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.max_rank

    def load(self, folder: str, digest: bytes, *, is_pinned: bool) -> bytes:
        """See ``interfaces.SyncAdapterEngine.load_adapter``."""
        if self._ranks is None:
            raise ConfigError("the target has no adapters; allowed: a directory of them in target.adapters")
        if digest and self._slots.keep(digest, is_pinned=is_pinned):
            return digest
        found = self._ranks.prepare(folder, digest)
        if self._slots.keep(found, is_pinned=is_pinned):
            return found
        for gone in self._slots.make_room():
            del self._numbers[gone]
        slot = min(set(range(self._ranks.num_slots)) - set(self._numbers.values()))
        self._ranks.put(slot)
        self._numbers[found] = slot
        self._slots.add(LoadedAdapter(found, folder), is_pinned=is_pinned)
        return found

    def unload(self, digest: bytes) -> None:
        """See ``interfaces.SyncAdapterEngine.unload_adapter``."""
        self._clear(self._slots.unload(digest))

    def check(self, digest: bytes) -> None:
        """Raises AdapterMissingError where new sequences cannot use it."""
        if digest not in self._slots:
            raise AdapterMissingError(f"adapter {digest.hex()[:16]} is not loaded")

    def use(self, digest: bytes) -> int:
        """A sequence uses it from now on; returns its slot."""
        self._slots.use(digest)
        return self._numbers[digest]

    def end_use(self, digest: bytes) -> None:
        """A sequence has ended that used it."""
        self._clear(self._slots.end_use(digest))

    def _clear(self, digests: tuple[bytes, ...]) -> None:
        for digest in digests:
            assert self._ranks is not None, "it was loaded"
            self._ranks.clear(self._numbers.pop(digest))
