"""Batch runner: merges requests of many streams into engine calls, and returns each stream its replies."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, cast

from specray.rpc.codec.values import RequestBatch
from specray.rpc.role import BoundEngine, EngineService, Item, ItemT, RepliesT
from specray.rpc.workers.sequence_names import SequenceNames
from specray.types import ItemFailed, UnknownSequence

logger = logging.getLogger(__name__)

SinkRepliesT = TypeVar("SinkRepliesT", contravariant=True)

MAX_FAILURES = 2
"""Engine failures of a sequence after which it is refused."""


class ReplySink(Protocol[SinkRepliesT]):
    """The stream that a request came from, and its replies go to."""

    @property
    def is_open(self) -> bool:
        """Whether somebody waits for replies; if not, items are not computed."""
        ...

    def deliver(self, replies: SinkRepliesT | None, num_requests: int) -> None:
        """Takes replies (None: there are none), which complete ``num_requests`` requests."""
        ...


@dataclass(frozen=True, slots=True)
class StreamReplies(Generic[RepliesT]):
    """One stream's replies from an engine call."""

    stream: ReplySink[RepliesT]
    replies: RepliesT | None
    num_requests: int


class BatchRunner(Generic[ItemT, RepliesT]):
    """Collects items as long as their order does not matter, then runs them as one engine call.

    A stream owns the sequences that it sent items for. An item that continues another stream's sequence is
    answered *unknown sequence*. With ``base_len`` 0, a shared engine (a draft) makes a separate sequence, so
    two routers may use the same request id. A target has one router, so there the router has reconnected and
    takes the sequence over. Either way, the end of the old stream does not affect the sequence.

    An item that makes the engine raise fails alone. Its sequence may try again, since another item may be the
    cause, and is refused after MAX_FAILURES, since every failure costs all others a call.

    Methods raise only when the engine's own ``check`` does: then the engine is broken for good.
    """

    def __init__(
        self,
        role: EngineService[ItemT, RepliesT],
        engine: BoundEngine[ItemT, RepliesT],
        deliver: Callable[[list[StreamReplies[RepliesT]]], None],
    ) -> None:
        self._role = role
        self._engine = engine
        self._deliver = deliver
        self._names: SequenceNames[ReplySink[RepliesT]] = SequenceNames(is_shared=role.merges_requests)
        self._max_num_seqs = engine.read_info().max_num_seqs
        self._failures: dict[str, int] = {}
        """Failures by sequence name."""
        self._items: dict[str, ItemT] = {}
        """Items of the next call by sequence name: an engine call has at most one item per sequence."""
        self._origins: dict[str, tuple[ReplySink[RepliesT], str]] = {}
        """Stream and request id of the next call's replies, by sequence name."""
        self._answers: list[tuple[ReplySink[RepliesT], Item]] = []
        """Replies that need no engine call."""
        self._num_requests: dict[ReplySink[RepliesT], int] = {}

    def add(self, stream: ReplySink[RepliesT], batch: RequestBatch[ItemT], *, is_last: bool = True) -> None:
        """Takes one request or its next part: releases sequences at once, runs items in the next call.

        Args:
            is_last: whether this part completes the request.
        """
        released = self._names.of(stream, batch.release_request_ids)
        if not self._role.merges_requests or not self._items.keys().isdisjoint(released):
            self.flush()
        self._names.remove(stream, batch.release_request_ids)
        self._release(released)
        self._num_requests[stream] = self._num_requests.get(stream, 0) + is_last
        if stream.is_open:
            for item in batch.items:
                self._add_item(stream, item)

    def end_stream(self, stream: ReplySink[RepliesT]) -> None:
        """Releases all sequences that the stream still owns."""
        self.flush()
        self._release(self._names.remove_stream(stream))

    def flush(self) -> None:
        """Runs the collected items and delivers the replies."""
        if not self._num_requests:
            return
        items, answers = list(self._items.values()), self._answers
        origins, num_requests = self._origins, self._num_requests
        self._items, self._answers, self._origins, self._num_requests = {}, [], {}, {}
        computed = self._compute(items) if items else self._role.no_replies
        by_stream: dict[ReplySink[RepliesT], list[Item]] = {stream: [] for stream in num_requests}
        for stream, answer in answers:
            by_stream[stream].append(answer)
        for reply in computed.replies:
            stream, request_id = origins[reply.request_id]
            by_stream[stream].append(_renamed(reply, request_id))
        self._deliver(
            [
                StreamReplies(
                    stream, _with_replies(computed, replies) if replies else None, num_requests[stream]
                )
                for stream, replies in by_stream.items()
            ]
        )

    def _add_item(self, stream: ReplySink[RepliesT], item: ItemT) -> None:
        name = self._names.use(stream, item.request_id)
        if name in self._items:
            self.flush()
            self._num_requests.setdefault(stream, 0)
        if name is None and item.base_len > 0:
            unknown = UnknownSequence(item.request_id, item.round_id, item.base_len)
            self._answers.append((stream, unknown))
            return
        if name is None:
            if len(self._names) >= self._max_num_seqs:
                self._release(self._names.give_way(stream, self._items))
            name = self._names.add(stream, item.request_id)
        if self._failures.get(name, 0) >= MAX_FAILURES:
            text = f"refused: this request has failed the {self._role.name} engine {MAX_FAILURES} times"
            self._answers.append((stream, _failed(item, text)))
            return
        self._origins[name] = (stream, item.request_id)
        self._items[name] = _renamed(item, name)

    def _compute(self, items: Sequence[ItemT]) -> RepliesT:
        """Makes one engine call.

        If it raises, each item runs alone: items are idempotent, and only the bad one fails. The rows are
        then unknown, since the time is not that of one step.
        """
        try:
            found = self._engine.run(items)
        except Exception:
            logger.exception("a call of the %s engine with %d items failed", self._role.name, len(items))
            self._engine.check()
            if len(items) > 1:
                parts = [self._compute([item]) for item in items]
                found = _with_replies(
                    self._role.no_replies, [each for part in parts for each in part.replies]
                )
                return replace(found, forward_ns=sum(part.forward_ns for part in parts))
            name = items[0].request_id
            self._failures[name] = self._failures.get(name, 0) + 1
            self._engine.release([name])
            return _with_replies(self._role.no_replies, [self._failed(items[0])])
        waiting = {item.request_id: item for item in items}
        known = [reply for reply in found.replies if reply.request_id in waiting]
        for reply in known:
            waiting.pop(reply.request_id, None)
        if waiting:
            logger.error("the %s engine gave no reply to %s", self._role.name, sorted(waiting))
        return _with_replies(found, [*known, *map(self._failed, waiting.values())])

    def _failed(self, item: ItemT) -> ItemFailed:
        return _failed(item, f"the {self._role.name} engine failed on this request")

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


def _failed(item: Item, message: str) -> ItemFailed:
    return ItemFailed(item.request_id, item.round_id, item.base_len, message, is_retriable=False)


def _renamed(message: Any, request_id: str) -> Any:
    return message if message.request_id == request_id else replace(message, request_id=request_id)


def _with_replies(batch: RepliesT, replies: Sequence[Any]) -> RepliesT:
    found: RepliesT = replace(cast(Any, batch), replies=tuple(replies))
    return found
