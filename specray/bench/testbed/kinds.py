"""The kinds of test beds and of links, in a module that costs nothing to import."""

from __future__ import annotations

from enum import StrEnum


class BedKind(StrEnum):
    """Where the service under test lives."""

    PROCESSES = "processes"
    CLUSTER = "cluster"
    NAMESPACES = "namespaces"


class LinkKind(StrEnum):
    """Of what a slow link between router and draft is made."""

    RELAY = "relay"
    """A process that passes bytes on, anywhere."""
    NAMESPACES = "namespaces"
    """The draft on a host of its own, whose cable is slow."""
