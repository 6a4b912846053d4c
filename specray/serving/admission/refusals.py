"""Refusals at the ingress: before a prompt is tokenised and a router is asked, where the answer is known.

What an ingress knows of its routers' queues it does not ask them.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from specray.config import Config
from specray.errors import OverloadedError
from specray.interfaces import RouterClient
from specray.requests import GenerateRequest, OutputChunk, ServiceInfo
from specray.router.admission.queue import RetryAdvice
from specray.serving.admission.entrance import Entrance, arrive
from specray.serving.generation import close

PROBE_S = 0.5
"""So long a tenant's refusal is believed when nothing that this ingress sees has ended since; another ingress
may have seen it."""
_MAX_TENANTS = 1024

KeyT = TypeVar("KeyT", str, int)


@dataclass(slots=True)
class _Refusal:
    priority: int
    """The most urgent that was refused."""
    num_ended: int
    """Requests of this ingress that had ended by then, and those let through since."""
    until_s: float
    message: str


class KnownRoom:
    """What an ingress knows of the room in its routers' queues without asking them.

    Two things. Routers never hold more than ``max_requests``, so when this ingress alone has as many under
    way, they are full. And where a router has refused a tenant, its next request of the same or a less urgent
    priority is refused too until a request has ended: then one goes through for each that ended. Whatever
    could displace another request goes through to the routers: they are fair between tenants, this is not.

    Args:
        max_requests: that all routers together hold, running and waiting.
        monotonic: seconds; all time is read from it.
    """

    def __init__(self, max_requests: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.entrance = Entrance()
        """Calls there will be requests in a moment."""
        self._max_requests = max_requests
        self._monotonic = monotonic
        self._advice = RetryAdvice(random.Random(0))
        self._by_tenant: Counter[str] = Counter()
        self._by_priority: Counter[int] = Counter()
        self._num_requests = 0
        self._num_ended = 0
        self._ended_s: float | None = None
        self._refusals: dict[str, _Refusal] = {}

    @property
    def num_requests(self) -> int:
        """Under way to the routers, or there."""
        return self._num_requests

    @property
    def is_tight(self) -> bool:
        """Somebody might be refused."""
        return bool(self._refusals) or self._num_requests + self.entrance.num_calls >= self._max_requests

    def check(self, tenant: str, priority: int) -> None:
        """Raises OverloadedError for a request that a router would refuse."""
        num_others = self._num_requests + self.entrance.num_others
        if num_others >= self._max_requests and not self._may_displace(tenant, priority):
            reason = f"{num_others} requests are under way; allowed: {self._max_requests}"
            raise OverloadedError(reason, self._retry_after_s())
        refusal = self._refusals.get(tenant)
        if refusal is None or priority < refusal.priority or self._num_ended > refusal.num_ended:
            return
        # With none of ours under way nothing will end, and a question costs little.
        if self._num_requests and self._monotonic() < refusal.until_s:
            raise OverloadedError(refusal.message, self._retry_after_s())

    def begin(self, tenant: str, priority: int) -> None:
        """The request goes to a router; it has just been checked."""
        refusal = self._refusals.get(tenant)
        if refusal is not None and self._num_ended > refusal.num_ended:
            refusal.num_ended += 1
        elif refusal is not None:
            refusal.until_s = self._monotonic() + PROBE_S
        self._num_requests += 1
        self._by_tenant[tenant] += 1
        self._by_priority[priority] += 1

    def end(self, tenant: str, priority: int, refusal: OverloadedError | None) -> None:
        """It has come back, refused or not."""
        self._num_requests -= 1
        _count_down(self._by_tenant, tenant)
        _count_down(self._by_priority, priority)
        if refusal is None:
            self._observe_end()
            return
        if len(self._refusals) >= _MAX_TENANTS:
            self._refusals.clear()
        until_s = self._monotonic() + PROBE_S
        self._refusals[tenant] = _Refusal(priority, self._num_ended, until_s, refusal.message)

    def _may_displace(self, tenant: str, priority: int) -> bool:
        # Of those at the entrance nothing is known but how many they are.
        least_urgent = max(self._by_priority, default=0)
        has_less = self._by_tenant[tenant] + 1 < max(self._by_tenant.values(), default=0)
        return priority < least_urgent or (priority == least_urgent and has_less)

    def _observe_end(self) -> None:
        now = self._monotonic()
        self._num_ended += 1
        if self._ended_s is not None:
            self._advice.observe_service(now - self._ended_s)
        self._ended_s = now

    def _retry_after_s(self) -> float:
        return self._advice.after_s(self._num_requests)


def _count_down(counter: Counter[KeyT], key: KeyT) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


class RefusingClient:
    """interfaces.RouterClient that does not ask where the answer is known to be a refusal."""

    def __init__(self, client: RouterClient, room: KnownRoom) -> None:
        self._client = client
        self.room = room

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        with self._admitted(request):
            return await self._client.complete(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[OutputChunk, None]:
        """See interfaces.RouterClient."""
        with self._admitted(request):
            chunks = self._client.stream(request)
            try:
                async for chunk in chunks:
                    yield chunk
            finally:
                await close(chunks)

    async def service_info(self) -> ServiceInfo:
        """See interfaces.RouterClient."""
        return await self._client.service_info()

    async def check_ready(self) -> None:
        """See interfaces.RouterClient."""
        await self._client.check_ready()

    async def metrics_text(self) -> str:
        """See interfaces.RouterClient."""
        return await self._client.metrics_text()

    async def trace_text(self) -> str | None:
        """See interfaces.RouterClient."""
        return await self._client.trace_text()

    @contextmanager
    def _admitted(self, request: GenerateRequest) -> Iterator[None]:
        arrive()
        place = request.tenant, request.priority
        self.room.check(*place)
        self.room.begin(*place)
        refusal: OverloadedError | None = None
        try:
            yield
        except OverloadedError as error:
            refusal = error
            raise
        finally:
            self.room.end(*place, refusal)


def refusing(client: RouterClient, config: Config) -> RefusingClient:
    """The client in front of the routers of a service; one that refuses already is taken as it is."""
    if isinstance(client, RefusingClient):
        return client
    return RefusingClient(client, KnownRoom(max_requests(config)))


def max_requests(config: Config) -> int:
    """That all routers of a service together hold, running and waiting, when there are as many as may be."""
    router = config.router
    num_routers = router.num_replicas if router.autoscaling is None else router.autoscaling.max_replicas
    return num_routers * (config.target.max_num_seqs + router.max_queued_requests)
