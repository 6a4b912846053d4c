"""How busy each Router is: what it said last, and what was sent to it since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from specray.requests import RouterLoad

SEEN_AFTER_S: Final = 0.1
"""Seconds after which a request that was sent to a Router is in what the Router says of itself."""
UNKNOWN: Final = RouterLoad(prefill_tokens_per_s=1000.0, step_s=0.05, num_places=1)
"""Load of a Router while none has said anything: only differences count."""


@dataclass(frozen=True, slots=True)
class _Sent:
    router: str
    num_tokens: int
    sent_s: float


class Loads:
    """The load of every Router, with the requests of this Ingress that it has not counted yet."""

    def __init__(self) -> None:
        self._told: dict[str, RouterLoad] = {}
        self._sent: dict[str, _Sent] = {}
        self._refused: set[str] = set()

    def tell(self, router: str, load: RouterLoad, now: float) -> None:
        """The Router says how busy it is. What it had said before may arrive later, and is ignored."""
        last = self._told.get(router)
        if last is not None and load.number < last.number:
            return
        self._told[router] = load
        self._refused.discard(router)
        for request_id, sent in list(self._sent.items()):
            if sent.router == router and now - sent.sent_s >= SEEN_AFTER_S:
                del self._sent[request_id]

    def send(self, request_id: str, router: str, num_tokens: int, now: float) -> None:
        """A request goes to the Router, which has to compute ``num_tokens`` tokens of its prompt."""
        self._sent[request_id] = _Sent(router, num_tokens, now)

    def arrive(self, request_id: str) -> None:
        """The request has been answered, or will not be: what the Router says next includes it."""
        self._sent.pop(request_id, None)

    def refuse(self, router: str) -> None:
        """The Router has refused a request. It counts as full until it says how busy it is."""
        self._refused.add(router)

    def is_full(self, router: str) -> bool:
        """Whether the next request would wait or be refused."""
        load = self._told.get(router)
        if router in self._refused:
            return True
        return load is not None and load.num_running + self._num_sent(router) >= load.num_places

    def now(self, routers: Iterable[str]) -> dict[str, RouterLoad]:
        """The load of each of ``routers`` as it must be by now; what nobody has told is the others' mean."""
        told = list(self._told.values())
        speeds = [load.prefill_tokens_per_s for load in told if load.prefill_tokens_per_s > 0]
        steps = [load.step_s for load in told if load.step_s > 0]
        mean = replace(
            UNKNOWN,
            num_places=max((load.num_places for load in told), default=UNKNOWN.num_places),
            prefill_tokens_per_s=fmean(speeds) if speeds else UNKNOWN.prefill_tokens_per_s,
            step_s=fmean(steps) if steps else UNKNOWN.step_s,
        )
        return {router: self._now(router, mean) for router in routers}

    def drop(self, router: str) -> None:
        """The Router is gone."""
        self._told.pop(router, None)
        self._refused.discard(router)

    def _now(self, router: str, mean: RouterLoad) -> RouterLoad:
        load = self._told.get(router, mean)
        sent = [sent.num_tokens for sent in self._sent.values() if sent.router == router]
        return RouterLoad(
            num_waiting_tokens=load.num_waiting_tokens + sum(sent),
            num_running=load.num_running + len(sent),
            num_places=load.num_places,
            prefill_tokens_per_s=load.prefill_tokens_per_s or mean.prefill_tokens_per_s,
            step_s=load.step_s or mean.step_s,
        )

    def _num_sent(self, router: str) -> int:
        return sum(sent.router == router for sent in self._sent.values())
