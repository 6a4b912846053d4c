"""A draft that only takes time: interfaces.Drafter with times from a profile.

It keeps the lengths of sequences as the protocol says and answers *unknown sequence* where a real engine
would. All times are on the running loop's clock, which is virtual in a plan.

A draft is one server with one queue: what several routers asked for meanwhile goes into its next step.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from specray.errors import EngineLostError
from specray.planning.connection import Busy, Mailbox
from specray.planning.profile import RouterProfile
from specray.planning.times import DraftTimes
from specray.planning.verdicts import GUESS, MAX_RANK
from specray.types import (
    Branch,
    DraftReplies,
    DraftReply,
    EngineInfo,
    Outcomes,
    Proposal,
    SpeculateItem,
    UnknownSequence,
)


@dataclass(slots=True, eq=False)
class _Question:
    item: SpeculateItem
    connection: SimulatedDrafter


class SimulatedDraft:
    """One draft replica: takes everything that waits into its next step.

    Args:
        info: its limits; beyond ``max_num_seqs`` sequences the one used longest ago is forgotten.
        times: of its steps.
        router: the routers' own time, which passes before a question is sent.
    """

    def __init__(self, info: EngineInfo, times: DraftTimes, *, router: RouterProfile) -> None:
        self.info = info
        self.busy = Busy()
        self.num_connections = 0
        self.times = times
        self.router = router
        self._waiting: list[_Question] = []
        self._is_working = False
        self._lengths: OrderedDict[tuple[SimulatedDrafter, str], int] = OrderedDict()

    def connect(self) -> SimulatedDrafter:
        """A connection of one more router."""
        self.num_connections += 1
        return SimulatedDrafter(self)

    def ask(self, connection: SimulatedDrafter, items: Sequence[SpeculateItem]) -> None:
        """Items have arrived."""
        self._waiting += [_Question(item, connection) for item in items]
        if not self._is_working:
            self._work()

    def release(self, connection: SimulatedDrafter, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._lengths.pop((connection, request_id), None)

    def disconnect(self, connection: SimulatedDrafter) -> None:
        """A router has closed its connection."""
        self.num_connections -= 1
        self._waiting = [question for question in self._waiting if question.connection is not connection]
        for key in [key for key in self._lengths if key[0] is connection]:
            del self._lengths[key]

    def _work(self) -> None:
        if not self._waiting:
            return
        questions, self._waiting = self._waiting, []
        loop = asyncio.get_running_loop()
        start_s = loop.time()
        replies: dict[SimulatedDrafter, list[DraftReply]] = {}
        answered: list[SpeculateItem] = []
        for question in questions:
            reply = self._answer(question)
            replies.setdefault(question.connection, []).append(reply)
            if not isinstance(reply, UnknownSequence):
                answered.append(question.item)
        seconds = self.times.step_s(answered)
        self._is_working = True
        self.busy.work(start_s, start_s + seconds)
        loop.call_at(start_s + seconds, self._end, replies, round(1e9 * seconds))

    def _end(self, replies: dict[SimulatedDrafter, list[DraftReply]], forward_ns: int) -> None:
        self._is_working = False
        for connection, own in replies.items():
            connection.answer(DraftReplies(tuple(own), forward_ns))
        self._work()

    def _answer(self, question: _Question) -> DraftReply:
        item = question.item
        key = question.connection, item.request_id
        held = self._lengths.get(key)
        if item.base_len > 0 and (held is None or item.base_len > held):
            return UnknownSequence(item.request_id, item.round_id, item.base_len)
        self._lengths[key] = item.base_len + len(item.token_ids)
        self._lengths.move_to_end(key)
        if len(self._lengths) > self.info.max_num_seqs:
            self._lengths.popitem(last=False)
        tokens = (GUESS,) * item.num_speculative_tokens
        if not item.fanout:
            return Proposal(item.request_id, item.round_id, item.base_len, tokens)
        return Outcomes(item.request_id, item.round_id, item.base_len, _branches(item, tokens))


class SimulatedDrafter:
    """interfaces.Drafter: one router's connection to a simulated draft."""

    def __init__(self, draft: SimulatedDraft) -> None:
        self.info = draft.info
        self._draft = draft
        self._mailbox: Mailbox[DraftReplies] = Mailbox()
        self._is_closed = False

    async def fetch_info(self) -> EngineInfo:
        await asyncio.sleep(self._draft.times.transport.of(1))
        return self.info

    async def speculate(self, items: Sequence[SpeculateItem]) -> None:
        count = len(items)
        delay_s = self._draft.times.transport.of(count) / 2
        if not items[0].fanout:
            delay_s += self._draft.router.ask_after_verdict.of(count)
        asyncio.get_running_loop().call_later(delay_s, self._draft.ask, self, items)

    async def release(self, request_ids: Sequence[str]) -> None:
        self._draft.release(self, request_ids)

    async def replies(self) -> DraftReplies:
        return await self._mailbox.get()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._draft.disconnect(self)
            self._mailbox.close()

    def answer(self, replies: DraftReplies) -> None:
        """A step of the draft has ended."""
        way_s = self._draft.times.transport.of(len(replies.replies)) / 2
        asyncio.get_running_loop().call_later(way_s, self._mailbox.put, replies)


class SimulatedDrafterSource:
    """interfaces.DrafterSource: the draft with the fewest routers, as a lease is given in service."""

    def __init__(self, drafts: Sequence[SimulatedDraft]) -> None:
        self._drafts = drafts

    async def lease(self) -> SimulatedDrafter:
        if not self._drafts:
            raise EngineLostError("there is no draft")
        return min(self._drafts, key=lambda draft: draft.num_connections).connect()


def _branches(item: SpeculateItem, tokens: tuple[int, ...]) -> tuple[Branch, ...]:
    """Chains after likely outcomes: as many ranks for each number of accepted tokens as there is room."""
    num_outcomes = len(item.fanout)
    ranks = min(MAX_RANK, max(1, item.max_branches // num_outcomes) if item.max_branches else MAX_RANK)
    return tuple(
        Branch(num_accepted, rank, tokens)
        for num_accepted, most in enumerate(item.fanout)
        for rank in range(GUESS, GUESS + min(ranks, most))
    )
