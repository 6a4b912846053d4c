"""Finds the processes of a service by what Ray says of its actors, never by the name of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class PartRole(StrEnum):
    """A part of the service that may be hit by a fault."""

    INGRESS = "ingress"
    ROUTER = "router"
    TARGET = "target"
    DRAFT = "draft"
    CONTROLLER = "controller"
    """Serve's."""
    MODELS = "models"
    """The owner of several models."""


_ROLE_OF_CLASS = {
    "TargetRank": PartRole.TARGET,
    "DraftReplica": PartRole.DRAFT,
    "RouterReplica": PartRole.ROUTER,
    "Draft": PartRole.DRAFT,
    "Router": PartRole.ROUTER,
    "Ingress": PartRole.INGRESS,
    "Models": PartRole.MODELS,
    "ServeController": PartRole.CONTROLLER,
}


@dataclass(frozen=True, slots=True)
class Part:
    role: PartRole
    actor_id: str
    pid: int
    node_id: str
    replica: str = ""
    """Label ``replica`` of its metrics; empty for what is no replica of Serve's."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Part:
        return cls(**{**values, "role": PartRole(values["role"])})


def living_parts(actors: Mapping[str, Mapping[str, Any]]) -> tuple[Part, ...]:
    """Returns the living parts among Ray's actors (its actor table by actor id), oldest first."""
    found = [
        (actor["StartTime"], Part(role, actor_id, actor["Pid"], actor["Address"]["NodeID"], _replica(actor)))
        for actor_id, actor in actors.items()
        if actor["State"] == "ALIVE" and (role := role_of(actor["ActorClassName"])) is not None
    ]
    return tuple(part for _, part in sorted(found, key=lambda entry: (entry[0], entry[1].actor_id)))


def _replica(actor: Mapping[str, Any]) -> str:
    prefix, _, replica = str(actor["Name"]).rpartition("#")
    return replica if prefix.startswith("SERVE_REPLICA::") else ""


def role_of(class_name: str) -> PartRole | None:
    """Returns the role of an actor's class; replicas are ``ServeReplica:application:deployment``."""
    return _ROLE_OF_CLASS.get(class_name.rsplit(":", 1)[-1].rsplit(".", 1)[-1])


def of_role(parts: Iterable[Part], role: PartRole) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.role is role)
