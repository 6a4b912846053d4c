"""Turns the requests of many streams into engine calls, and the engine's replies back into streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from specray.rpc.codec import RequestBatch
from specray.rpc.role import BoundEngine, ItemT, RepliesT, ReplyT, Role

logger = logging.getLogger(__name__)

OutletRepliesT = TypeVar("OutletRepliesT", contravariant=True)


class Outlet(Protocol[OutletRepliesT]):
    """The stream that a request came from."""

    @property
    def is_open(self) -> bool:
        """False: nobody waits for the replies any more, so the items are not computed."""
        ...

    def deliver(self, replies: OutletRepliesT | None, num_requests: int) -> None:
        """Takes the answer to ``num_requests`` requests; None when they asked for nothing."""
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
    answered *unknown sequence*; one from ``base_len`` 0 takes the sequence over. So a router that reconnects
    is not hurt by the end of its old stream, and equal request ids of two routers never mix.

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
        self._owners: dict[str, Outlet[RepliesT]] = {}
        self._items: dict[str, ItemT] = {}
        """The call being collected, by request id: an engine call has at most one item per sequence."""
        self._answers: list[ReplyT] = []
        self._origins: dict[str, Outlet[RepliesT]] = {}
        """Where the replies of this call go, by request id; those in ``_answers`` included."""
        self._num_requests: dict[Outlet[RepliesT], int] = {}

    @property
    def num_owned_sequences(self) -> int:
        return len(self._owners)

    def add(self, outlet: Outlet[RepliesT], batch: RequestBatch[ItemT]) -> None:
        """Takes one request: releases at once, items with the next call."""
        if not self._role.merges_requests or not self._origins.keys().isdisjoint(batch.release_request_ids):
            self.flush()
        owned = [name for name in batch.release_request_ids if self._owners.get(name) is outlet]
        self._release(owned)
        self._num_requests[outlet] = self._num_requests.get(outlet, 0) + 1
        if outlet.is_open:
            for item in batch.items:
                self._add_item(outlet, item)

    def end_stream(self, outlet: Outlet[RepliesT]) -> None:
        """Releases everything that the stream still owns."""
        self.flush()
        self._release([name for name, owner in self._owners.items() if owner is outlet])

    def flush(self) -> None:
        """Runs what was collected and delivers the replies."""
        if not self._num_requests:
            return
        items, answers = list(self._items.values()), self._answers
        origins, num_requests = self._origins, self._num_requests
        self._items, self._answers, self._origins, self._num_requests = {}, [], {}, {}
        computed, forward_ns = self._compute(items) if items else ([], 0)
        by_outlet: dict[Outlet[RepliesT], list[ReplyT]] = {outlet: [] for outlet in num_requests}
        for reply in (*answers, *computed):
            by_outlet[origins[reply.request_id]].append(reply)
        self._deliver(
            [
                Delivery(
                    outlet,
                    self._role.make_replies(tuple(replies), forward_ns) if replies else None,
                    num_requests[outlet],
                )
                for outlet, replies in by_outlet.items()
            ]
        )

    def _add_item(self, outlet: Outlet[RepliesT], item: ItemT) -> None:
        request_id = item.request_id
        if request_id in self._origins:
            self.flush()
            self._num_requests.setdefault(outlet, 0)
        self._origins[request_id] = outlet
        if item.base_len > 0 and self._owners.get(request_id) is not outlet:
            self._answers.append(self._role.unknown_sequence(item))
            return
        self._owners[request_id] = outlet
        self._items[request_id] = item

    def _compute(self, items: Sequence[ItemT]) -> tuple[list[ReplyT], int]:
        """One engine call. When it raises, each item alone: they are idempotent, and only a bad one fails."""
        try:
            replies, forward_ns = self._role.read_replies(self._engine.run(items))
        except Exception:
            logger.exception("a call of the %s engine with %d items failed", self._role.name, len(items))
            self._engine.check()
            if len(items) > 1:
                parts = [self._compute([item]) for item in items]
                return [reply for part, _ in parts for reply in part], sum(ns for _, ns in parts)
            self._engine.release([items[0].request_id])
            return [self._failed(items[0])], 0
        return self._one_reply_per_item(items, replies), forward_ns

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

    def _release(self, request_ids: Sequence[str]) -> None:
        if not request_ids:
            return
        for request_id in request_ids:
            del self._owners[request_id]
        try:
            self._engine.release(request_ids)
        except Exception:
            logger.exception("the %s engine failed to release %s", self._role.name, list(request_ids))
            self._engine.check()
