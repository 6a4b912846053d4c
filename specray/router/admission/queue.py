"""The queue of requests that wait to run: bounded, by priority, fair between tenants."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice
from typing import Any, Generic, NamedTuple

from specray.errors import OverloadedError
from specray.router.admission.fair import FairQueue, Line, Waiting, WaitingT

__all__ = ["AdmissionQueue", "Waiting", "WaitingT"]


class RetryAdvice:
    """Advises refused callers when to come back, from the rate at which requests end.

    Args:
        rng: spreads the advice, so that callers do not all come back at once; None: it is not spread.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng
        self._service_s: float | None = None

    def observe_service(self, seconds: float) -> None:
        """Takes the seconds between the last two requests that ended."""
        self._service_s = seconds if self._service_s is None else 0.9 * self._service_s + 0.1 * seconds

    def after_s(self, num_requests: int) -> float:
        """Seconds until ``num_requests`` should have ended, or up to half that time more, in [1, 60]."""
        expected = max(1.0, (self._service_s or 0.0) * num_requests)
        if self._rng is not None:
            expected *= self._rng.uniform(1.0, 1.5)
        # Bounds of the advice to refused callers, in seconds.
        return min(60.0, expected)


class AdmissionQueue(Generic[WaitingT]):
    """Waiting requests, bounded by number and prompt tokens; lowest priority first, fair within a priority.

    A full queue is shared like this: an arrival displaces the newest request of a less urgent priority, or,
    at its own priority, of the tenant that has most waiting, as long as that one keeps at least as much as
    the arrival's tenant then has. Otherwise the arrival is refused. So no tenant can take all the room, and
    a tenant alone may use all of it.

    Requests that find a free place at once do not count as waiting.

    Args:
        max_tokens: most prompt tokens of waiting requests; one request alone is always let in.
    """

    def __init__(self, *, max_requests: int, max_tokens: int, rng: random.Random | None = None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._advice = RetryAdvice(rng)
        self._entries: dict[str, WaitingT] = {}
        self._returned: OrderedDict[str, WaitingT] = OrderedDict()
        self._aside: dict[str, WaitingT] = {}
        """Entries whose turn has come, and which cannot run yet."""
        self.classes: dict[int, FairQueue[WaitingT]] = {}
        """Waiting entries by priority; none of the queues is empty."""
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[WaitingT]:
        """Yields entries in the order in which they are taken when nobody comes."""
        yield from self._returned.values()
        yield from self._aside.values()
        for priority in sorted(self.classes):
            yield from self.classes[priority]

    @property
    def has_next(self) -> bool:
        """Whether ``pop`` has an entry: some may only wait aside."""
        return len(self._entries) > len(self._aside)

    @property
    def has_returned(self) -> bool:
        """Whether ``pop`` has an entry that was put back or called back."""
        return bool(self._returned)

    @property
    def aside(self) -> Collection[WaitingT]:
        """The entries that were set aside, in that order."""
        return self._aside.values()

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._num_tokens

    def set_bounds(self, *, max_requests: int, max_tokens: int) -> None:
        """Bounds the next arrivals; whoever waits already goes on waiting."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens

    def push(self, entry: WaitingT, *, num_free_places: int) -> list[WaitingT]:
        """Appends an entry; returns the entries that were displaced, which wait no longer.

        Raises:
            OverloadedError: a bound would be passed; nothing was changed.
        """
        assert entry.request_id not in self._entries
        displaced = self._room_for(entry, num_free_places)
        for victim in displaced:
            self.remove(victim.request_id)
        self._insert(entry)
        self.classes.setdefault(entry.priority, FairQueue()).push(entry)
        return displaced

    def push_front(self, entry: WaitingT) -> None:
        """Puts back an entry that had been taken out: it goes first, and bounds do not apply."""
        assert entry.request_id not in self._entries
        self._insert(entry)
        self._returned[entry.request_id] = entry
        self._returned.move_to_end(entry.request_id, last=False)

    def set_aside(self, entry: WaitingT) -> None:
        """Puts back an entry that cannot run yet; others go before it until ``call_back``."""
        assert entry.request_id not in self._entries
        self._insert(entry)
        self._aside[entry.request_id] = entry

    def call_back(self) -> None:
        """Entries that were set aside go before all that have not had their turn, in their order."""
        self._returned.update(self._aside)
        self._aside.clear()

    def pop(self) -> WaitingT:
        """Takes out the entry whose turn it is. There must be one (``has_next``)."""
        if self._returned:
            _, entry = self._returned.popitem(last=False)
        else:
            priority = min(self.classes)
            entry = self.classes[priority].pop()
            self._drop_if_empty(priority)
        self._forget(entry)
        return entry

    def remove(self, request_id: str) -> WaitingT | None:
        """Takes one entry out; None when it does not wait."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if (self._returned.pop(request_id, None) or self._aside.pop(request_id, None)) is None:
            self.classes[entry.priority].remove(entry)
            self._drop_if_empty(entry.priority)
        self._forget(entry)
        return entry

    def settle(self, entry: WaitingT, num_tokens: int) -> None:
        """Charges a tenant for ``num_tokens`` alone, after which a request that was taken out has ended."""
        fair = self.classes.get(entry.priority)
        if fair is not None:
            fair.refund(entry.tenant, entry.num_expected_tokens - num_tokens)

    def observe_service(self, seconds: float) -> None:
        """Takes the seconds between the last two requests that ended, for the advice to refused callers."""
        self._advice.observe_service(seconds)

    def retry_after_s(self) -> float:
        """Seconds until the queue should have drained."""
        return self._advice.after_s(len(self._entries))

    def _room_for(self, entry: WaitingT, num_free_places: int) -> list[WaitingT]:
        """Returns the entries to displace. Raises OverloadedError."""
        victims = _Victims(self.classes, entry)
        while len(self._entries) - len(victims.chosen) >= self._max_requests + num_free_places:
            if not victims.choose(_REQUESTS):
                reason = f"{len(self._entries)} requests wait; allowed: {self._max_requests}"
                raise OverloadedError(reason, self.retry_after_s())
        while self._num_tokens_with(entry, victims.chosen, num_free_places) > self._max_tokens:
            if not victims.choose(_TOKENS):
                reason = f"{self._num_tokens} prompt tokens wait; allowed: {self._max_tokens}"
                raise OverloadedError(reason, self.retry_after_s())
        return victims.chosen

    def _num_tokens_with(self, entry: WaitingT, gone: list[WaitingT], num_free_places: int) -> int:
        """Returns the prompt tokens that wait, ``entry`` being last; 0: it waits alone, or nobody does."""
        if len(self._entries) - len(gone) <= num_free_places:
            return 0
        placed = islice((other for other in self if other not in gone), num_free_places)
        num_tokens = self._num_tokens + entry.num_queued_tokens
        return num_tokens - sum(other.num_queued_tokens for other in chain(gone, placed))

    def _insert(self, entry: WaitingT) -> None:
        self._entries[entry.request_id] = entry
        self._num_tokens += entry.num_queued_tokens

    def _forget(self, entry: WaitingT) -> None:
        del self._entries[entry.request_id]
        self._num_tokens -= entry.num_queued_tokens

    def _drop_if_empty(self, priority: int) -> None:
        # Without waiting tenants there is nothing to share: the tags go too.
        if not self.classes[priority]:
            del self.classes[priority]


class _Size(NamedTuple):
    """A bounded size of an entry and of a line; a line keeps its sum, so that refusing is cheap."""

    of_entry: Callable[[Waiting], int]
    of_line: Callable[[Line[Any]], int]


_REQUESTS = _Size(lambda entry: 1, lambda line: len(line.entries))
_TOKENS = _Size(lambda entry: entry.num_queued_tokens, lambda line: line.num_tokens)


class _Victims(Generic[WaitingT]):
    """Chooses the entries that an arrival may displace, one by one, without changing anything."""

    def __init__(self, classes: dict[int, FairQueue[WaitingT]], arrival: WaitingT) -> None:
        self.chosen: list[WaitingT] = []
        self._arrival = arrival
        self._classes = [(priority, classes[priority]) for priority in sorted(classes, reverse=True)]
        self._gone: dict[tuple[int, str], list[WaitingT]] = {}
        """Chosen entries by priority and tenant, the newest of the line first."""

    def choose(self, size: _Size) -> bool:
        """Chooses the next entry, of the tenant with most waiting; returns False if none may go."""
        arrival = self._arrival
        for priority, fair in self._classes:
            if priority < arrival.priority:
                return False
            is_rival = priority == arrival.priority
            held = {
                tenant: size.of_line(line) - sum(map(size.of_entry, self._gone.get((priority, tenant), ())))
                for tenant, line in fair.lines.items()
            }
            own = held.pop(arrival.tenant, 0) if is_rival else 0
            tenant = max(held, key=lambda name: held[name], default=None)
            if tenant is None or not held[tenant]:
                continue
            gone = self._gone.setdefault((priority, tenant), [])
            victim = next(islice(reversed(fair.lines[tenant].entries.values()), len(gone), None))
            if is_rival and held[tenant] - size.of_entry(victim) < own + size.of_entry(arrival):
                return False
            gone.append(victim)
            self.chosen.append(victim)
            return True
        return False
