"""A simulated draft, which only takes time: interfaces.Drafter with times from a profile.

It stores the lengths of sequences as the protocol says, and answers *unknown sequence* where a real engine
would. All times are on the running loop's clock, which is virtual in a plan.

A draft is one server with one queue: what several routers ask meanwhile goes into its next step.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from specray.draft_tokens import DraftTokens
from specray.engine_info import EngineInfo
from specray.errors import EngineLostError
from specray.fakes import ReplyQueue
from specray.planning.profile import RouterProfile
from specray.planning.simulation.busy import Held, SimulatedEngine, unknown
from specray.planning.simulation.scripts import Scripts
from specray.planning.simulation.times import SimulatedDraftTimes, drawn
from specray.types import DraftReplies, DraftReply, Outcomes, Proposal, SpeculateItem, UnknownSequence


@dataclass(slots=True, eq=False)
class _Question:
    item: SpeculateItem
    connection: SimulatedDrafter


class SimulatedDraft(SimulatedEngine):
    """One draft replica: takes everything that waits into its next step.

    Args:
        info: limits; beyond ``max_num_seqs`` sequences the least recently used one is forgotten.
        times: times of its steps.
        router: the routers' own time, which passes before a question is sent.
        scripts: source of its proposals.
        seed: seed of the spread of step times.
    """

    def __init__(
        self,
        info: EngineInfo,
        times: SimulatedDraftTimes,
        *,
        router: RouterProfile,
        scripts: Scripts,
        seed: int | str = 0,
    ) -> None:
        super().__init__(info)
        self.num_connections = 0
        self.times = times
        self.router = router
        self._scripts = scripts
        self._rng = random.Random(seed)
        self._waiting: list[_Question] = []
        self._is_working = False
        self._held: OrderedDict[tuple[SimulatedDrafter, str], Held] = OrderedDict()

    def connect(self) -> SimulatedDrafter:
        self.num_connections += 1
        return SimulatedDrafter(self)

    def ask(self, connection: SimulatedDrafter, items: Sequence[SpeculateItem]) -> None:
        self._waiting += [_Question(item, connection) for item in items]
        if not self._is_working:
            self._work()

    def release(self, connection: SimulatedDrafter, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._held.pop((connection, request_id), None)

    def disconnect(self, connection: SimulatedDrafter) -> None:
        """Forgets a router that has closed its connection."""
        self.num_connections -= 1
        self._waiting = [question for question in self._waiting if question.connection is not connection]
        for key in [key for key in self._held if key[0] is connection]:
            del self._held[key]

    def _work(self) -> None:
        if not self._waiting:
            return
        questions, self._waiting = self._waiting, []
        replies: dict[SimulatedDrafter, list[DraftReply]] = {}
        answered: list[tuple[SpeculateItem, DraftReply]] = []
        for question in questions:
            reply = self._answer(question)
            replies.setdefault(question.connection, []).append(reply)
            if not isinstance(reply, UnknownSequence):
                answered.append((question.item, reply))
        seconds = self.times.step_s(answered) * drawn(self._rng, self.times.step_spread)
        self._is_working = True

        def end(took_s: float) -> None:
            self._is_working = False
            for connection, own in replies.items():
                connection.answer(DraftReplies(tuple(own), round(1e9 * took_s)))
            self._work()

        self.run_step(asyncio.get_running_loop().time(), seconds, self.times.slowdown, end)

    def transport_s(self, num_items: int) -> float:
        return self.times.transport.of(num_items) * drawn(self._rng, self.times.transport_spread)

    def _answer(self, question: _Question) -> DraftReply:
        item = question.item
        key = question.connection, item.request_id
        held = self._held.get(key)
        if (late := unknown(item, held)) is not None:
            return late
        if held is None:
            held = self._held[key] = Held()
        if item.sampling is not None:
            held.num_prompt = item.sampling.num_prompt_tokens
        held.length = item.base_len + len(item.token_ids)
        self._held.move_to_end(key)
        if len(self._held) > self.info.max_num_seqs:
            self._held.popitem(last=False)
        script, position = self._scripts.of(item.request_id), held.length - held.num_prompt
        if item.fanout:
            branches = script.branches(position, item.of_first_chain())
            return Outcomes(item.request_id, item.round_id, item.base_len, branches)
        tokens = script.proposal(position, item.num_speculative_tokens, item.min_acceptance)
        return Proposal(item.request_id, item.round_id, item.base_len, DraftTokens(tokens))


class SimulatedDrafter:
    """interfaces.Drafter: one router's connection to a simulated draft."""

    def __init__(self, draft: SimulatedDraft) -> None:
        self.info = draft.info
        self._draft = draft
        self._replies: ReplyQueue[DraftReplies] = ReplyQueue()

    async def fetch_info(self) -> EngineInfo:
        await asyncio.sleep(self._draft.times.transport.of(1))
        return self.info

    async def speculate(self, items: Sequence[SpeculateItem], released: Sequence[str] = ()) -> None:
        self._draft.release(self, released)
        count = len(items)
        delay_s = self._draft.transport_s(count) / 2
        if not items[0].fanout:
            delay_s += self._draft.router.ask_after_verdict.of(count)
        asyncio.get_running_loop().call_later(delay_s, self._draft.ask, self, items)

    async def release(self, request_ids: Sequence[str]) -> None:
        self._draft.release(self, request_ids)

    async def replies(self) -> DraftReplies:
        return await self._replies.get()

    async def close(self) -> None:
        if not self._replies.is_lost:
            self._draft.disconnect(self)
            self._replies.lose()

    def answer(self, replies: DraftReplies) -> None:
        way_s = self._draft.transport_s(len(replies.replies)) / 2
        asyncio.get_running_loop().call_later(way_s, self._replies.put, replies)


class SimulatedDrafterSource:
    """interfaces.DrafterSource: leases the draft with the fewest routers, as in service."""

    def __init__(self, drafts: Sequence[SimulatedDraft]) -> None:
        self._drafts = drafts

    async def lease(self) -> SimulatedDrafter:
        if not self._drafts:
            raise EngineLostError("there is no draft")
        return min(self._drafts, key=lambda draft: draft.num_connections).connect()
