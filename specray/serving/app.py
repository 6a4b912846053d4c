"""Builds the Ray Serve application: the only place that binds deployments to each other.

``build_app`` is what ``serve run``, ``serve deploy`` and ``specray serve`` all call, with the same
configuration::

    applications:
    - name: specray
      route_prefix: /
      import_path: specray.serving.app:build_app
      args: {target: {model: ...}, draft: {model: ...}}
      deployments:
      - {name: Router, user_config: {speculation: {num_speculative_tokens: 4}}}

A change of ``args`` starts every replica anew; one of ``user_config`` takes effect while they serve. The keys
that it may have are those of ``config.live``.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from specray.actors.drafts.deployment import DRAIN_S, DraftReplica
from specray.actors.router import RouterReplica
from specray.actors.routing import router_choice
from specray.actors.scaling import draft_replicas, router_replicas
from specray.actors.targets.placement import actor_options, place_draft, place_group, rank_bundle, ray_nodes
from specray.config import Config, parse_config
from specray.serving.ingress import ingress_deployment

NUM_CPUS_PER_INGRESS = 0.1
NUM_CPUS_PER_ROUTER = 0.1
STOP_MARGIN_S = 5.0
"""Seconds that a Router needs to stop once its requests have ended, or their time is over."""


def build_app(args: dict[str, Any] | Config) -> Application:
    """Binds Ingress -> Router -> Draft for one configuration. Serve wants a builder of one parameter.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
    """
    return bind_app(args if isinstance(args, Config) else parse_config(args), store=None)


def bind_app(config: Config, *, store: str | None) -> Application:
    """Binds Ingress -> Router -> Draft.

    Args:
        store: key of the live values that ``specray reload`` keeps; None: ``user_config`` alone brings them.
    """
    values = config.model_dump(mode="json")
    draft = draft_deployment(config).bind(values, store) if config.draft.has_replicas else None
    router = _router_deployment(config).bind(values, draft, store)
    return ingress_deployment(config, num_cpus=NUM_CPUS_PER_INGRESS).bind(values, router, store)


def num_cpus(config: Config) -> float:
    """Returns the most logical CPUs that all replicas together ask Ray for."""
    draft = rank_bundle(config.draft)["CPU"] * config.draft.tensor_parallel_size * config.draft.most_replicas
    scaling = config.router.autoscaling
    num_routers = config.router.num_replicas if scaling is None else scaling.max_replicas
    ranks = rank_bundle(config.target)["CPU"]
    return float(
        NUM_CPUS_PER_INGRESS * config.ingress.num_replicas
        + draft
        + num_routers * (NUM_CPUS_PER_ROUTER + ranks * config.target.tensor_parallel_size)
    )


def draft_deployment(config: Config) -> serve.Deployment:
    """The Draft, to be bound."""
    return serve.deployment(
        name="Draft",
        **draft_replicas(config.draft),
        # A rolling upgrade of the draft changes the user_config of this deployment, and leaves the others
        # alone.
        user_config={"draft": {}},
        **_draft_placement(config),
        max_ongoing_requests=64,
        health_check_period_s=1,
        # After three failures in a row a replica is replaced: 18 s for one that hangs. Its loop has nothing
        # else to do.
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=DRAIN_S + STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
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


def _router_deployment(config: Config) -> serve.Deployment:
    group = place_group(config.target, router_cpus=NUM_CPUS_PER_ROUTER, nodes=ray_nodes())
    drain_s = config.router.drain_timeout_s
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
        health_check_period_s=1,
        # After three failures in a row a replica is replaced: 18 s for one that hangs.
        health_check_timeout_s=5,
        graceful_shutdown_timeout_s=drain_s + STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
    )(RouterReplica)
