"""The choice of a Router, by the predicted seconds to the first token."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal

from specray.errors import EngineLostError, OverloadedError
from specray.prefix_keys import SNAPSHOT_TOKENS, UNIT_TOKENS, short_keys
from specray.requests import GenerateRequest, OutputChunk, RouterLoad
from specray.routing.loads import Loads
from specray.routing.prefix_map import PrefixMap

MAX_MATCHED_UNITS: Final = 512
"""Units of a prompt that are looked up, 8,192 tokens; a prefix known so far is expected to go on."""
MIN_PREFIX_TOKENS: Final = 64
"""Tokens below which a prompt is not looked up: computing it is cheaper than being wrong."""
_TOLERANCE: Final = UNIT_TOKENS + SNAPSHOT_TOKENS
"""Tokens by which less may be found than a Router has computed: models go on from places apart."""
TIE_S: Final = 0.005
TIE_SHARE: Final = 0.05
"""Share by which costs may exceed the least and count as equal; within TIE_S seconds they always do."""
NUM_KEPT: Final = 64
"""Choices kept for /debug/trace."""

Reason = Literal["prefix", "load", "tie", "full"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice, for those who ask why.

    Attributes:
        router: the chosen Router.
        reason: what decided: its cache, its load, the session or chance among equals, or that all are full.
        costs: predicted seconds of every Router.
        num_prompt_tokens: tokens of the prompt, with what another Router has committed.
        num_expected_tokens: prompt tokens that the Router is expected to find in its cache.
        seconds: time that the choice took.
        chosen_s: time of the choice on the clock of the one who chose.
    """

    request_id: str
    router: str
    reason: Reason
    costs: Mapping[str, float]
    num_prompt_tokens: int
    num_expected_tokens: int
    seconds: float = 0.0
    chosen_s: float = 0.0


@dataclass(slots=True)
class _Sent:
    """A request on its way: what was chosen, and the chain that its Router will hold."""

    choice: Choice
    keys: list[int]
    token_ids: tuple[int, ...]
    root: bytes
    oldest_use: int | None
    """Last use of the last unit that was expected; None: nothing was expected."""
    is_computed: bool = False


