"""What each engine was sent of a session, and which of its replies count.

Features go from the target to a draft that reads them. Committed tokens, as far as these are concerned::

    [0, num_held)      the draft is known to have them
    [num_held, end)    they wait here, or are with an item in flight
    [end, ...)         the target is asked for them with the next Verify

A draft that was lost has none: all are asked for again, of the target, which keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget
from specray.feature_rows import ITEM_BYTES, FeatureRows, max_rows
from specray.requests import GenerateRequest
from specray.types import DraftReply, Outcomes, Proposal, SpeculateItem, TargetReply, VerifyItem

ItemT = TypeVar("ItemT", SpeculateItem, VerifyItem)


@dataclass(slots=True)
class FeatureQueue:
    """Features of one session."""

    feature_size: int = 0
    """Numbers of a row; 0: the draft is to have none now."""
    num_held: int = 0
    """First tokens whose features the draft has."""
    waiting: FeatureRows | None = None
    """Features of the next tokens, which the draft is not known to have; None: there are none."""

    @property
    def end(self) -> int:
        """First tokens whose features have come."""
        return self.num_held if self.waiting is None else self.waiting.end

    @property
    def num_bytes(self) -> int:
        return 0 if self.waiting is None else len(self.waiting.data)

    @property
    def num_wanted(self) -> int:
        """Rows that may come next: one message's, while the one before is on its way to the draft."""
        if self.feature_size == 0:
            return 0
        most, num_waiting = max_rows(self.feature_size), self.end - self.num_held
        return max(0, min(most, 2 * most - num_waiting))

    def add(self, rows: FeatureRows) -> None:
        """Takes what came with a verdict; not what comes after a gap, is of another size, or has no room."""
        if rows.first > self.end or rows.row_bytes != ITEM_BYTES * self.feature_size:
            return
        new = rows.within(self.end, self.end + self.num_wanted)
        if new is not None:
            self.waiting = new if self.waiting is None else self.waiting.followed_by(new)

    def sent(self, end: int) -> FeatureRows | None:
        """What goes with an item after which the draft holds ``end`` tokens; it waits for the answer."""
        if self.waiting is None or self.feature_size == 0:
            return None
        return self.waiting.within(self.num_held, min(end, self.num_held + max_rows(self.feature_size)))

    def confirm(self, rows: FeatureRows | None) -> None:
        """The draft has answered an item that brought these."""
        if rows is not None and rows.end > self.num_held:
            self.num_held = rows.end
            if self.waiting is not None:
                self.waiting = self.waiting.within(rows.end, self.waiting.end)

    def lose(self) -> None:
        self.num_held, self.waiting = 0, None


@dataclass(slots=True)
class EngineSync(Generic[ItemT]):
    """What one engine was sent of a session."""

    round_id: int = 0
    """Id of the last item made; never reused, not even after the engine was lost."""
    synced_len: int = 0
    """Committed tokens that the engine is known to hold."""
    in_flight: ItemT | None = None

    def accept(self, reply: DraftReply | TargetReply) -> ItemT | None:
        """The item that ``reply`` answers; None when it comes late.

        This is the one place where late replies are dropped: those of rounds that were timed out, replaced,
        answered before, or sent to an engine that has been lost since.
        """
        item = self.in_flight
        return item if item is not None and item.round_id == reply.round_id else None

    def lose(self) -> None:
        """The engine no longer holds anything, and owes nothing."""
        self.synced_len = 0
        self.in_flight = None


@dataclass(slots=True)
class TargetSync(EngineSync[VerifyItem]):
    """What the target was sent of a session."""

    lookahead: LookaheadBudget | None = None
    """What it computes with the next round to look ahead; None: nothing."""


class DraftSync(EngineSync[SpeculateItem]):
    """What the draft was sent of a session, features among it."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__()
        self._request_id = request.request_id
        self._sampling = request.sampling
        self.adapter = b""
        """Digest of the draft's own adapter; empty: it works without."""
        self.features = FeatureQueue()

    @property
    def asked(self) -> SpeculateItem | None:
        """Item that it is to answer with draft tokens; a prefill chunk is no question."""
        item = self.in_flight
        return None if item is None or item.is_prefill_chunk else item

    @property
    def is_prefilling(self) -> bool:
        """It was given a prefill chunk, and has not answered yet."""
        return self.in_flight is not None and self.in_flight.is_prefill_chunk

    def next_item(
        self,
        committed: Sequence[int],
        most: int,
        proposed: DraftTokens = NO_DRAFT,
        *,
        end: int | None = None,
        **asked: Any,
    ) -> SpeculateItem:
        """Sends the committed tokens up to ``end`` that it does not hold; ``asked``: the other fields."""
        self.round_id += 1
        start = self.synced_len
        token_ids = tuple(committed[start:end])
        self.in_flight = SpeculateItem(
            self._request_id,
            self.round_id,
            start,
            token_ids,
            most,
            proposed.token_ids,
            sampling=replace(self._sampling, adapter=self.adapter) if start == 0 else None,
            proposed_parents=proposed.parents,
            features=self.features.sent(start + len(token_ids)),
            **asked,
        )
        return self.in_flight

    def take(self, reply: Proposal | Outcomes) -> SpeculateItem | None:
        """The item that ``reply`` answers, all of which the draft now holds; None: a late reply."""
        item = self.accept(reply)
        if item is None or isinstance(reply, Outcomes) != bool(item.fanout):
            return None
        self.synced_len = item.base_len + len(item.token_ids)
        self.features.confirm(item.features)
        return item

    def lose(self) -> None:
        super().lose()
        self.features.lose()
