"""Requests that wait for a place among the running ones: bounded, by priority, fair between tenants."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any, Generic, NamedTuple

from specray.errors import OverloadedError
from specray.router.admission.fair import FairQueue, Line, Waiting, WaitingT

__all__ = ["AdmissionQueue", "Waiting", "WaitingT"]

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_MAX_RETRY_SPREAD = 1.5


class RetryAdvice:
    """When those who are refused should come back, by the pace at which requests end.

    Args:
        rng: spreads the advice, so that they do not all come back together; None: it is not spread.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng
        self._service_s: float | None = None

    def observe_service(self, seconds: float) -> None:
        """Time between the last two requests that ended."""
        self._service_s = seconds if self._service_s is None else 0.9 * self._service_s + 0.1 * seconds

    def after_s(self, num_requests: int) -> float:
        """When so many should have ended, or up to half that time later, in [1, 60] seconds."""
        expected = max(_MIN_RETRY_S, (self._service_s or 0.0) * num_requests)
        if self._rng is not None:
            expected *= self._rng.uniform(1.0, _MAX_RETRY_SPREAD)
        return min(_MAX_RETRY_S, expected)


class AdmissionQueue(Generic[WaitingT]):
    """Bounded by requests and by prompt tokens; the lowest priority first, within one fair by tenant.

    A full queue is shared like this: an arrival displaces the newest request of a less urgent priority, or,
    at its own priority, of the tenant that has most waiting, as long as that one keeps at least as much as
    the arrival's tenant then has. Otherwise the arrival is refused. So no tenant can take all the room, and
    a tenant alone may use all of it.

    Those that find a free place at once do not count as waiting.

    Args:
        max_requests: waiting requests.
        max_tokens: prompt tokens of waiting requests; one request alone is always let in.
        rng: spreads the advice to refused ones, so that they do not all come back together; None: it is not.
    """

    def __init__(self, *, max_requests: int, max_tokens: int, rng: random.Random | None = None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._advice = RetryAdvice(rng)
        self._entries: dict[str, WaitingT] = {}
        self._returned: OrderedDict[str, WaitingT] = OrderedDict()
        self._classes: dict[int, FairQueue[WaitingT]] = {}
        """By priority; none is empty."""
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[WaitingT]:
        """In the order in which they are taken when nobody comes."""
        yield from self._returned.values()
        for priority in sorted(self._classes):
            yield from self._classes[priority]

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._num_tokens

    def push(self, entry: WaitingT, *, num_free_places: int) -> list[WaitingT]:
        """Appends an entry; returns those that had to make room and wait no longer.

        Raises:
            OverloadedError: a bound would be passed; nothing was changed.
        """
        assert entry.request_id not in self._entries
        displaced = self._room_for(entry, num_free_places)
        for victim in displaced:
            self.remove(victim.request_id)
        self._insert(entry)
        self._classes.setdefault(entry.priority, FairQueue()).push(entry)
        return displaced

    def push_front(self, entry: WaitingT) -> None:
        """Puts back an entry that had been let in: it goes first, and bounds do not apply."""
        assert entry.request_id not in self._entries
        self._insert(entry)
        self._returned[entry.request_id] = entry
        self._returned.move_to_end(entry.request_id, last=False)

    def pop(self) -> WaitingT:
        """Takes the entry whose turn it is. The queue must not be empty."""
        if self._returned:
            _, entry = self._returned.popitem(last=False)
        else:
            priority = min(self._classes)
            entry = self._classes[priority].pop()
            self._drop_if_empty(priority)
        self._forget(entry)
        return entry

    def remove(self, request_id: str) -> WaitingT | None:
        """Takes one entry out; None when it does not wait."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        if self._returned.pop(request_id, None) is None:
            self._classes[entry.priority].remove(entry)
            self._drop_if_empty(entry.priority)
        self._forget(entry)
        return entry

    def settle(self, entry: WaitingT, num_tokens: int) -> None:
        """A request that was let in has ended after ``num_tokens`` tokens: its tenant is charged no more."""
        fair = self._classes.get(entry.priority)
        if fair is not None:
            fair.refund(entry.tenant, entry.num_expected_tokens - num_tokens)

    def observe_service(self, seconds: float) -> None:
        """Time between the last two requests that ended, for the advice to refused ones."""
        self._advice.observe_service(seconds)

    def retry_after_s(self) -> float:
        """When the queue should have drained."""
        return self._advice.after_s(len(self._entries))

    def _room_for(self, entry: WaitingT, num_free_places: int) -> list[WaitingT]:
        """Who must go. Raises OverloadedError."""
        victims = _Victims(self._classes, entry)
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
        """Prompt tokens that wait for a place when ``entry`` comes last; 0: it alone does, or nobody."""
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
        # Who waits for nobody need not be fair to anybody: the tags go too.
        if not self._classes[priority]:
            del self._classes[priority]


class _Size(NamedTuple):
    """What is bounded, of an entry and of a line, which knows its sum: refusing must be cheap."""

    of_entry: Callable[[Waiting], int]
    of_line: Callable[[Line[Any]], int]


_REQUESTS = _Size(lambda entry: 1, lambda line: len(line.entries))
_TOKENS = _Size(lambda entry: entry.num_queued_tokens, lambda line: line.num_tokens)


class _Victims(Generic[WaitingT]):
    """Chooses, one by one and without changing anything, what an arrival may displace."""

    def __init__(self, classes: dict[int, FairQueue[WaitingT]], arrival: WaitingT) -> None:
        self.chosen: list[WaitingT] = []
        self._arrival = arrival
        self._classes = [(priority, classes[priority]) for priority in sorted(classes, reverse=True)]
        self._gone: dict[tuple[int, str], list[WaitingT]] = {}
        """What was chosen, by priority and tenant: the newest of the line first."""

    def choose(self, size: _Size) -> bool:
        """The next to go, of whoever has most waiting; False: nothing may."""
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
