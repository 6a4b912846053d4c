"""Links: connections for the router's loop, on which sending never waits and replies arrive in one inbox.

Each link has a writer and a reader task, so that a peer that stops reading can stall nothing but its own
link, and a step of the loop is plain synchronous code between two looks into the inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from specray.engine_info import EngineInfo
from specray.errors import EngineLostError
from specray.interfaces import AdapterLoader, Clock, Drafter, Verifier
from specray.router.transport.clock import within
from specray.types import DraftReplies, SpeculateItem, TargetReplies, VerifyItem

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")
RepliesT_co = TypeVar("RepliesT_co", covariant=True)
RepliesT = TypeVar("RepliesT")

CLOSE_TIMEOUT_S = 2.0
"""Seconds within which a connection sends what is left and closes."""
INFO_TIMEOUT_S = 2.0
"""Seconds within which an engine must describe itself."""


class LinkedConnection(Protocol[RepliesT_co]):
    """The common part of Drafter and Verifier."""

    @property
    def info(self) -> EngineInfo: ...

    async def fetch_info(self) -> EngineInfo: ...

    async def release(self, request_ids: Sequence[str]) -> None: ...

    async def replies(self) -> RepliesT_co: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TargetRepliesArrived:
    """A batch of replies of a target."""

    link: TargetLink
    replies: TargetReplies


@dataclass(frozen=True, slots=True)
class DraftRepliesArrived:
    """A batch of replies of a draft."""

    link: DraftLink
    replies: DraftReplies


@dataclass(frozen=True, slots=True)
class DraftMoved:
    """Another draft has taken the place of one that still served."""

    link: DraftLink
    """Link to the new draft."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A connection ended."""

    link: TargetLink | DraftLink
    error: Exception


Event = TargetRepliesArrived | DraftRepliesArrived | DraftMoved | LinkLost


class Inbox:
    """Events since the loop looked last."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._wake = asyncio.Event()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def wait(self) -> None:
        """Waits until an event was added or ``wake`` was called."""
        await self._wake.wait()
        self._wake.clear()

    def drain(self) -> list[Event]:
        events, self._events = self._events, []
        return events


class Link(Generic[ItemT, RepliesT]):
    """A connection with its writer and reader.

    Args:
        connection: the drafter or verifier.
        send: its method that sends items, and the ids of sequences to free before them.
        on_replies: called by the reader with each batch of replies.
        on_lost: called once when either direction fails.
    """

    def __init__(
        self,
        connection: LinkedConnection[RepliesT],
        send: Callable[[Sequence[ItemT], Sequence[str]], Awaitable[None]],
        on_replies: Callable[[RepliesT], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self.info = connection.info
        self.unanswered_since: float | None = None
        """Time at which the oldest item was sent since the last reply of any kind; None: nothing is
        unanswered."""
        self._connection = connection
        self._send = send
        self._on_replies = on_replies
        self._on_lost = on_lost
        self._items: list[ItemT] = []
        self._released: list[str] = []
        self._outbox: deque[tuple[Sequence[ItemT], Sequence[str]]] = deque()
        self._has_mail = asyncio.Event()
        self._is_drained = asyncio.Event()
        self._is_lost = False
        self._tasks = [asyncio.create_task(self._write()), asyncio.create_task(self._read())]

    async def fetch_info(self) -> EngineInfo:
        """Asks the engine for its description as of now. Raises EngineLostError."""
        return await self._connection.fetch_info()

    def push(self, item: ItemT, now: float) -> None:
        """Puts an item into the message that the next ``flush`` sends."""
        self._items.append(item)
        if self.unanswered_since is None:
            self.unanswered_since = now

    def take_unanswered_since(self) -> float | None:
        """Returns ``unanswered_since`` and resets it, since a reply has come."""
        since_s, self.unanswered_since = self.unanswered_since, None
        return since_s

    def release(self, request_id: str) -> None:
        """Frees a sequence with the next ``flush``: after the items of earlier ones, before those of its own.

        So the place of a session that ended is free for another one in the same step.
        """
        self._released.append(request_id)

    def flush(self) -> None:
        """Sends what was pushed, as one message."""
        if self._items or self._released:
            self._outbox.append((self._items, self._released))
            self._items, self._released = [], []
            self._is_drained.clear()
            self._has_mail.set()

    async def close(self, clock: Clock) -> None:
        """Sends what was pushed, then ends the connection; both within CLOSE_TIMEOUT_S."""
        self.flush()
        with contextlib.suppress(Exception):
            await within(clock, CLOSE_TIMEOUT_S, self._finish())
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self) -> None:
        if self._outbox and not self._is_lost:
            await self._is_drained.wait()
        self._is_lost = True
        await self._connection.close()

    async def _write(self) -> None:
        try:
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                while self._outbox:
                    items, released = self._outbox[0]
                    # One message for both: a round would wait for the second whenever a session ends.
                    if items:
                        await self._send(items, released)
                    else:
                        await self._connection.release(released)
                    self._outbox.popleft()
                self._is_drained.set()
        except Exception as error:
            self._lose(error)

    async def _read(self) -> None:
        try:
            while True:
                self._on_replies(await self._connection.replies())
        except Exception as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._is_drained.set()
            self._on_lost(error)


class TargetLink(Link[VerifyItem, TargetReplies]):
    """The link to a target group's leader."""

    def __init__(self, verifier: Verifier, inbox: Inbox) -> None:
        super().__init__(
            verifier,
            verifier.verify,
            lambda replies: inbox.put(TargetRepliesArrived(self, replies)),
            lambda error: inbox.put(LinkLost(self, error)),
        )
        self.loader = verifier if isinstance(verifier, AdapterLoader) else None
        """What loads adapters; None: the target knows none."""


