"""What the streams of several routers have asked for and no engine call has taken yet."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from specray.rpc.codec.engine import RequestBatch
from specray.rpc.role import ItemT, RepliesT
from specray.rpc.workers.batch_runner import Outlet


@dataclass(frozen=True, slots=True)
class Portion(Generic[ItemT, RepliesT]):
    """What one turn of a stream takes of its oldest request."""

    outlet: Outlet[RepliesT]
    batch: RequestBatch[ItemT]
    is_last: bool
    """With it, all of the request is taken."""


class _Waiting(Generic[ItemT]):
    """A request of which the first ``num_taken`` items are taken."""

    __slots__ = ("batch", "num_taken")

    def __init__(self, batch: RequestBatch[ItemT]) -> None:
        self.batch = batch
        self.num_taken = 0

    @property
    def next_item(self) -> ItemT | None:
        """None: the request only releases."""
        items = self.batch.items
        return items[self.num_taken] if self.num_taken < len(items) else None

    def take(self) -> tuple[RequestBatch[ItemT], bool]:
        """The next item, and before the first one what is released; True: that was all."""
        number, self.num_taken = self.num_taken, self.num_taken + 1
        released = self.batch.release_request_ids if number == 0 else ()
        piece = RequestBatch(self.batch.items[number : number + 1], released)
        return piece, self.num_taken >= len(self.batch.items)


class FairQueue(Generic[ItemT, RepliesT]):
    """Streams take turns, an item each, so that nobody waits for all that another has asked.

    Within a stream everything stays in order. A router that sends much fills the calls that others leave
    room in; one that sends little waits for at most the call in progress and the room of one more.

    Args:
        cost: of an item, in tokens.
    """

    def __init__(self, cost: Callable[[ItemT], int]) -> None:
        self._cost = cost
        # Whose turn it is comes first.
        self._streams: OrderedDict[Outlet[RepliesT], deque[_Waiting[ItemT]]] = OrderedDict()

    def __len__(self) -> int:
        """Requests of which something is left."""
        return sum(map(len, self._streams.values()))

    def __bool__(self) -> bool:
        return bool(self._streams)

    def put(self, outlet: Outlet[RepliesT], batch: RequestBatch[ItemT]) -> None:
        """Adds a request of a stream, behind its others."""
        self._streams.setdefault(outlet, deque()).append(_Waiting(batch))

    def drop(self, outlet: Outlet[RepliesT]) -> None:
        """Forgets all requests of a stream."""
        self._streams.pop(outlet, None)

    def clear(self) -> None:
        """Forgets everything."""
        self._streams.clear()

    def take(self, budget: int) -> list[Portion[ItemT, RepliesT]]:
        """Takes items by turns until ``budget`` is spent; at least one, however much it costs."""
        portions: list[Portion[ItemT, RepliesT]] = []
        spent = 0
        while self._streams:
            outlet, requests = next(iter(self._streams.items()))
            item = requests[0].next_item
            cost = 0 if item is None else self._cost(item)
            if spent and spent + cost > budget:
                break
            spent += cost
            batch, is_last = requests[0].take()
            self._end_turn(outlet, is_last)
            portions.append(Portion(outlet, batch, is_last))
        return portions

    def take_request(self) -> Portion[ItemT, RepliesT]:
        """Takes the oldest request of the stream whose turn it is, as a whole."""
        outlet, requests = next(iter(self._streams.items()))
        batch = requests[0].batch
        self._end_turn(outlet, True)
        return Portion(outlet, batch, True)

    def _end_turn(self, outlet: Outlet[RepliesT], is_request_done: bool) -> None:
        requests = self._streams[outlet]
        if is_request_done:
            requests.popleft()
        if requests:
            self._streams.move_to_end(outlet)
        else:
            del self._streams[outlet]
