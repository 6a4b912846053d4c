"""Steps that a target computes before they are asked for, while its Router handles the verdicts before them.

Between two plain steps of the same sequences lies a message each way and the Router's own work, for which
the engine would wait. Where the Router says that a plain step follows (``VerifyItem.runs_on``), it is known
as soon as its token is drawn, and the engine goes on at once. An item that is then asked for is answered from
the stored verdict, if it is the very item that was computed; any other is computed as if nothing had been,
since every item says from which length on it appends. Outputs are thus the same.

A step goes ahead only where all sequences of the last request run on and no verdict of the step before is
left: sequences that were one step stay one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specray.rpc.role import BoundEngine
from specray.types import TargetReplies, TargetReply, Verdict, VerifyItem

_REPORTED = TargetReplies((), 0, 0)
"""Time and rows of a step of which all has been said."""


@dataclass(frozen=True, slots=True)
class _StoredVerdict:
    """An item that was not asked for yet, and its verdict."""

    item: VerifyItem
    verdict: Verdict

    def answers(self, item: VerifyItem) -> bool:
        return item == replace(self.item, round_id=item.round_id, runs_on=item.runs_on)


class RunAhead:
    """An engine that also computes what is expected next. Calls come from one thread.

    Args:
        engine: the target; its reply to an item follows from that sequence's items alone.
    """

    def __init__(self, engine: BoundEngine[VerifyItem, TargetReplies]) -> None:
        self._engine = engine
        self._stops: dict[str, frozenset[int]] = {}
        """Tokens that end each sequence."""
        self._expected: dict[str, VerifyItem] = {}
        """Items of the next step ahead."""
        self._stored: dict[str, _StoredVerdict] = {}
        self._stored_step = _REPORTED
        """What is to be said of the step of the stored verdicts, with the first of them."""

    def bound(self) -> BoundEngine[VerifyItem, TargetReplies]:
        return replace(self._engine, run=self.run, release=self.release, advance=self.advance)

    def run(self, items: Sequence[VerifyItem]) -> TargetReplies:
        """Answers items from stored verdicts, and the others by a step."""
        answered: dict[str, TargetReply] = {}
        for item in items:
            stored = self._stored.pop(item.request_id, None)
            if stored is not None and stored.answers(item):
                answered[item.request_id] = replace(stored.verdict, round_id=item.round_id)
        step = TargetReplies((), 0)
        if answered:
            step, self._stored_step = self._stored_step, _REPORTED
        if rest := [item for item in items if item.request_id not in answered]:
            computed = self._engine.run(rest)
            answered.update((reply.request_id, reply) for reply in computed.replies)
            # Two steps' time is that of no step: the one that was waited for is reported.
            step = replace(computed, num_experts=computed.num_experts if len(rest) == len(items) else None)
        self._expect(items, answered)
        replies = tuple(answered[item.request_id] for item in items if item.request_id in answered)
        return replace(step, replies=replies)

    def advance(self) -> bool:
        """Computes the step that is expected next, if there is one. Returns whether it has.

        Raises what the engine raises; what is asked for then is computed anew.
        """
        if not self._expected or self._stored:
            return False
        items, self._expected = tuple(self._expected.values()), {}
        computed = self._engine.run(items)
        verdicts = {reply.request_id: reply for reply in computed.replies if isinstance(reply, Verdict)}
        self._stored = {
            item.request_id: _StoredVerdict(item, verdicts[item.request_id])
            for item in items
            if item.request_id in verdicts
        }
        self._stored_step = replace(computed, replies=())
        return True

    def release(self, request_ids: Sequence[str]) -> None:
        """Frees the sequences; unknown ids are ignored."""
        for request_id in request_ids:
            self._stops.pop(request_id, None)
            self._expected.pop(request_id, None)
            self._stored.pop(request_id, None)
        self._engine.release(request_ids)

    def _expect(self, items: Sequence[VerifyItem], answered: Mapping[str, TargetReply]) -> None:
        """Notes what follows these items."""
        for item in items:
            self._expected.pop(item.request_id, None)
            if item.sampling is not None:
                self._stops[item.request_id] = frozenset(item.sampling.stop_token_ids)
        if not all(item.runs_on for item in items):
            self._expected.clear()
            return
        for item in items:
            reply = answered.get(item.request_id)
            if isinstance(reply, Verdict) and (token := reply.next_token_id) is not None:
                length = item.base_len + len(item.token_ids) + reply.num_accepted_tokens
                if token not in self._stops.get(item.request_id, ()):
                    self._expected[item.request_id] = VerifyItem(
                        item.request_id, item.round_id + 1, length, (token,), runs_on=True
                    )
