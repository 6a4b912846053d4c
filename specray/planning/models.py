"""Plans which of several models are loaded together, and which leaves for which, by what each needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specray.config import Config
from specray.loading.needs import entry_of
from specray.loading.table import Load, ModelEntry, ModelState, ModelTable, Room


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What happens when one model is asked for, after those before it."""

    model: ModelEntry
    is_at_start: bool
    leaving: tuple[str, ...]
    """Models that are unloaded for it, in this order."""
    problem: str
    """Why it is not loaded; empty: it is."""


@dataclass(frozen=True, slots=True)
class ModelsPlan:
    room: Room
    total: Room
    """What all models together need."""
    loads: tuple[PlannedLoad, ...]

    @property
    def fits(self) -> bool:
        """Whether all models are loaded together in the end."""
        return self.room.holds(self.total)


def plan_models(config: Config, *, memory_bytes: float, num_gpus: float | None = None) -> ModelsPlan:
    """Asks for each model once, while none is used: first for those of the start, then for the others.

    Args:
        memory_bytes: for all models together.
        num_gpus: GPUs of the cluster; None: as many as they need.
    """
    entries = [entry_of(config, each) for each in config.models]
    total = sum((each.needs for each in entries), Room())
    room = Room(memory_bytes, total.gpus if num_gpus is None else num_gpus)
    table = ModelTable(entries, room)
    order = sorted(config.models, key=lambda each: (each.load != "start", each.priority))
    loads = list[PlannedLoad]()
    for now, model in enumerate(order):
        table.want(model.name, float(now))
        leaving = tuple(_left(table, float(now)))
        entry = table[model.name]
        problem = entry.reason if entry.state is ModelState.FAILED else ""
        if entry.state is ModelState.UNLOADED:
            problem = "nothing may leave for it: all that is loaded is pinned"
            table.forgo(model.name)
        loads.append(PlannedLoad(entry, model.load == "start", leaving, problem))
    return ModelsPlan(room, total, tuple(loads))


def _left(table: ModelTable, now: float) -> Iterable[str]:
    """Does what the table decides until it decides nothing more; yields what leaves."""
    while (step := table.step(now)) is not None:
        if isinstance(step, Load):
            table.loaded(step.name, now)
        else:
            table.unloaded(step.name)
            yield step.name
