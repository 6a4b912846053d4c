"""The kinds of test beds and of links, in a module that costs nothing to import."""

from __future__ import annotations

from enum import StrEnum


class BedKind(StrEnum):
    PROCESSES = "processes"
    CLUSTER = "cluster"
    NAMESPACES = "namespaces"


class LinkKind(StrEnum):
    """The way a link between router and draft is made slow."""

    RELAY = "relay"
    """A process that passes bytes on; works anywhere."""
    NAMESPACES = "namespaces"
    """A host for the draft, with a slow cable."""
