"""Engines that only take time: interfaces.Verifier and interfaces.Drafter with times from a profile.

They keep the lengths of sequences as the protocol says and answer *unknown sequence* or *no room* where a
real engine would; their verdicts are drawn (``verdicts``). All times are on the running loop's clock, which
is virtual in a plan.

A draft is one server with one queue: what several routers asked for meanwhile goes into its next step.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from specray.errors import EngineLostError
from specray.planning.profile import RouterProfile
from specray.planning.times import DraftTimes, TargetTimes
from specray.planning.verdicts import GUESS, MAX_RANK, Verdicts
from specray.types import (
    Branch,
    DraftReplies,
    DraftReply,
    EngineInfo,
    ItemFailed,
    Outcomes,
    Proposal,
    SpeculateItem,
    TargetReplies,
    TargetReply,
    UnknownSequence,
    Verdict,
    VerifyItem,
)

RepliesT = TypeVar("RepliesT", DraftReplies, TargetReplies)


class _Mailbox(Generic[RepliesT]):
    """Replies that have arrived, and whether more can."""

    def __init__(self) -> None:
        self._arrived: deque[RepliesT] = deque()
        self._wake = asyncio.Event()
        self._is_closed = False

    def put(self, replies: RepliesT) -> None:
        self._arrived.append(replies)
        self._wake.set()

    async def get(self) -> RepliesT:
        while not self._arrived:
            if self._is_closed:
                raise EngineLostError("the simulated connection was closed")
            self._wake.clear()
            await self._wake.wait()
        return self._arrived.popleft()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()


@dataclass(slots=True)
class Busy:
    """How long an engine has worked, for its utilisation."""

    seconds: float = 0.0
    since_s: float = 0.0
    until_s: float = 0.0
    num_steps: int = 0

    def work(self, start_s: float, end_s: float) -> None:
        """One step; steps of an engine do not overlap."""
        self.seconds += end_s - start_s
        self.since_s, self.until_s = start_s, end_s
        self.num_steps += 1

    def worked_s(self, now: float) -> float:
        """Of ``seconds``, those before ``now``: a step is counted when it is sent."""
        return self.seconds - max(0.0, self.until_s - max(now, self.since_s))

    def extend(self, seconds: float) -> None:
        """The last step takes so much longer."""
        self.seconds += seconds
        self.until_s += seconds


@dataclass(slots=True)
class RequestTimes:
    """What a request's client would see, as the target's verdicts arrive at the router."""

    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """(seconds per token, tokens) of each later commit: the inter-token latencies."""

    def commit(self, now: float, num_tokens: int) -> None:
        if self.first_s is None:
            self.first_s = now
        else:
            self.gaps.append(((now - self.last_s) / num_tokens, num_tokens))
        self.last_s = now
        self.num_tokens += num_tokens


@dataclass(slots=True)
class _Step:
    """Of a target, on its way."""

    replies: tuple[TargetReply, ...]
    commits: Sequence[tuple[str, int]]
    """(request id, tokens)."""
    seconds: float
    way_back_s: float
    other_worked_s: float = 0.0
    """What the draft beside it had worked when the step was sent."""
    slowdown: float = 1.0
    """While the draft works."""


class SimulatedTarget:
    """interfaces.Verifier over one target group.

    Args:
        info: its limits.
        times: of its steps.
        router: the router's own time, which passes before a step.
        verdicts: what becomes of draft tokens.
        rng: of the draws.
        requests: told of every commit, by request id.
    """

    def __init__(
        self,
        info: EngineInfo,
        times: TargetTimes,
        *,
        router: RouterProfile,
        verdicts: Verdicts,
        rng: random.Random,
        requests: dict[str, RequestTimes],
    ) -> None:
        self.info = info
        self.busy = Busy()
        self.beside: Busy | None = None
        """The draft that shares its hardware; None: none does."""
        self._times = times
        self._router = router
        self._verdicts = verdicts
        self._rng = rng
        self._requests = requests
        self._lengths: dict[str, int] = {}
        self._blocks: dict[str, int] = {}
        self._num_blocks = 0
        self._mailbox: _Mailbox[TargetReplies] = _Mailbox()

    async def fetch_info(self) -> EngineInfo:
        await asyncio.sleep(self._times.transport.of(1))
        return self.info

    async def verify(self, items: Sequence[VerifyItem]) -> None:
        """One step; it begins when the router and the way there have had their time."""
        loop = asyncio.get_running_loop()
        rows = prefill_s = context = 0.0
        replies: list[TargetReply] = []
        commits: list[tuple[str, int]] = []
        num_decoding = 0
        has_drafts = False
        for item in items:
            reply, taken = self._apply(item)
            replies.append(reply)
            if not isinstance(reply, Verdict):
                continue
            if reply.next_token_id is not None:
                commits.append((item.request_id, reply.num_accepted_tokens + 1))
            has_drafts = has_drafts or bool(item.draft_token_ids)
            if item.base_len == 0 or taken > self._times.longest_round:
                prefill_s += self._times.prefill_s(item.base_len, taken + len(item.draft_token_ids))
            else:
                num_decoding += 1
                rows += taken + len(item.draft_token_ids)
                context += item.base_len
        if has_drafts:
            own, transport = self._router.verify_after_proposal, self._times.transport
        else:
            own, transport = self._router.verify_after_verdict, self._times.plain_transport
        transport_s = transport.of(len(items))
        start_s = max(loop.time() + own.of(len(items)) + transport_s / 2, self.busy.until_s)
        seconds = prefill_s
        if num_decoding:
            seconds += self._times.step_s(num_decoding, rows, context)
            if prefill_s:
                # Both parts read the weights; one pass over them serves both.
                seconds -= min(self._times.least_s, prefill_s)
        end_s = start_s + seconds
        self.busy.work(start_s, end_s)
        step = _Step(tuple(replies), commits, seconds, transport_s / 2)
        if self.beside is not None:
            step.other_worked_s = self.beside.worked_s(loop.time())
            step.slowdown = self._times.prompt_slowdown if prefill_s else self._times.slowdown
        loop.call_at(end_s, self._end, step)

    async def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)

    async def replies(self) -> TargetReplies:
        return await self._mailbox.get()

    async def close(self) -> None:
        self._mailbox.close()

    def _end(self, step: _Step) -> None:
        loop = asyncio.get_running_loop()
        if self.beside is not None:
            # What the draft did meanwhile is known only now.
            shared_s = min(step.seconds, self.beside.worked_s(loop.time()) - step.other_worked_s)
            extra_s = (step.slowdown - 1) * shared_s
            self.busy.extend(extra_s)
            step.seconds += extra_s
            loop.call_later(extra_s + step.way_back_s, self._arrive, step)
        else:
            loop.call_later(step.way_back_s, self._arrive, step)

    def _arrive(self, step: _Step) -> None:
        now = asyncio.get_running_loop().time()
        for request_id, num_tokens in step.commits:
            times = self._requests.get(request_id)
            if times is not None:
                times.commit(now, num_tokens)
        self._mailbox.put(TargetReplies(step.replies, round(1e9 * step.seconds)))

    def _apply(self, item: VerifyItem) -> tuple[TargetReply, int]:
        """The reply, and how many of the item's tokens are computed."""
        request_id, base_len = item.request_id, item.base_len
        held = self._lengths.get(request_id)
        if base_len > 0 and (held is None or base_len > held):
            return UnknownSequence(request_id, item.round_id, base_len), 0
        taken = len(item.token_ids)
        if item.max_new_tokens is not None:
            taken = min(taken, item.max_new_tokens)
        end = base_len + taken
        if not self._hold(request_id, end + len(item.draft_token_ids) + 1):
            failed = ItemFailed(request_id, item.round_id, base_len, "no free block", is_retriable=True)
            return failed, 0
        self._lengths[request_id] = end
        if not item.sample:
            return Verdict(request_id, item.round_id, base_len, 0, None, held_len=end), taken
        num_accepted, token = self._verdicts.draw(self._rng, len(item.draft_token_ids))
        return Verdict(request_id, item.round_id, base_len, num_accepted, token), taken

    def _hold(self, request_id: str, length: int) -> bool:
        """Takes the blocks for ``length`` tokens; False, and nothing changed, where they are not free."""
        held = self._blocks.get(request_id)
        if held is None and len(self._blocks) >= self.info.max_num_seqs:
            return False
        wanted = max(held or 0, -(-length // self.info.block_size))
        num_blocks = self._num_blocks + wanted - (held or 0)
        if self.info.num_blocks and num_blocks > self.info.num_blocks:
            return False
        self._blocks[request_id], self._num_blocks = wanted, num_blocks
        return True

    def _forget(self, request_id: str) -> None:
        self._lengths.pop(request_id, None)
        self._num_blocks -= self._blocks.pop(request_id, 0)


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
        self._mailbox: _Mailbox[DraftReplies] = _Mailbox()
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
