"""Autoscaling policies for Serve: how many drafts and routers should run.

Serve copies this module into its controller, so it is pure and small, and applies the configured delays
itself. Replicas report their load by ``record_autoscaling_stats``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from specray.config import DraftConfig, RouterConfig, ScalingConfig

Metrics = Mapping[str, Mapping[Hashable, float]]


class ScalingContext(Protocol):
    """The used part of ray.serve.config.AutoscalingContext."""

    @property
    def running_replicas(self) -> Sequence[Hashable]: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def aggregated_metrics(self) -> Metrics | None: ...


class DraftScalingPolicy:
    """Scales drafts so that each is busy for ``target_busy_share`` of its time."""

    def __init__(self, target_busy_share: float) -> None:
        self._target = target_busy_share

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        shares = _measured(context, "busy_share")
        if not shares:
            return context.target_num_replicas, {}
        return num_drafts(shares, _measured(context, "num_routers"), target=self._target), {}


class RouterScalingPolicy:
    """Scales routers to the running sessions, plus one router per ``target_queued_tokens``."""

    def __init__(self, target_queued_tokens: int) -> None:
        self._target = target_queued_tokens

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        occupancies = _measured(context, "occupancy")
        if not occupancies:
            return context.target_num_replicas, {}
        queued = _measured(context, "queued_tokens")
        return num_routers(occupancies, queued, target_queued_tokens=self._target), {}


def num_drafts(busy_shares: Sequence[float | None], routers: Sequence[float | None], *, target: float) -> int:
    """Returns the wanted number of drafts.

    A router uses one draft at a time, so there are never more drafts than routers. A draft whose load is
    unknown counts as busy at the target share.

    Args:
        busy_shares: busy share of each running draft, 0..1; None: unknown.
        routers: number of routers that use each draft now.
        target: target busy share of a draft.
    """
    busy = sum(target if share is None else share for share in busy_shares)
    # Busy share, summed over drafts, below which they count as unused.
    if busy < 0.01:
        return 0
    wanted = max(1, _with_hysteresis(len(busy_shares), busy / target))
    if any(count is None for count in routers):
        return wanted
    return min(wanted, max(1, round(sum(filter(None, routers)))))


def num_routers(
    occupancies: Sequence[float | None],
    queued_tokens: Sequence[float | None],
    *,
    target_queued_tokens: int,
) -> int:
    """Returns the wanted number of routers, at least 1; one whose load is unknown counts as full.

    Args:
        occupancies: share of each running router's session places that is taken; None: unknown.
        queued_tokens: prompt tokens waiting at each router.
        target_queued_tokens: prompt tokens that justify one more router.
    """
    running = sum(1.0 if share is None else share for share in occupancies)
    waiting = sum(filter(None, queued_tokens)) / target_queued_tokens
    return max(1, _with_hysteresis(len(occupancies), running + waiting))


def _with_hysteresis(num_now: int, load: float) -> int:
    """Returns the replicas for a load, in units of one replica's; fewer than now only with a margin."""
    wanted = math.ceil(round(load, 6))
    if wanted >= num_now:
        return wanted
    # Hysteresis of scaling down: fewer replicas must be below this share of the target load.
    return min(num_now, math.ceil(round(load / 0.8, 6)))


def _measured(context: ScalingContext, name: str) -> list[float | None]:
    values = (context.aggregated_metrics or {}).get(name, {})
    return [values.get(replica) for replica in context.running_replicas]


def draft_replicas(draft: DraftConfig) -> dict[str, Any]:
    """Options of the Draft deployment for its number of replicas."""
    scaling = draft.autoscaling
    if scaling is None:
        return {"num_replicas": draft.num_replicas}
    kwargs = {"target_busy_share": scaling.target_busy_share}
    return _autoscaling(scaling, DraftScalingPolicy, kwargs)


def router_replicas(router: RouterConfig) -> dict[str, Any]:
    """Options of the Router deployment for its number of replicas."""
    scaling = router.autoscaling
    if scaling is None:
        return {"num_replicas": router.num_replicas}
    kwargs = {"target_queued_tokens": scaling.target_queued_tokens}
    return _autoscaling(scaling, RouterScalingPolicy, kwargs)


def _autoscaling(scaling: ScalingConfig, policy: type[object], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "upscale_delay_s": scaling.upscale_delay_s,
            "downscale_delay_s": scaling.downscale_delay_s,
            "look_back_period_s": scaling.look_back_s,
            "policy": {"policy_function": f"{__name__}:{policy.__name__}", "policy_kwargs": kwargs},
        }
    }
