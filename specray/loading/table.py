"""Decides which of several models are loaded: what to load, what to unload for it, one step after the other.

A pure state machine. Its owner takes ``step`` after ``step``, does what it says, and tells how that ended. So
no two loads take the same room, and none begins before the room of what was unloaded is free again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

BACK_OFF_S: Final = 5.0
"""Seconds before a load that failed is tried again; twice as many after each further failure."""
MAX_BACK_OFF_S: Final = 300.0


class ModelState(StrEnum):
    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Room:
    """What models take, or a cluster has."""

    memory_bytes: float = 0.0
    gpus: float = 0.0

    def __add__(self, other: Room) -> Room:
        return Room(self.memory_bytes + other.memory_bytes, self.gpus + other.gpus)

    def holds(self, other: Room) -> bool:
        return other.memory_bytes <= self.memory_bytes and other.gpus <= self.gpus + 1e-9

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} GPUs" if self.gpus else ""
        return f"{self.memory_bytes / 2**30:.2f} GiB{gpus}"


@dataclass(frozen=True, slots=True)
class Load:
    """Load it; ``loaded`` or ``failed`` says how that ended."""

    name: str


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload it if nobody uses it; ``unloaded`` or ``busy`` says how that ended."""

    name: str
    is_forced: bool = False
    """True: also where it is used; requests under way are finished first."""


@dataclass(slots=True, kw_only=True)
class ModelEntry:
    """A model, and what is known of it. Times are seconds of one monotonic clock."""

    name: str
    needs: Room
    """What it takes: by its files and caches, and once it was loaded as it was seen to take."""
    is_measured: bool = False
    has_fixed_needs: bool = False
    """The configuration says what it takes."""
    pinned: bool = False
    keep_alive_s: float | None = None
    priority: int = 0
    """Lower is loaded earlier, and leaves later."""
    state: ModelState = ModelState.UNLOADED
    reason: str = ""
    """Why it failed."""
    num_failures: int = 0
    retry_s: float = 0.0
    """Time from which a load is tried again."""
    used_s: float = 0.0
    """Time of the last use that is known of."""
    num_users: int = 0
    """Requests that run or wait, as far as is known."""
    wanted_s: float | None = None
    """Time since which somebody waits for it; None: nobody."""
    is_unwanted: bool = False
    """Somebody asked to unload it."""
    needs_victim: bool = False
    """The last load failed for memory though there seemed to be enough: another model leaves first."""


