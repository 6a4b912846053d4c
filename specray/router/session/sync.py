"""What each engine was sent of a session, and which of its replies count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specray.draft_tokens import NO_DRAFT, DraftTokens, LookaheadBudget
from specray.requests import GenerateRequest
from specray.router.session.features import FeatureQueue
from specray.types import DraftReply, Outcomes, Proposal, SpeculateItem, TargetReply, VerifyItem

ItemT = TypeVar("ItemT", SpeculateItem, VerifyItem)


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
        self._request = request
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
            self._request.request_id,
            self.round_id,
            start,
            token_ids,
            most,
            proposed.token_ids,
            sampling=self._request.sampling if start == 0 else None,
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
