"""A target group that only takes time: interfaces.Verifier with times from a profile.

It keeps the lengths of sequences as the protocol says and answers *unknown sequence* or *no room* where a
real engine would; its verdicts are those of a script (``scripts``). All times are on the running loop's
clock, which is virtual in a plan.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specray.planning.profile import RouterProfile
from specray.planning.simulation.connection import Busy, Mailbox, SharedStep
from specray.planning.simulation.scripts import Scripts
from specray.planning.simulation.times import StepSize, TargetTimes, drawn
from specray.types import (
    EngineInfo,
    ItemFailed,
    TargetReplies,
    TargetReply,
    UnknownSequence,
    Verdict,
    VerifyItem,
)


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
    num_rows: int
    shared: SharedStep
    way_back_s: float


class SimulatedTarget:
    """interfaces.Verifier over one target group.

    Args:
        info: its limits.
        times: of its steps.
        router: the router's own time, which passes before a step.
        scripts: what becomes of draft tokens.
        rng: of the draws.
        requests: told of every commit, by request id.
    """

    def __init__(
        self,
        info: EngineInfo,
        times: TargetTimes,
        *,
        router: RouterProfile,
        scripts: Scripts,
        rng: random.Random,
        requests: dict[str, RequestTimes],
    ) -> None:
        self.info = info
        self.busy = Busy()
        self.beside: Busy | None = None
        """The draft that shares its hardware; None: none does."""
        self._times = times
        self._router = router
        self._scripts = scripts
        self._rng = rng
        self._requests = requests
        self._lengths: dict[str, int] = {}
        self._num_confirmed: dict[str, int] = {}
        """Draft tokens of a sequence that were accepted in its last step, and are computed already."""
        self._num_prompt_tokens: dict[str, int] = {}
        self._blocks: dict[str, int] = {}
        self._num_blocks = 0
        self._mailbox: Mailbox[TargetReplies] = Mailbox()

    async def fetch_info(self) -> EngineInfo:
        await asyncio.sleep(self._times.transport.of(1))
        return self.info

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        """One step; it begins when the router and the way there have had their time."""
        await self.release(released)
        loop = asyncio.get_running_loop()
        size, num_rows = StepSize(), 0
        replies: list[TargetReply] = []
        commits: list[tuple[str, int]] = []
        for item in items:
            item = replace(item, draft=item.draft.first_chain())
            reply, taken = self._apply(item)
            replies.append(reply)
            if not isinstance(reply, Verdict):
                continue
            if reply.next_token_id is not None:
                commits.append((item.request_id, reply.num_accepted_tokens + 1))
            size.add(item.base_len, taken, len(item.draft.token_ids))
            # What starts over has nothing computed.
            num_confirmed = self._num_confirmed.get(item.request_id, 0) if item.base_len else 0
            num_rows += taken + len(item.draft.token_ids) - num_confirmed
            self._num_confirmed[item.request_id] = reply.num_accepted_tokens
        if size.has_drafts:
            own, transport = self._router.verify_after_proposal, self._times.transport
        else:
            own, transport = self._router.verify_after_verdict, self._times.plain_transport
        transport_s = transport.of(len(items)) * drawn(self._rng, self._times.transport_spread)
        own_s = own.of(len(items)) + (self._times.prompt_wait_s if size.prompts else 0.0)
        start_s = max(loop.time() + own_s + transport_s / 2, self.busy.until_s)
        seconds = self._times.seconds(size) * drawn(self._rng, self._times.step_spread)
        end_s = start_s + seconds
        self.busy.work(start_s, end_s)
        shared = SharedStep(seconds)
        if self.beside is not None:
            slowdown = self._times.prompt_slowdown if size.prompts else self._times.slowdown
            shared = SharedStep(seconds, self.beside.worked_s(loop.time()), slowdown)
        loop.call_at(end_s, self._end, _Step(tuple(replies), commits, num_rows, shared, transport_s / 2))

    async def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)

    async def replies(self) -> TargetReplies:
        return await self._mailbox.get()

    async def close(self) -> None:
        self._mailbox.close()

    def _end(self, step: _Step) -> None:
        loop = asyncio.get_running_loop()
        if self.beside is not None and (lost_s := step.shared.make_up(self.busy, self.beside, loop.time())):
            loop.call_later(lost_s, self._end, step)
            return
        loop.call_later(step.way_back_s, self._arrive, step)

    def _arrive(self, step: _Step) -> None:
        now = asyncio.get_running_loop().time()
        for request_id, num_tokens in step.commits:
            times = self._requests.get(request_id)
            if times is not None:
                times.commit(now, num_tokens)
        self._mailbox.put(TargetReplies(step.replies, round(1e9 * step.shared.seconds), step.num_rows))

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
        if not self._hold(request_id, end + len(item.draft.token_ids) + 1):
            failed = ItemFailed(request_id, item.round_id, base_len, "no free block", is_retriable=True)
            return failed, 0
        if item.sampling is not None:
            self._num_prompt_tokens[request_id] = item.sampling.num_prompt_tokens
        self._lengths[request_id] = end
        if not item.sample:
            return Verdict(request_id, item.round_id, base_len, 0, None, held_len=end), taken
        position = end - self._num_prompt_tokens[request_id]
        num_accepted, token = self._scripts.of(request_id).verdict(self._rng, position, item.draft.token_ids)
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
        self._num_confirmed.pop(request_id, None)
        self._num_prompt_tokens.pop(request_id, None)
        self._num_blocks -= self._blocks.pop(request_id, 0)