class ModelTable:
    """The states of all models.

    Args:
        models: those that may be loaded.
        room: what all of them together may take.
    """

    def __init__(self, models: Iterable[ModelEntry], room: Room) -> None:
        self._models = {model.name: model for model in models}
        self.room = room

    def __getitem__(self, name: str) -> ModelEntry:
        return self._models[name]

    @property
    def models(self) -> Mapping[str, ModelEntry]:
        return self._models

    @property
    def taken(self) -> Room:
        """What is taken by models that are loaded, or on their way in or out."""
        there = (ModelState.LOADING, ModelState.LOADED, ModelState.DRAINING)
        return sum((each.needs for each in self._models.values() if each.state in there), Room())

    def want(self, name: str, now: float) -> None:
        """Somebody waits for the model from now on, until it is loaded or has failed."""
        model = self._models[name]
        model.is_unwanted = False
        if model.state is not ModelState.LOADED and model.wanted_s is None:
            model.wanted_s = now
        model.used_s = max(model.used_s, now)

    def forgo(self, name: str) -> None:
        """Nobody waits any more."""
        self._models[name].wanted_s = None

    def unwant(self, name: str) -> None:
        """The model is to be unloaded, also where it is used."""
        model = self._models[name]
        model.is_unwanted = model.state in (ModelState.LOADING, ModelState.LOADED)
        if model.state is ModelState.FAILED:
            model.state, model.reason, model.num_failures = ModelState.UNLOADED, "", 0

    def adopt(self, name: str, state: ModelState, now: float) -> None:
        """Takes over a model that is there already, in this state."""
        model = self._models[name]
        model.state, model.used_s = state, now
        if state is ModelState.LOADED:
            model.wanted_s = None

    def observe(self, name: str, num_users: int, used_s: float) -> None:
        """Takes what the Ingresses know of a model's use."""
        model = self._models[name]
        model.num_users, model.used_s = num_users, max(model.used_s, used_s)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for a load."""
        return any(each.wanted_s is not None for each in self._models.values())

    def measured(self, name: str, num_bytes: float) -> bool:
        """Takes the bytes that a loaded model takes now; the most that was seen counts. True: it is more."""
        model = self._models[name]
        if model.has_fixed_needs or (model.is_measured and num_bytes <= model.needs.memory_bytes):
            return False
        model.needs, model.is_measured = replace(model.needs, memory_bytes=num_bytes), True
        return True

    def step(self, now: float) -> Load | Unload | None:
        """What is to be done now; None: nothing, or what was begun has not ended."""
        if any(each.state in (ModelState.LOADING, ModelState.DRAINING) for each in self._models.values()):
            return None
        for model in self._models.values():
            if model.is_unwanted and model.state is ModelState.LOADED:
                return self._unload(model, is_forced=True)
        wanted = [each for each in self._models.values() if self._is_due(each, now)]
        if wanted:
            return self._load(min(wanted, key=lambda each: (each.priority, each.wanted_s or 0.0)), now)
        for model in self._models.values():
            is_timed = self._is_idle(model) and model.keep_alive_s is not None
            if is_timed and now - model.used_s >= (model.keep_alive_s or 0.0):
                return self._unload(model)
        return None

    def loaded(self, name: str, now: float) -> None:
        model = self._begun(name, ModelState.LOADING)
        model.state, model.wanted_s, model.num_failures, model.reason = ModelState.LOADED, None, 0, ""
        model.used_s = max(model.used_s, now)

    def failed(self, name: str, reason: str, now: float, *, is_memory: bool = False) -> None:
        """A load has failed. One that lacked memory is tried again where another model can leave for it."""
        model = self._begun(name, ModelState.LOADING)
        if is_memory and model.wanted_s is not None and self._victim() is not None:
            model.state, model.needs_victim = ModelState.UNLOADED, True
            return
        self._fail(model, reason, now)

    def unloaded(self, name: str) -> None:
        model = self._begun(name, ModelState.DRAINING)
        model.state, model.is_unwanted, model.num_users = ModelState.UNLOADED, False, 0

    def busy(self, name: str, now: float) -> None:
        """Somebody uses the model that was to be unloaded: it stays."""
        model = self._begun(name, ModelState.DRAINING)
        model.state, model.wanted_s, model.num_users = ModelState.LOADED, None, max(1, model.num_users)
        model.used_s = now

    def _begun(self, name: str, state: ModelState) -> ModelEntry:
        model = self._models[name]
        assert model.state is state, f"{name} is {model.state}, not {state}"
        return model

    def _is_due(self, model: ModelEntry, now: float) -> bool:
        is_out = model.state is ModelState.UNLOADED or (
            model.state is ModelState.FAILED and now >= model.retry_s
        )
        return model.wanted_s is not None and is_out

    def _is_idle(self, model: ModelEntry) -> bool:
        return (
            model.state is ModelState.LOADED
            and not model.pinned
            and not model.num_users
            and model.wanted_s is None
        )

    def _victim(self) -> ModelEntry | None:
        idle = [each for each in self._models.values() if self._is_idle(each)]
        return min(idle, key=lambda each: (-each.priority, each.used_s), default=None)

    def _load(self, model: ModelEntry, now: float) -> Load | Unload | None:
        if not self.room.holds(model.needs):
            self._fail(model, f"it needs {model.needs}; allowed for all models: {self.room}", now)
            return None
        if model.needs_victim or not self.room.holds(self.taken + model.needs):
            victim = self._victim()
            model.needs_victim = False
            # Where none is idle, it waits until one is.
            return None if victim is None else self._unload(victim)
        model.state = ModelState.LOADING
        return Load(model.name)

    def _unload(self, model: ModelEntry, *, is_forced: bool = False) -> Unload:
        model.state = ModelState.DRAINING
        return Unload(model.name, is_forced)

    def _fail(self, model: ModelEntry, reason: str, now: float) -> None:
        model.state, model.reason, model.wanted_s = ModelState.FAILED, reason, None
        model.needs_victim = model.is_unwanted = False
        back_off_s = min(BACK_OFF_S * 2.0**model.num_failures, MAX_BACK_OFF_S)
        model.num_failures += 1
        model.retry_s = now + back_off_s
