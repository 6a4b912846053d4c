"""The kinds of test beds, in a module that costs nothing to import."""

from __future__ import annotations

from enum import StrEnum


class BedKind(StrEnum):
    """Where the service under test lives."""

    PROCESSES = "processes"
    CLUSTER = "cluster"
    NAMESPACES = "namespaces"
