"""The deployments of one pair, to be bound: Router -> Draft, each with its placement."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from specray.actors.drafts.deployment import DRAIN_S, DraftReplica
from specray.actors.router import RouterReplica
from specray.actors.routing import router_choice
from specray.actors.scaling import draft_replicas, router_replicas
from specray.actors.targets.placement import actor_options, place_draft, place_group, rank_bundle, ray_nodes
from specray.config import Config

NUM_CPUS_PER_ROUTER = 0.1
_CARE: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "health_check_period_s": 1,
        # After three failures in a row a replica is replaced: 18 s for one that hangs.
        "health_check_timeout_s": 5,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 3,
    }
)
"""Options by which Serve watches, ends and replaces the replicas of a pair."""
STOP_MARGIN_S = 5.0
"""Seconds that a Router needs to stop once its requests have ended, or their time is over."""


def bind_pair(
    config: Config, *, store: str | None, draft: DeploymentHandle[DraftReplica] | None = None
) -> Application:
    """Binds Router -> Draft.

    Args:
        store: key of the live values that ``specray reload`` keeps; None: ``user_config`` alone brings them.
        draft: the Draft of a pool, in place of one of its own.
    """
    values = config.model_dump(mode="json")
    own = None
    if draft is None and config.draft.has_replicas:
        own = draft_deployment(config).bind(values, store)
    return router_deployment(config).bind(values, draft or own, store)


def router_cpus(config: Config) -> float:
    """Returns the most logical CPUs that Routers and their ranks ask Ray for."""
    scaling = config.router.autoscaling
    num_routers = config.router.num_replicas if scaling is None else scaling.max_replicas
    ranks = rank_bundle(config.target)["CPU"]
    each = NUM_CPUS_PER_ROUTER + ranks * config.target.tensor_parallel_size
    return float(num_routers * each)


def draft_cpus(config: Config) -> float:
    """Returns the most logical CPUs that a draft's replicas ask Ray for."""
    cpus = rank_bundle(config.draft)["CPU"] * config.draft.tensor_parallel_size
    return float(cpus * config.draft.most_replicas)


def draft_deployment(config: Config) -> serve.Deployment:
    """The Draft, to be bound."""
    return serve.deployment(
        name="Draft",
        **draft_replicas(config.draft),
        # A rolling upgrade of the draft changes the user_config of this deployment, and leaves the others
        # alone.
        user_config={"draft": {}},
        **_draft_placement(config),
        **_CARE,
        max_ongoing_requests=64,
        graceful_shutdown_timeout_s=DRAIN_S + STOP_MARGIN_S,
    )(DraftReplica)


def _draft_placement(config: Config) -> dict[str, Any]:
    if config.draft.tensor_parallel_size == 1:
        own = {key: amount for key, amount in actor_options(rank_bundle(config.draft)).items() if amount}
        return {"ray_actor_options": {**own, **config.draft.ray_actor_options}}
    group = place_draft(config.draft, nodes=ray_nodes())
    return {
        # The replica itself is rank 0.
        "ray_actor_options": actor_options(group.bundles[0]),
        "placement_group_bundles": group.bundles,
        "placement_group_strategy": group.strategy,
        "placement_group_bundle_label_selector": group.label_selectors,
    }


def router_deployment(config: Config) -> serve.Deployment:
    group = place_group(config.target, router_cpus=NUM_CPUS_PER_ROUTER, nodes=ray_nodes())
    return serve.deployment(
        name="Router",
        **router_replicas(config.router),
        **router_choice(config),
        # Serve calls ``reconfigure`` at the start only where there is one.
        user_config={},
        ray_actor_options={"num_cpus": NUM_CPUS_PER_ROUTER},
        placement_group_bundles=group.bundles,
        placement_group_strategy=group.strategy,
        placement_group_bundle_label_selector=group.label_selectors,
        # The Router's own bounded queue refuses requests, with a reason and a Retry-After.
        max_ongoing_requests=100_000,
        **_CARE,
        graceful_shutdown_timeout_s=config.router.drain_timeout_s + STOP_MARGIN_S,
    )(RouterReplica)
