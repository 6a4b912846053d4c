"""Serve's choice of a Router for each request; the only module that knows Serve's request routers (alpha).

Serve makes one ``PrefixRequestRouter`` for each handle of the Router deployment, and calls it on a loop of
its own. It copies this module by value into its processes: what they share is in ``routing.shared``.
"""

from __future__ import annotations

from typing import Any, Final

from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from specray.config import Config
from specray.requests import GenerateRequest, RouterLoad
from specray.routing import shared_choice

STATS_PERIOD_S: Final = 2.0
"""Seconds between two figures of a Router that nothing is heard of otherwise."""


class PrefixRequestRouter(RequestRouter):
    """Sends each request where ``SharedChoice`` says, or to the next best where Serve finds that one full."""

    def initialize_state(self, **kwargs: Any) -> None:
        self._shared = shared_choice(self.app_name)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        request = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(request, GenerateRequest):
            # Whoever answers: it is about the service.
            return [candidate_replicas]
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[replicas[name]] for name in self._shared.choose(request, tuple(replicas))]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        request = pending_request.args[0] if pending_request.args else None
        if isinstance(request, GenerateRequest):
            self._shared.on_elsewhere(request.request_id, replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        # Without a figure yet the statistics are empty.
        self._shared.on_routers(
            {
                each.replica_id.unique_id: RouterLoad(**each.routing_stats) if each.routing_stats else None
                for each in self.curr_replicas.values()
            }
        )


def routes_by_prefix(config: Config) -> bool:
    """Whether there may be several Routers, and requests go where their prefix is."""
    scaling = config.router.autoscaling
    most = config.router.num_replicas if scaling is None else scaling.max_replicas
    return config.router.routing == "prefix" and most > 1


def router_choice(config: Config) -> dict[str, Any]:
    """Options of the Router deployment for who chooses the Router of a request."""
    if not routes_by_prefix(config):
        return {}
    values: dict[str, Any] = {
        "request_router_class": f"{__name__}.{PrefixRequestRouter.__name__}",
        "request_routing_stats_period_s": STATS_PERIOD_S,
    }
    return {"request_router_config": RequestRouterConfig(**values)}
