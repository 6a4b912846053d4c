"""Requests that wait for a place among the running ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from specray.errors import OverloadedError

_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0


class Waiting(Protocol):
    """What the queue needs to know of an entry."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_queued_tokens(self) -> int:
        """Tokens to compute before the first new one."""
        ...


WaitingT = TypeVar("WaitingT", bound=Waiting)


class AdmissionQueue(Generic[WaitingT]):
    """First in, first out, bounded by requests and by prompt tokens.

    Args:
        max_requests: waiting requests, beyond those that would find a free place at once.
        max_tokens: prompt tokens of waiting requests; one request alone is always let in.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._entries: OrderedDict[str, WaitingT] = OrderedDict()
        self._num_tokens = 0
        self._service_s: float | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[WaitingT]:
        return iter(self._entries.values())

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all waiting requests."""
        return self._num_tokens

    def push(self, entry: WaitingT, *, num_free_places: int) -> None:
        """Appends an entry.

        Raises:
            OverloadedError: a bound would be passed; nothing was changed.
        """
        if len(self._entries) >= self._max_requests + num_free_places:
            raise OverloadedError(
                f"{len(self._entries)} requests wait; allowed: {self._max_requests}", self.retry_after_s()
            )
        if self._entries and self._num_tokens + entry.num_queued_tokens > self._max_tokens:
            raise OverloadedError(
                f"{self._num_tokens} prompt tokens wait; allowed: {self._max_tokens}", self.retry_after_s()
            )
        self._insert(entry)

    def push_front(self, entry: WaitingT) -> None:
        """Puts back an entry that had been let in: it goes first, and bounds do not apply."""
        self._insert(entry)
        self._entries.move_to_end(entry.request_id, last=False)

    def pop(self) -> WaitingT:
        """Takes the first entry. The queue must not be empty."""
        _, entry = self._entries.popitem(last=False)
        self._num_tokens -= entry.num_queued_tokens
        return entry

    def remove(self, request_id: str) -> WaitingT | None:
        """Takes one entry out; None when it does not wait."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._num_tokens -= entry.num_queued_tokens
        return entry

    def observe_service(self, seconds: float) -> None:
        """Time between the last two requests that ended, for the advice to refused ones."""
        self._service_s = seconds if self._service_s is None else 0.9 * self._service_s + 0.1 * seconds

    def retry_after_s(self) -> float:
        """When the queue should have drained, in [1, 60] seconds."""
        expected = (self._service_s or 0.0) * len(self._entries)
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, expected))

    def _insert(self, entry: WaitingT) -> None:
        assert entry.request_id not in self._entries
        self._entries[entry.request_id] = entry
        self._num_tokens += entry.num_queued_tokens
