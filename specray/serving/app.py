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

from ray.serve import Application

from specray.actors.models.deployment import models_deployment
from specray.actors.pair import bind_pair, draft_cpus, router_cpus
from specray.config import Config, parse_config
from specray.serving.ingress import ingress_deployment

NUM_CPUS_PER_INGRESS = 0.1


def build_app(args: dict[str, Any] | Config) -> Application:
    """Binds Ingress -> Router -> Draft for one configuration. Serve wants a builder of one parameter.

    Raises:
        ConfigError: a key is unknown or a value is not allowed.
    """
    return bind_app(args if isinstance(args, Config) else parse_config(args), store=None)


def bind_app(config: Config, *, store: str | None) -> Application:
    """Binds Ingress -> Router -> Draft; of several models, Ingress -> Models, which deploys their pairs.

    Args:
        store: key of the live values that ``specray reload`` keeps; None: ``user_config`` alone brings them.
    """
    values = config.model_dump(mode="json")
    behind = models_deployment().bind(values, store) if config.models else bind_pair(config, store=store)
    return ingress_deployment(config, num_cpus=NUM_CPUS_PER_INGRESS).bind(values, behind, store)


def num_cpus(config: Config) -> float:
    """Returns the most logical CPUs that all replicas together ask Ray for."""
    alone = [config.of_model(each.name) for each in config.models] or [config]
    drafts = [config.of_pool(each.name) for each in config.drafts]
    drafts += (
        [pair for pair, model in zip(alone, config.models, strict=True) if model.draft.pool is None]
        if config.models
        else alone
    )
    return (
        NUM_CPUS_PER_INGRESS * config.ingress.num_replicas
        + sum(map(router_cpus, alone))
        + sum(map(draft_cpus, drafts))
    )
