"""How many drafts and routers there should be: policies for Serve's autoscaler, which applies their delays.

Serve copies this module into its controller, so it is pure and small; what the replicas measure comes to it
through ``record_autoscaling_stats``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from specray.config import DraftConfig, RouterConfig, ScalingConfig

IDLE_SHARE = 0.01
"""Drafts that are less busy together do nothing for anybody."""
DOWN_MARGIN = 0.8
"""Fewer replicas must do with this share of what more are started at, or they would come and go."""

Metrics = Mapping[str, Mapping[Hashable, float]]


class ScalingContext(Protocol):
    """What is used of ray.serve.config.AutoscalingContext."""

    @property
    def running_replicas(self) -> Sequence[Hashable]: ...
    @property
    def target_num_replicas(self) -> int: ...
    @property
    def aggregated_metrics(self) -> Metrics | None: ...


class DraftScalingPolicy:
    """As many drafts as keep each ``target_busy_share`` of its time at work."""

    def __init__(self, target_busy_share: float) -> None:
        self._target = target_busy_share

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        shares = _measured(context, "busy_share")
        if not shares:
            return context.target_num_replicas, {}
        return num_drafts(shares, _measured(context, "num_routers"), target=self._target), {}


class RouterScalingPolicy:
    """As many routers as have places for what runs, and one more for each ``target_queued_tokens``."""

    def __init__(self, target_queued_tokens: int) -> None:
        self._target = target_queued_tokens

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        occupancies = _measured(context, "occupancy")
        if not occupancies:
            return context.target_num_replicas, {}
        queued = _measured(context, "queued_tokens")
        return num_routers(occupancies, queued, target_queued_tokens=self._target), {}


def num_drafts(busy_shares: Sequence[float | None], routers: Sequence[float | None], *, target: float) -> int:
    """Drafts that are wanted.

    A router uses one draft at a time, so more drafts than routers help nobody. One that has not been heard of
    counts as busy as it should be: it says neither more nor fewer.

    Args:
        busy_shares: of each running draft, 0..1; None: not known.
        routers: that use it now.
        target: of each draft's time.
    """
    busy = sum(target if share is None else share for share in busy_shares)
    if busy < IDLE_SHARE:
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
    """Routers that are wanted, at least 1; one that has not been heard of counts as full.

    Args:
        occupancies: of each running router, the share of its places that is taken; None: not known.
        queued_tokens: prompt tokens that wait there.
        target_queued_tokens: the work of one more router.
    """
    running = sum(1.0 if share is None else share for share in occupancies)
    waiting = sum(filter(None, queued_tokens)) / target_queued_tokens
    return max(1, _with_hysteresis(len(occupancies), running + waiting))


def _with_hysteresis(num_now: int, load: float) -> int:
    """Replicas for a load, in units of what one takes: fewer than now only when they do with a margin."""
    wanted = math.ceil(round(load, 6))
    if wanted >= num_now:
        return wanted
    return min(num_now, math.ceil(round(load / DOWN_MARGIN, 6)))


def _measured(context: ScalingContext, name: str) -> list[float | None]:
    values = (context.aggregated_metrics or {}).get(name, {})
    return [values.get(replica) for replica in context.running_replicas]


def draft_replicas(draft: DraftConfig) -> dict[str, Any]:
    """Options of the Draft deployment that say how many replicas it has."""
    scaling = draft.autoscaling
    if scaling is None:
        return {"num_replicas": draft.num_replicas}
    kwargs = {"target_busy_share": scaling.target_busy_share}
    return _autoscaling(scaling, DraftScalingPolicy, kwargs)


def router_replicas(router: RouterConfig) -> dict[str, Any]:
    """Options of the Router deployment that say how many replicas it has."""
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