class DraftLink(Link[SpeculateItem, DraftReplies]):
    """The link to a leased draft.

    Args:
        drafter, inbox: the connection, and where its replies go.
        is_narrower: the draft has fewer token ids than the target, whose others only pad its weights. Where
            the target writes one of them all the same, the draft is sent another in its place.
    """

    def __init__(self, drafter: Drafter, inbox: Inbox, *, is_narrower: bool = False) -> None:
        super().__init__(
            drafter,
            drafter.speculate,
            lambda replies: inbox.put(DraftRepliesArrived(self, replies)),
            lambda error: inbox.put(LinkLost(self, error)),
        )
        self._num_known_ids = drafter.info.vocab_size if is_narrower else None
        self.adapters = dict(zip(self.info.adapter_names, self.info.adapters, strict=True))
        """Digests of its own adapters, by the names of those that it drafts for."""

    def push(self, item: SpeculateItem, now: float) -> None:
        if self._num_known_ids is not None:
            item = _in_known_ids(item, self._num_known_ids)
        super().push(item, now)


def _in_known_ids(item: SpeculateItem, num_ids: int) -> SpeculateItem:
    """The item with another token in place of each that the draft does not know."""
    if max((*item.token_ids, *item.proposed_token_ids), default=0) < num_ids:
        return item
    sent, proposed = (
        tuple(token_id if token_id < num_ids else 0 for token_id in ids)
        for ids in (item.token_ids, item.proposed_token_ids)
    )
    return replace(item, token_ids=sent, proposed_token_ids=proposed)


async def close_unused(connection: LinkedConnection[Any], clock: Clock) -> None:
    """Ends a connection that has no link, within CLOSE_TIMEOUT_S; errors are only logged."""
    try:
        await within(clock, CLOSE_TIMEOUT_S, connection.close())
    except Exception as error:
        logger.warning(
            "closing a connection to a %s that is not used: %s",
            connection.info.role,
            str(error) or type(error).__name__,
        )


async def current_info(link: Link[Any, Any] | None, clock: Clock) -> EngineInfo | None:
    """Returns the engine's description as of now; None without a link, or if the engine does not answer."""
    if link is None:
        return None
    try:
        return await within(clock, INFO_TIMEOUT_S, link.fetch_info())
    except (EngineLostError, TimeoutError):
        return None


async def measure_round_trip(fetch_info: Callable[[], Awaitable[EngineInfo]], clock: Clock) -> float:
    """Returns the seconds of the fastest of a few short calls to an engine; 0 if it does not answer."""
    trips: list[float] = []
    try:
        for _ in range(3):
            started_s = clock.monotonic()
            await within(clock, INFO_TIMEOUT_S, fetch_info())
            trips.append(clock.monotonic() - started_s)
    except (EngineLostError, TimeoutError):
        return 0.0
    return min(trips)
