"""Requests of one priority that wait, served so that every tenant gets an equal share of the tokens.

Start-time fair queueing (Goyal, Vin and Cheng, 1996): every tenant has a tag, the tokens it has been served
so far on a clock that all tenants share; the tenant with the smallest tag goes next and its tag grows by what
the request may cost. A new tenant starts at the clock, so earlier idleness is no credit; a tenant that comes
back soon keeps its tag, so leaving the queue between two requests wins nothing.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Generic, Protocol, TypeVar

MAX_IDLE_TENANTS = 1024
"""Largest number of tenants without waiting requests whose tags are kept; those with the largest tags."""


class Waiting(Protocol):
    """An entry as the queue sees it."""

    @property
    def request_id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> int:
        """Priority; lower is served earlier."""
        ...

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute before the first new one."""
        ...

    @property
    def num_expected_tokens(self) -> int:
        """Most tokens to compute in all."""
        ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


class Line(Generic[WaitingT]):
    """Waiting entries of one tenant, first in first out."""

    def __init__(self, tag: int) -> None:
        self.tag = tag
        """Tokens on the shared clock at which its first request starts."""
        self.entries: OrderedDict[str, WaitingT] = OrderedDict()
        self.num_tokens = 0
        """Prompt tokens of all entries."""

    def push(self, entry: WaitingT) -> None:
        self.entries[entry.request_id] = entry
        self.num_tokens += entry.num_queued_tokens

    def remove(self, request_id: str) -> WaitingT:
        entry = self.entries.pop(request_id)
        self.num_tokens -= entry.num_queued_tokens
        return entry


class FairQueue(Generic[WaitingT]):
    """The lines of all tenants at one priority."""

    def __init__(self) -> None:
        self.lines: dict[str, Line[WaitingT]] = {}
        """Lines of tenants that wait, none empty, in the order in which they came to wait."""
        self.idle_tags: dict[str, int] = {}
        """Tags of the last tenants whose lines are empty: at most MAX_IDLE_TENANTS."""
        self._clock = 0

    def __len__(self) -> int:
        return sum(len(line.entries) for line in self.lines.values())

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __iter__(self) -> Iterator[WaitingT]:
        """Yields entries in the order in which ``pop`` takes them when nobody comes."""
        turns = [
            (line.tag, position, iter(line.entries.values()))
            for position, line in enumerate(self.lines.values())
        ]
        heapq.heapify(turns)
        while turns:
            tag, position, entries = turns[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, (tag + entry.num_expected_tokens, position, entries))
                yield entry

    def push(self, entry: WaitingT) -> None:
        """Appends to the line of the entry's tenant."""
        line = self.lines.get(entry.tenant)
        if line is None:
            line = self.lines[entry.tenant] = Line(max(self._clock, self.idle_tags.pop(entry.tenant, 0)))
        line.push(entry)

    def pop(self, without: Collection[str] = ()) -> WaitingT:
        """Takes out the first entry of the line whose turn it is, and charges its tenant.

        Args:
            without: tenants whose turn it is not; another one must wait.
        """
        lines = ((tenant, line) for tenant, line in self.lines.items() if tenant not in without)
        tenant, line = min(lines, key=lambda item: item[1].tag)
        entry = line.remove(next(iter(line.entries)))
        self._clock = line.tag
        line.tag += entry.num_expected_tokens
        self._leave_if_empty(tenant, line)
        return entry

    def remove(self, entry: WaitingT) -> None:
        """Takes out an entry that waits here; nothing is charged."""
        line = self.lines[entry.tenant]
        line.remove(entry.request_id)
        self._leave_if_empty(entry.tenant, line)

    def refund(self, tenant: str, num_tokens: int) -> None:
        """Gives back ``num_tokens`` that ``pop`` charged too much for a request that has ended."""
        if tenant in self.lines:
            line = self.lines[tenant]
            line.tag = max(self._clock, line.tag - num_tokens)
        elif tenant in self.idle_tags:
            self.idle_tags[tenant] -= num_tokens

    def _leave_if_empty(self, tenant: str, line: Line[WaitingT]) -> None:
        if line.entries:
            return
        del self.lines[tenant]
        self.idle_tags[tenant] = line.tag
        if len(self.idle_tags) > MAX_IDLE_TENANTS:
            # Forgetting the smallest tag gives its tenant the least.
            del self.idle_tags[min(self.idle_tags, key=lambda name: self.idle_tags[name])]
