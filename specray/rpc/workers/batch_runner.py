"""Turns the requests of many streams into engine calls, and the engine's replies back into streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from specray.rpc.codec.engine import RequestBatch
from specray.rpc.role import BoundEngine, ItemT, RepliesT, ReplyT, Role
from specray.rpc.workers.sequence_names import SequenceNames

logger = logging.getLogger(__name__)

OutletRepliesT = TypeVar("OutletRepliesT", contravariant=True)

MAX_FAILURES = 2
"""A sequence whose items have failed the engine so often is refused from then on."""


class Outlet(Protocol[OutletRepliesT]):
    """The stream that a request came from."""

    @property
    def is_open(self) -> bool:
        """False: nobody waits for the replies any more, so the items are not computed."""
        ...

    def deliver(self, replies: OutletRepliesT | None, num_requests: int) -> None:
        """Takes replies, and with them the answer to ``num_requests`` requests; None: there are none."""
        ...


@dataclass(frozen=True, slots=True)
class Delivery(Generic[RepliesT]):
    """One stream's part of an engine call."""

    outlet: Outlet[RepliesT]
    replies: RepliesT | None
    num_requests: int


class BatchRunner(Generic[ItemT, ReplyT, RepliesT]):
    """Collects items until an order must be kept, then runs them as one engine call.

    A stream owns the sequences that it sent items for. An item that builds on another stream's sequence is
    answered *unknown sequence*. From ``base_len`` 0 a shared engine (a draft) gives it a sequence of its own,
    so equal request ids of two routers live side by side; on a target, which has one router, that router has
    come back and takes the sequence over. Either way it is not hurt by the end of its old stream.

    An item that makes the engine raise fails alone. Its sequence gets another chance, in case the cause was
    another's, and is refused after MAX_FAILURES: every failure costs all others a call.

    Methods raise only when the engine's own ``check`` does: then the engine is broken for good.
    """

    def __init__(
        self,
        role: Role[ItemT, ReplyT, RepliesT],
        engine: BoundEngine[ItemT, RepliesT],
        deliver: Callable[[list[Delivery[RepliesT]]], None],
    ) -> None:
        self._role = role
        self._engine = engine
        self._deliver = deliver
        self._names: SequenceNames[Outlet[RepliesT]] = SequenceNames(is_shared=role.merges_requests)
        self._max_num_seqs = engine.read_info().max_num_seqs
        self._failures: dict[str, int] = {}
        """By name of the sequence."""
        self._items: dict[str, ItemT] = {}
        """The call being collected, by name: an engine call has at most one item per sequence."""
        self._origins: dict[str, tuple[Outlet[RepliesT], str]] = {}
        """Where the replies of this call go, by name: stream and request id."""
        self._answers: list[tuple[Outlet[RepliesT], ReplyT]] = []
        """Replies that need no engine."""
        self._num_requests: dict[Outlet[RepliesT], int] = {}

    @property
    def num_owned_sequences(self) -> int:
        return len(self._names)

    def add(self, outlet: Outlet[RepliesT], batch: RequestBatch[ItemT], *, is_last: bool = True) -> None:
        """Takes one request, or its next part: releases at once, items with the next call.

        Args:
            is_last: with this part, the request is complete.
        """
        released = self._names.of(outlet, batch.release_request_ids)
        if not self._role.merges_requests or not self._items.keys().isdisjoint(released):
            self.flush()
        self._names.remove(outlet, batch.release_request_ids)
        self._release(released)
        self._num_requests[outlet] = self._num_requests.get(outlet, 0) + is_last
        if outlet.is_open:
            for item in batch.items:
                self._add_item(outlet, item)

    def end_stream(self, outlet: Outlet[RepliesT]) -> None:
        """Releases everything that the stream still owns."""
        self.flush()
        self._release(self._names.remove_stream(outlet))

    def flush(self) -> None:
        """Runs what was collected and delivers the replies."""
        if not self._num_requests:
            return
        items, answers = list(self._items.values()), self._answers
        origins, num_requests = self._origins, self._num_requests
        self._items, self._answers, self._origins, self._num_requests = {}, [], {}, {}
        computed, forward_ns, num_rows = self._compute(items) if items else ([], 0, None)
        by_outlet: dict[Outlet[RepliesT], list[ReplyT]] = {outlet: [] for outlet in num_requests}
        for outlet, reply in answers:
            by_outlet[outlet].append(reply)
        for reply in computed:
            outlet, request_id = origins[reply.request_id]
            by_outlet[outlet].append(self._role.rename_reply(reply, request_id))
        self._deliver(
            [
                Delivery(
                    outlet,
                    self._role.make_replies(tuple(replies), forward_ns, num_rows) if replies else None,
                    num_requests[outlet],
                )
                for outlet, replies in by_outlet.items()
            ]
        )

    def _add_item(self, outlet: Outlet[RepliesT], item: ItemT) -> None:
        name = self._names.use(outlet, item.request_id)
        if name in self._items:
            self.flush()
            self._num_requests.setdefault(outlet, 0)
        if name is None and item.base_len > 0:
            self._answers.append((outlet, self._role.unknown_sequence(item)))
            return
        if name is None:
            if len(self._names) >= self._max_num_seqs:
                self._release(self._names.give_way(outlet, self._items))
            name = self._names.add(outlet, item.request_id)
        if self._failures.get(name, 0) >= MAX_FAILURES:
            text = f"refused: this request has failed the {self._role.name} engine {MAX_FAILURES} times"
            self._answers.append((outlet, self._role.item_failed(item, text)))
            return
        self._origins[name] = (outlet, item.request_id)
        self._items[name] = self._role.rename_item(item, name)

    def _compute(self, items: Sequence[ItemT]) -> tuple[list[ReplyT], int, int | None]:
        """One engine call: replies, nanoseconds, rows.

        When it raises, each item alone: they are idempotent, and only a bad one fails. What that takes is no
        step of so many rows, so none are told.
        """
        try:
            replies, forward_ns, num_rows = self._role.read_replies(self._engine.run(items))
        except Exception:
            logger.exception("a call of the %s engine with %d items failed", self._role.name, len(items))
            self._engine.check()
            if len(items) > 1:
                parts = [self._compute([item]) for item in items]
                return [reply for part, _, _ in parts for reply in part], sum(ns for _, ns, _ in parts), None
            name = items[0].request_id
            self._failures[name] = self._failures.get(name, 0) + 1
            self._engine.release([name])
            return [self._failed(items[0])], 0, None
        return self._one_reply_per_item(items, replies), forward_ns, num_rows

    def _one_reply_per_item(self, items: Sequence[ItemT], replies: Iterable[ReplyT]) -> list[ReplyT]:
        waiting = {item.request_id: item for item in items}
        known = [reply for reply in replies if reply.request_id in waiting]
        for reply in known:
            waiting.pop(reply.request_id, None)
        if waiting:
            logger.error("the %s engine gave no reply to %s", self._role.name, sorted(waiting))
        return [*known, *map(self._failed, waiting.values())]

    def _failed(self, item: ItemT) -> ReplyT:
        return self._role.item_failed(item, f"the {self._role.name} engine failed on this request")

    def _release(self, names: Sequence[str]) -> None:
        if not names:
            return
        for name in names:
            self._failures.pop(name, None)
        try:
            self._engine.release(names)
        except Exception:
            logger.exception("the %s engine failed to release %s", self._role.name, list(names))
            self._engine.check()
