"""Queue of items that several routers' streams have sent and no engine call has taken yet."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from specray.rpc.codec.values import RequestBatch
from specray.rpc.role import ItemT, RepliesT
from specray.rpc.workers.batch_runner import ReplySink


@dataclass(frozen=True, slots=True)
class Portion(Generic[ItemT, RepliesT]):
    """The part of a stream's oldest request that one turn takes."""

    stream: ReplySink[RepliesT]
    batch: RequestBatch[ItemT]
    is_last: bool
    """True if it completes the request."""


class _OpenRequest(Generic[ItemT]):
    """A waiting request, of which the first ``num_taken`` items are taken."""

    __slots__ = ("batch", "num_taken")

    def __init__(self, batch: RequestBatch[ItemT]) -> None:
        self.batch = batch
        self.num_taken = 0

    @property
    def next_item(self) -> ItemT | None:
        """Next item; None: the request only releases sequences."""
        items = self.batch.items
        return items[self.num_taken] if self.num_taken < len(items) else None

    def take(self) -> tuple[RequestBatch[ItemT], bool]:
        """Takes the next item, the first one with the releases; True: the request is complete."""
        number, self.num_taken = self.num_taken, self.num_taken + 1
        released = self.batch.release_request_ids if number == 0 else ()
        piece = RequestBatch(self.batch.items[number : number + 1], released)
        return piece, self.num_taken >= len(self.batch.items)


class ItemQueue(Generic[ItemT, RepliesT]):
    """Round-robin queue over streams, item by item, so that no router waits for all items of another.

    Within a stream, order is kept. A router with many items fills the space that others leave in calls; one
    with few waits for at most the call in progress and one more.

    Args:
        cost: tokens of an item.
    """

    def __init__(self, cost: Callable[[ItemT], int]) -> None:
        self._cost = cost
        # The stream whose turn it is comes first.
        self._streams: OrderedDict[ReplySink[RepliesT], deque[_OpenRequest[ItemT]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def __bool__(self) -> bool:
        return bool(self._streams)

    def put(self, stream: ReplySink[RepliesT], batch: RequestBatch[ItemT]) -> None:
        self._streams.setdefault(stream, deque()).append(_OpenRequest(batch))

    def drop(self, stream: ReplySink[RepliesT]) -> None:
        self._streams.pop(stream, None)

    def clear(self) -> None:
        self._streams.clear()

    def take(self, budget: int) -> list[Portion[ItemT, RepliesT]]:
        """Takes items round-robin until ``budget`` tokens are spent; at least one item."""
        portions: list[Portion[ItemT, RepliesT]] = []
        spent = 0
        while self._streams:
            stream, requests = next(iter(self._streams.items()))
            item = requests[0].next_item
            cost = 0 if item is None else self._cost(item)
            if spent and spent + cost > budget:
                break
            spent += cost
            batch, is_last = requests[0].take()
            self._end_turn(stream, is_last)
            portions.append(Portion(stream, batch, is_last))
        return portions

    def take_request(self) -> Portion[ItemT, RepliesT]:
        """Takes the whole oldest request of the stream whose turn it is."""
        stream, requests = next(iter(self._streams.items()))
        batch = requests[0].batch
        self._end_turn(stream, True)
        return Portion(stream, batch, True)

    def _end_turn(self, stream: ReplySink[RepliesT], is_request_done: bool) -> None:
        requests = self._streams[stream]
        if is_request_done:
            requests.popleft()
        if requests:
            self._streams.move_to_end(stream)
        else:
            del self._streams[stream]
