"""A simulated target group, which only takes time: interfaces.Verifier with times from a profile.

It stores the lengths of sequences as the protocol says, and answers *unknown sequence* or *no room* where a
real engine would; its verdicts come from a script (``scripts``). All times are on the running loop's clock,
which is virtual in a plan.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from specray.engine_info import EngineInfo
from specray.fakes import ReplyQueue
from specray.planning.profile import RouterProfile
from specray.planning.simulation.busy import Held, SimulatedEngine, unknown
from specray.planning.simulation.prefixes import PrefixCache
from specray.planning.simulation.scripts import Scripts
from specray.planning.simulation.times import SimulatedTargetTimes, StepSize, drawn
from specray.types import ItemFailed, TargetReplies, TargetReply, Verdict, VerifyItem


@dataclass(slots=True)
class RequestTimes:
    """The times that a request's client would see, taken when verdicts arrive at the router."""

    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Pairs (seconds per token, tokens) of each later commit: the inter-token latencies."""

    def commit(self, now: float, num_tokens: int) -> None:
        if self.first_s is None:
            self.first_s = now
        else:
            self.gaps.append(((now - self.last_s) / num_tokens, num_tokens))
        self.last_s = now
        self.num_tokens += num_tokens


class SimulatedTarget(SimulatedEngine):
    """interfaces.Verifier over one target group.

    Args:
        info: limits.
        times: times of its steps.
        router: the router's own time, which passes before a step.
        scripts: source of its verdicts.
        rng: source of the draws.
        requests: records of requests by id, which receive every commit.
        prefixes: its prefix cache; None: nothing is ever found.
    """

    def __init__(
        self,
        info: EngineInfo,
        times: SimulatedTargetTimes,
        *,
        router: RouterProfile,
        scripts: Scripts,
        rng: random.Random,
        requests: dict[str, RequestTimes],
        prefixes: PrefixCache | None = None,
    ) -> None:
        super().__init__(info)
        self._prefixes = prefixes
        self._times = times
        self._router = router
        self._scripts = scripts
        self._rng = rng
        self._requests = requests
        self._held: dict[str, Held] = {}
        self._num_blocks = 0
        self._replies: ReplyQueue[TargetReplies] = ReplyQueue()

    async def fetch_info(self) -> EngineInfo:
        await asyncio.sleep(self._times.transport.of(1))
        return self.info

    async def verify(self, items: Sequence[VerifyItem], released: Sequence[str] = ()) -> None:
        """Sends one step, which begins when the router and the transport have had their time."""
        await self.release(released)
        loop = asyncio.get_running_loop()
        size, num_rows = StepSize(), 0
        replies: list[TargetReply] = []
        commits: list[tuple[str, int]] = []
        for item in items:
            # Simulated drafts propose chains; of anything else the first is verified.
            item = replace(item, draft=item.draft.first_chain())
            reply, taken, found = self._apply(item)
            replies.append(reply)
            if not isinstance(reply, Verdict):
                continue
            if reply.next_token_id is not None:
                commits.append((item.request_id, reply.num_accepted_tokens + 1))
            # A sequence that starts over has nothing computed.
            held = self._held[item.request_id]
            taken -= found + (held.num_confirmed if item.base_len else 0)
            size.add(item.base_len + found, taken, len(item.draft.token_ids))
            num_rows += taken + len(item.draft.token_ids)
            held.num_confirmed = reply.num_accepted_tokens
        if size.has_drafts:
            own, transport = self._router.verify_after_proposal, self._times.transport
        else:
            own, transport = self._router.verify_after_verdict, self._times.plain_transport
        transport_s = transport.of(len(items)) * drawn(self._rng, self._times.transport_spread)
        own_s = own.of(len(items)) + (self._times.prompt_wait_s if size.prompts else 0.0)
        start_s = max(loop.time() + own_s + transport_s / 2, self.busy.until_s)
        seconds = self._times.seconds(size) * drawn(self._rng, self._times.step_spread)
        slowdown = self._times.prompt_slowdown if size.prompts else self._times.slowdown

        def arrive(took_s: float) -> None:
            self._commit(commits)
            experts = self._times.num_experts(size)
            self._replies.put(TargetReplies(tuple(replies), round(1e9 * took_s), num_rows, experts))

        self.run_step(
            start_s, seconds, slowdown, lambda took_s: loop.call_later(transport_s / 2, arrive, took_s)
        )

    async def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            held = self._held.pop(request_id, None)
            if held is None:
                continue
            self._num_blocks -= held.num_blocks
            if self._prefixes is not None:
                self._prefixes.keep(held)

    async def replies(self) -> TargetReplies:
        return await self._replies.get()

    async def close(self) -> None:
        self._replies.lose()

    def _commit(self, commits: Sequence[tuple[str, int]]) -> None:
        now = asyncio.get_running_loop().time()
        for request_id, num_tokens in commits:
            times = self._requests.get(request_id)
            if times is not None:
                times.commit(now, num_tokens)

    def _apply(self, item: VerifyItem) -> tuple[TargetReply, int, int]:
        """Returns the reply, how many of the item's tokens it took, and how many of those were found."""
        request_id, base_len = item.request_id, item.base_len
        held = self._held.get(request_id)
        if (late := unknown(item, held)) is not None:
            return late, 0, 0
        held = held or Held()
        found = 0 if self._prefixes is None else self._prefixes.take(held, item)
        taken = len(item.token_ids)
        if item.max_new_tokens is not None:
            taken = min(taken, found + item.max_new_tokens)
        end = base_len + taken
        if not self._take_blocks(request_id, held, end + len(item.draft.token_ids) + 1):
            failed = ItemFailed(request_id, item.round_id, base_len, "no free block", is_retriable=True)
            return failed, 0, 0
        if item.sampling is not None:
            held.num_prompt = item.sampling.num_prompt_tokens
        held.length = end
        if not item.sample:
            chunk = Verdict(
                request_id, item.round_id, base_len, 0, None, held_len=end, num_cached_tokens=found
            )
            return chunk, taken, found
        if self._prefixes is not None and base_len < held.num_prompt:
            self._prefixes.keep(held)
        script = self._scripts.of(request_id)
        num_accepted, token = script.verdict(self._rng, end - held.num_prompt, item.draft.token_ids)
        verdict = Verdict(request_id, item.round_id, base_len, num_accepted, token, num_cached_tokens=found)
        return verdict, taken, found

    def _take_blocks(self, request_id: str, held: Held, length: int) -> bool:
        """Takes the blocks for ``length`` tokens; False, and nothing changed, if they are not free."""
        if request_id not in self._held and len(self._held) >= self.info.max_num_seqs:
            return False
        num_more = max(0, -(-length // self.info.block_size) - held.num_blocks)
        if self.info.num_blocks and self._num_blocks + num_more > self.info.num_blocks:
            return False
        held.num_blocks += num_more
        self._num_blocks += num_more
        self._held[request_id] = held
        return True
