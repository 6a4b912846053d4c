"""Plans which fault comes when, from a seed, before the first."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specray.bench.testbed.kinds import BedKind
from specray.errors import ConfigError


class FaultKind(StrEnum):
    DRAFT_KILL = "draft-kill"
    DRAFT_STOP = "draft-stop"
    """Stopped for a while (SIGSTOP), then continued."""
    DRAFT_HANG = "draft-hang"
    """Stopped for a while, then killed."""
    DRAFT_PARTITION = "draft-partition"
    """The cable of the draft's host is pulled for a while."""
    DRAFT_DELAY = "draft-delay"
    DRAFT_LOSS = "draft-loss"
    TARGET_KILL = "target-kill"
    TARGET_STOP = "target-stop"
    """A rank is stopped for a while, then continued, if it still exists."""
    ROUTER_KILL = "router-kill"
    NODE_REMOVE = "node-remove"
    """The draft's node is lost with all its processes; another one joins."""
    NODE_DRAIN = "node-drain"
    """The draft's node is drained; another one joins first."""
    DRAFT_UPGRADE = "draft-upgrade"
    """The draft gets another model while it serves."""
    INGRESS_HANG = "ingress-hang"
    """The Ingress is stopped; Serve must replace it by itself."""
    CONTROLLER_KILL = "controller-kill"
    RAY_LOST = "ray-lost"
    """A part of the Ray of another service is killed: that service must end, and leave nothing."""
    SECOND_SERVICE = "second-service"
    """Another service is started on the ports of the first, and must be refused."""
    ENDLESS_HEAD = "endless-head"
    """A client sends a head that does not end, as fast as it can."""
    ADAPTER_CHURN = "adapter-churn"
    """An adapter is loaded, gets other bytes and is unloaded; a part of the load has adapters, too."""
    MODELS_KILL = "models-kill"
    """The owner of several models is killed; Serve starts another."""
    MODEL_CHURN = "model-churn"
    """One of several models is unloaded under its load, and loaded again."""


ALL_FAULTS = "all"
CLUSTER_FAULTS = frozenset({FaultKind.NODE_REMOVE, FaultKind.NODE_DRAIN, FaultKind.DRAFT_UPGRADE})
"""Faults that need a second node, or a service that is deployed as on a cluster."""
MODEL_FAULTS = frozenset({FaultKind.MODELS_KILL, FaultKind.MODEL_CHURN})
"""Faults that need several models."""
LINK_FAULTS = frozenset({FaultKind.DRAFT_PARTITION, FaultKind.DRAFT_DELAY, FaultKind.DRAFT_LOSS})
HOLD_S = {
    FaultKind.DRAFT_STOP: (2.0, 5.0),
    FaultKind.DRAFT_HANG: (3.0, 5.0),
    FaultKind.DRAFT_PARTITION: (3.0, 6.0),
    FaultKind.DRAFT_DELAY: (4.0, 8.0),
    FaultKind.DRAFT_LOSS: (4.0, 8.0),
    FaultKind.TARGET_STOP: (6.0, 8.0),
    FaultKind.NODE_REMOVE: (3.0, 5.0),
}
"""Range of a fault's length in seconds, by kind; kinds that are missing are over at once."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One entry of the schedule; times in seconds from the load's beginning."""

    kind: FaultKind
    at_s: float
    hold_s: float = 0.0


def possible_faults(bed: BedKind, *, num_models: int = 1) -> tuple[FaultKind, ...]:
    """Returns the kinds that a bed can have with that many models."""
    others = MODEL_FAULTS if num_models == 1 else {FaultKind.ADAPTER_CHURN}
    return tuple(
        kind
        for kind in FaultKind
        if kind not in others
        and (kind not in CLUSTER_FAULTS or bed is not BedKind.PROCESSES)
        and (kind not in LINK_FAULTS or bed is BedKind.NAMESPACES)
    )


def parse_faults(text: str, bed: BedKind, *, num_models: int = 1) -> tuple[FaultKind, ...]:
    """Reads ``all``, or kinds separated by commas. Raises ConfigError for one that the bed cannot have."""
    possible = possible_faults(bed, num_models=num_models)
    if text == ALL_FAULTS:
        return possible
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in possible:
            raise ConfigError(
                f"--faults has {name!r}; allowed on the test bed {bed}: all, {', '.join(possible)}"
            )
    return tuple(FaultKind(name) for name in dict.fromkeys(names))


def plan_faults(
    kinds: Sequence[FaultKind], *, num_faults: int, first_s: float, last_s: float, seed: int
) -> tuple[PlannedFault, ...]:
    """Plans faults at equal distances from ``first_s`` to ``last_s``; kinds come equally often, up to one."""
    if not kinds or not num_faults:
        return ()
    rng = random.Random(seed)
    order: list[FaultKind] = []
    while len(order) < num_faults:
        order += rng.sample(list(kinds), len(kinds))
    step_s = (last_s - first_s) / max(1, num_faults - 1)
    return tuple(
        PlannedFault(kind, first_s + index * step_s, _hold_s(kind, rng))
        for index, kind in enumerate(order[:num_faults])
    )


def _hold_s(kind: FaultKind, rng: random.Random) -> float:
    return round(rng.uniform(*HOLD_S[kind]), 1) if kind in HOLD_S else 0.0