class RouterChoice:
    """Chooses the Router of each request of one Ingress, and learns from what comes back.

    Nothing is asked of Routers: they say how busy they are with their first and last chunks, and how
    much of a prompt they had found with the last one. A wrong expectation mends the map.

    Args:
        now: returns the time in seconds.
        seed: of the choice among equals.
    """

    def __init__(self, now: Callable[[], float], *, seed: int | None = None) -> None:
        self.map = PrefixMap()
        self.loads = Loads()
        self.last: deque[Choice] = deque(maxlen=NUM_KEPT)
        self._now = now
        self._rng = random.Random(seed)
        self._sent: dict[str, _Sent] = {}

    def choose(self, request: GenerateRequest, routers: Sequence[str]) -> list[str]:
        """Returns ``routers``, at least one, the best first, and counts the request as sent to that one."""
        began_s = self._now()
        token_ids = request.prompt_token_ids
        if request.resumed is not None:
            token_ids += request.resumed.token_ids
        root, keys = b"", []
        if self._can_reuse(request, token_ids):
            root = request.prefix_root
            # The last token is always computed, for its logits.
            keys = short_keys(root, token_ids[:-1], MAX_MATCHED_UNITS)
        matches = {router: self.map.match(router, keys) for router in routers}
        found = {router: self._expected(units, keys, token_ids) for router, units in matches.items()}
        loads = self.loads.now(routers)
        costs = {router: _cost(loads[router], len(token_ids) - found[router]) for router in routers}
        ranked = sorted(routers, key=lambda router: (self.loads.is_full(router), costs[router]))
        best = self._among_equals(request, ranked, costs)
        ranked.remove(best)
        reason = self._reason(best, ranked, costs, found)
        now = self._now()
        choice = Choice(
            request.request_id,
            best,
            reason,
            costs,
            len(token_ids),
            found[best],
            seconds=now - began_s,
            chosen_s=now,
        )
        oldest = self.map.last_use(best, keys[matches[best] - 1]) if matches[best] else None
        self._sent[request.request_id] = _Sent(choice, keys, token_ids, root, oldest)
        self.loads.send(request.request_id, best, len(token_ids) - found[best], now)
        self.last.append(choice)
        return [best, *ranked]

    def on_elsewhere(self, request_id: str, router: str) -> None:
        """The request went to another Router than the best."""
        sent = self._sent.get(request_id)
        if sent is None or sent.choice.router == router:
            return
        choice = sent.choice
        self.loads.send(request_id, router, choice.num_prompt_tokens, self._now())
        sent.choice = Choice(request_id, router, "full", choice.costs, choice.num_prompt_tokens, 0)
        sent.oldest_use = None

    def on_chunk(self, chunk: OutputChunk, token_ids: Sequence[int] = ()) -> Choice | None:
        """A chunk of the request arrived.

        Args:
            token_ids: with the last chunk, all tokens of the output.

        Returns:
            the choice, with the last chunk of a request that was chosen for.
        """
        sent = self._sent.get(chunk.request_id)
        if sent is None:
            return None
        router = sent.choice.router
        self.loads.arrive(chunk.request_id)
        if chunk.load is not None:
            self.on_load(router, chunk.load)
        if chunk.finish_reason is None:
            if not sent.is_computed:
                sent.is_computed = True
                self.map.use(router, sent.keys)
            return None
        del self._sent[chunk.request_id]
        expected = sent.choice.num_expected_tokens
        if sent.oldest_use is not None and chunk.num_cached_tokens < expected - _TOLERANCE:
            self.map.forget_until(router, sent.oldest_use)
        if sent.keys:
            whole = (*sent.token_ids, *token_ids)
            self.map.use(router, short_keys(sent.root, whole[:-1], MAX_MATCHED_UNITS))
        return sent.choice

    def on_end(self, request_id: str, error: Exception | None = None) -> None:
        """The call has ended; without a last chunk, the caller left, or the Router refused it or was lost."""
        sent = self._sent.pop(request_id, None)
        self.loads.arrive(request_id)
        if sent is None or not isinstance(error, OverloadedError | EngineLostError):
            return
        self.loads.refuse(sent.choice.router)
        if isinstance(error, EngineLostError):
            self.map.drop(sent.choice.router)

    def on_load(self, router: str, load: RouterLoad) -> None:
        """The Router says how busy it is."""
        self.loads.tell(router, load, self._now())
        if load.num_cache_tokens:
            self.map.set_capacity(router, load.num_cache_tokens // UNIT_TOKENS)

    def on_gone(self, router: str) -> None:
        """The Router has died, or takes no requests any more."""
        self.map.drop(router)
        self.loads.drop(router)

    def _can_reuse(self, request: GenerateRequest, token_ids: Collection[int]) -> bool:
        return request.sampling.num_prompt_logprobs is None and len(token_ids) >= MIN_PREFIX_TOKENS

    def _expected(self, num_units: int, keys: Sequence[int], token_ids: Sequence[int]) -> int:
        if num_units == MAX_MATCHED_UNITS == len(keys):
            return len(token_ids) - 1
        return num_units * UNIT_TOKENS

    def _among_equals(
        self, request: GenerateRequest, ranked: Sequence[str], costs: Mapping[str, float]
    ) -> str:
        best = costs[ranked[0]]
        limit = best + max(TIE_S, TIE_SHARE * best)
        is_full = self.loads.is_full(ranked[0])
        equal = [r for r in ranked if costs[r] <= limit and self.loads.is_full(r) == is_full]
        if len(equal) == 1:
            return equal[0]
        if request.session:
            return max(equal, key=lambda router: _affinity(request.session, router))
        # The better of two at random: chance alone would leave one without work and give another too much.
        return min(self._rng.sample(equal, 2), key=lambda router: costs[router])

    def _reason(
        self, best: str, others: Sequence[str], costs: Mapping[str, float], found: Mapping[str, int]
    ) -> Reason:
        if self.loads.is_full(best):
            return "full"
        if found[best] > 0 and found[best] >= max((found[other] for other in others), default=0):
            return "prefix"
        limit = costs[best] + max(TIE_S, TIE_SHARE * costs[best])
        return "tie" if any(costs[other] <= limit for other in others) else "load"


def _cost(load: RouterLoad, num_tokens: int) -> float:
    """Predicted seconds to the first token."""
    # A step that is under way goes on for half of its time on average.
    under_way = load.step_s / 2 if load.num_running else 0.0
    return (load.num_waiting_tokens + num_tokens) / load.prefill_tokens_per_s + under_way


def _affinity(session: str, router: str) -> bytes:
    """Rendezvous hashing: every Ingress sends equal choices of a session to the same Router."""
    return blake2b(f"{session}\0{router}".encode(), digest_size=8).digest()
