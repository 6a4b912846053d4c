"""Refuses requests at the ingress that a router would refuse, without asking it.

An ingress learns the state of the routers' queues from the answers that pass through it.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from specray.config import Config
from specray.errors import OverloadedError
from specray.interfaces import AdapterManager, RouterClient
from specray.requests import GenerateRequest
from specray.router.admission.queue import RetryAdvice
from specray.serving.adapters import AdapterCatalog, AdapterStore
from specray.serving.admission.limiter import CallLimiter, release_slot
from specray.serving.admission.places import Places
from specray.serving.admission.texts import TextWork

PROBE_S = 0.5
"""Seconds for which a tenant's refusal is believed if no request of this ingress ends; a request of another
ingress may have ended meanwhile."""
_MAX_TENANTS = 1024

KeyT = TypeVar("KeyT", str, int)


@dataclass(slots=True)
class _Refusal:
    priority: int
    """Most urgent priority that was refused."""
    num_ended: int
    """Requests of this ingress that had ended at the refusal, plus those let through since."""
    until_s: float
    message: str


class RouterCapacity:
    """Free capacity of the routers' queues, as far as one ingress knows it without asking.

    It refuses in two cases. All routers together hold ``max_requests``: if this ingress alone has that many
    under way, they are full. And after a router has refused a tenant, the tenant's next request of the same
    or a less urgent priority is refused too, until a request ends; then one is let through for each that
    ended. A request that might displace another one always goes to the routers: they are fair between
    tenants, an ingress is not.

    Args:
        max_requests: requests that all routers together hold, running and waiting.
        monotonic: clock in seconds; all time is read from it.
    """

    def __init__(self, max_requests: int, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.limiter = CallLimiter()
        """Calls that will become requests in a moment."""
        self._max_requests = max_requests
        self._monotonic = monotonic
        self._advice = RetryAdvice(random.Random(0))
        self._by_tenant: Counter[str] = Counter()
        self._by_priority: Counter[int] = Counter()
        self._num_requests = 0
        self._num_ended = 0
        self._ended_s: float | None = None
        self._refusals: dict[str, _Refusal] = {}

    def set_max_requests(self, max_requests: int) -> None:
        self._max_requests = max_requests

    @property
    def num_requests(self) -> int:
        """Requests on their way to the routers, or there."""
        return self._num_requests

    @property
    def may_refuse(self) -> bool:
        return bool(self._refusals) or self._num_requests + self.limiter.num_calls >= self._max_requests

    def check(self, tenant: str, priority: int) -> None:
        """Raises OverloadedError for a request that a router would refuse."""
        num_others = self._num_requests + self.limiter.num_others
        if num_others >= self._max_requests and not self._may_displace(tenant, priority):
            reason = f"{num_others} requests are under way; allowed: {self._max_requests}"
            raise OverloadedError(reason, self._retry_after_s())
        refusal = self._refusals.get(tenant)
        if refusal is None or priority < refusal.priority or self._num_ended > refusal.num_ended:
            return
        # If no request of this ingress is under way, none will end; and asking a router costs little then.
        if self._num_requests and self._monotonic() < refusal.until_s:
            raise OverloadedError(refusal.message, self._retry_after_s())

    def begin(self, tenant: str, priority: int) -> None:
        """Notes that a request, whose call was checked, goes to a router."""
        refusal = self._refusals.get(tenant)
        if refusal is not None and self._num_ended > refusal.num_ended:
            refusal.num_ended += 1
        elif refusal is not None:
            refusal.until_s = self._monotonic() + PROBE_S
        self._num_requests += 1
        self._by_tenant[tenant] += 1
        self._by_priority[priority] += 1

    def end(self, tenant: str, priority: int, refusal: OverloadedError | None) -> None:
        """Notes that a request has come back, refused or not."""
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
        # Tenant and priority of calls that are still being prepared are not known, only their number.
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


class Admission:
    """Stands before the routers in one Ingress, for all its endpoints.

    Attributes:
        routers: the client of the routers.
        capacity: what is known of the routers' queues.
        places: the Ingress's own places for calls.
        texts: its threads for texts.
        adapters: the adapters that requests may name.
    """

    def __init__(
        self,
        routers: RouterClient,
        capacity: RouterCapacity,
        places: Places,
        adapters: AdapterCatalog,
        texts: TextWork | None = None,
    ) -> None:
        self.routers = routers
        self.capacity = capacity
        self.places = places
        self.adapters = adapters
        self.texts = texts or TextWork()
        self._to_models: list[Admission] = []

    @classmethod
    def of(
        cls, routers: RouterClient | Admission, config: Config, *, store: AdapterStore | None = None
    ) -> Admission:
        """Returns the admission to these routers; one that exists already, as it is.

        Args:
            store: of the names of adapters; default: one of this process alone.
        """
        if isinstance(routers, Admission):
            return routers
        places = Places(config.ingress.max_ongoing_requests, timeout_s=config.router.request_timeout_s)
        adapters = _adapters(routers, config, store)
        return cls(routers, RouterCapacity(max_requests(config)), places, adapters)

    def to_model(
        self, routers: RouterClient, config: Config, *, store: AdapterStore, aliases: Sequence[str]
    ) -> Admission:
        """The admission to one of several models, which shares places and threads with the others."""
        adapters = _adapters(routers, config, store, aliases)
        made = Admission(routers, RouterCapacity(max_requests(config)), self.places, adapters, self.texts)
        self._to_models.append(made)
        return made

    @property
    def num_requests(self) -> int:
        """Requests on their way to the routers, or there."""
        return self.capacity.num_requests + sum(each.num_requests for each in self._to_models)

    @contextmanager
    def entered(self, request: GenerateRequest) -> Iterator[None]:
        """Counts a request, whose call was checked, while it is with a router; it leaves its slot here."""
        release_slot()
        standing = request.tenant, request.priority
        self.capacity.begin(*standing)
        refusal: OverloadedError | None = None
        try:
            yield
        except OverloadedError as error:
            refusal = error
            raise
        finally:
            self.capacity.end(*standing, refusal)


def _adapters(
    routers: RouterClient, config: Config, store: AdapterStore | None, aliases: Sequence[str] = ()
) -> AdapterCatalog:
    return AdapterCatalog(
        config.target.adapters,
        base=config.model_name,
        aliases=aliases,
        loader=routers if isinstance(routers, AdapterManager) else None,
        store=store,
        is_shared=config.ingress.num_replicas > 1,
    )


def max_requests(config: Config) -> int:
    router = config.router
    num_routers = router.num_replicas if router.autoscaling is None else router.autoscaling.max_replicas
    return num_routers * (config.target.max_num_seqs + router.max_queued_requests)
