"""The adapters that sequences of an engine may use, and the slots in which its ranks have them."""

from __future__ import annotations

from typing import Protocol

from specray.adapter_slots import AdapterSlots, LoadedAdapter
from specray.errors import ConfigError, SpecrayError


class AdapterMissingError(SpecrayError):
    """The adapter of a new sequence is not loaded; nothing was changed."""


class AdapterReading(Protocol):
    """An adapter that is read on all ranks."""

    def read(self) -> None:
        """Reads it here, on any thread."""
        ...

    @property
    def digest(self) -> bytes:
        """The digest of its bytes, once it was read. Raises ConfigError: it cannot be loaded."""
        ...


class AdapterRanks(Protocol):
    """What an engine has its ranks do with adapters; slots are numbered from 0."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_rank(self) -> int: ...

    def start(self, folder: str, digest: bytes) -> AdapterReading:
        """Lets the other ranks begin to read the adapter in a folder, each on a thread of its own.

        Args:
            digest: of its bytes; empty: whatever it is.
        """
        ...

    def put(self, slot: int, reading: AdapterReading) -> None:
        """Puts the last adapter that was read into a slot, in the place of what is in it.

        Raises:
            ConfigError: ranks have not read the same; nothing has changed.
        """
        ...

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        ...


class LoadedAdapters:
    """The adapters of an engine, by digest.

    Args:
        ranks: None: the engine knows none.
    """

    def __init__(self, ranks: AdapterRanks | None) -> None:
        self._ranks = ranks
        self._slots = AdapterSlots(1 if ranks is None else ranks.num_slots)

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

    def start_loading(self, folder: str, digest: bytes = b"") -> AdapterLoading:
        """See ``interfaces.SyncAdapterEngine.start_loading``."""
        if self._ranks is None:
            raise ConfigError("the target has no adapters; allowed: a directory of them in target.adapters")
        is_there = bool(digest) and self._slots.keep(digest)
        reading = None if is_there else self._ranks.start(folder, digest)
        return AdapterLoading(self._slots, self._ranks, folder, digest, reading)

    def load(self, folder: str) -> bytes:
        """Loads an adapter at once. Raises as ``AdapterLoading.place``."""
        loading = self.start_loading(folder)
        loading.read()
        return loading.place()

    def unload(self, digest: bytes) -> None:
        """See ``interfaces.SyncAdapterEngine.unload_adapter``."""
        self._clear(self._slots.unload(digest))

    def check(self, digest: bytes) -> None:
        """Raises AdapterMissingError where new sequences cannot use it."""
        if digest not in self._slots:
            raise AdapterMissingError(f"adapter {digest.hex()[:16]} is not loaded")

    def use(self, digest: bytes) -> int:
        """A sequence uses it from now on; returns its slot."""
        return self._slots.use(digest)

    def end_use(self, digest: bytes) -> None:
        """A sequence has ended that used it."""
        self._clear(self._slots.end_use(digest))

    def _clear(self, slot: int | None) -> None:
        if slot is not None:
            assert self._ranks is not None, "it was loaded"
            self._ranks.clear(slot)


class AdapterLoading:
    """Implements ``interfaces.AdapterLoading``.

    Args:
        reading: None: the adapter was there.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        ranks: AdapterRanks,
        folder: str,
        digest: bytes,
        reading: AdapterReading | None,
    ) -> None:
        self._slots, self._ranks, self._reading = slots, ranks, reading
        self._folder, self._digest = folder, digest

    def read(self) -> None:
        if self._reading is not None:
            self._reading.read()

    def place(self) -> bytes:
        if self._reading is None:
            return self._digest
        found = self._reading.digest
        if not self._slots.keep(found):
            slot = self._slots.free_slot()
            self._ranks.put(slot, self._reading)
            self._slots.add(LoadedAdapter(found, self._folder, slot))
        return found
