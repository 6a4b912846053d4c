"""The Draft deployment: one draft with its gRPC server per replica, leased by Routers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group

from specray.actors.drafts.group import DraftGroup
from specray.actors.live import LiveReplica
from specray.actors.node import keep_serve_on_loopback
from specray.actors.targets.group import PlacedRanks
from specray.actors.targets.ranks import DraftRank
from specray.actors.telemetry import begin_logs, shown_by_node
from specray.config import Config, parse_config
from specray.config.live import LiveConfig
from specray.environment import apply_rank_environment, apply_thread_environment
from specray.errors import ConfigError, EngineLostError
from specray.telemetry.draft import DraftMetrics

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""Seconds that a stopping draft, or one that changes its model, still serves routers looking for another."""
UNJUDGED_S = 20.0
"""Seconds after start in which a draft reports no busy share. It starts idle, since routers look for a draft
every few seconds and replicas report every 10; judged by that it would be removed again at once: with a
downscale_delay_s of 1, six replicas came and went in 85 s of load."""


@dataclass(frozen=True, slots=True)
class DraftLease:
    """Address and load of a draft, as offered to a Router."""

    replica_id: str
    node_id: str
    pid: int
    address: str
    """Address of the replica's DraftService: ``unix:/path`` or ``host:port``."""
    num_routers: int = 0
    """Routers that use it now."""
    busy_share: float = 0.0
    """Share of the last seconds in which it computed, 0..1."""


class DraftReplica:
    """A Serve replica around a draft. Calls through Serve only lease it; tokens go over gRPC.

    ``reconfigure`` loads the engine. Serve calls it after the constructor, and again when the deployment's
    ``user_config`` changes: so a running service changes its draft model one replica at a time, and routers
    merely move from one draft to another.
    """

    def __init__(self, values: dict[str, Any], store: str | None = None) -> None:
        keep_serve_on_loopback()
        config = parse_config(values)
        if config.draft.tensor_parallel_size > 1:
            apply_rank_environment(config.rpc)
        else:
            apply_thread_environment()
        live = LiveConfig(config)
        begin_logs(live.now)
        live.listen(begin_logs)
        self._live = LiveReplica(live, store=store)
        self._metrics = DraftMetrics()
        self._values = values
        self._group: DraftGroup | None = None
        self._retiring: set[asyncio.Task[None]] = set()
        self._loaded_s = 0.0

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Loads the draft that the configuration names.

        An earlier draft serves until the new one is loaded. With several ranks it ends before, since a
        process can be in one group at a time and the new ranks need its resources.

        Args:
            user_config: ``{"draft": {...}}``: values that override the service's own configuration; beside
                them live values, of which a draft takes those of ``logging``.

        Raises:
            ConfigError: a value or the model is wrong. Serve then replaces the replica.
            EngineLostError: the model was not loaded in time.
        """
        await self._live.reconfigure({name: part for name, part in user_config.items() if name != "draft"})
        config = self._merge(user_config.get("draft") or {})
        before = self._group
        if before is not None and config == before.config:
            return
        followers = None
        if config.draft.tensor_parallel_size > 1:
            followers = place_followers(config)
            if before is not None:
                # Requests for a lease are refused meanwhile.
                self._group = None
                await before.stop(drain_s=DRAIN_S)
        group = DraftGroup(config, followers)
        await group.start()
        self._group, self._loaded_s = group, time.monotonic()
        if before is None:
            return
        logger.info("the draft is %s from now on", config.draft.model)
        if followers is None:
            task = asyncio.create_task(before.stop(drain_s=DRAIN_S))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def reload(self, values: dict[str, Any]) -> str:
        return await self._live.take(values)

    async def lease(self) -> DraftLease:
        """Address and load of this replica's engine. Raises EngineLostError while it cannot work."""
        group = self._group
        if group is None:
            raise EngineLostError("the draft is not loaded yet")
        if not group.can_be_leased:
            raise EngineLostError("the draft hangs or has lost a rank")
        context = ray.get_runtime_context()
        return DraftLease(
            replica_id=context.get_actor_id() or "",
            node_id=context.get_node_id(),
            pid=os.getpid(),
            address=group.address,
            num_routers=group.server.num_routers,
            busy_share=group.server.busy_share,
        )

    @shown_by_node
    async def metrics_text(self) -> str:
        return self._metrics.text(None if self._group is None else self._group.server.info)

    async def memory_bytes(self) -> int:
        """See DraftGroup; 0: no model is loaded."""
        return 0 if self._group is None else await self._group.memory_bytes()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for ``scaling.DraftScalingPolicy``; without the busy share at first, see UNJUDGED_S."""
        group = self._group
        if group is None:
            return {}
        load = {"num_routers": float(group.server.num_routers)}
        if time.monotonic() - self._loaded_s >= UNJUDGED_S:
            load["busy_share"] = group.server.busy_share
        return load

    async def check_health(self) -> None:
        """Cheap liveness check, see ``DraftGroup.check``. Raises EngineLostError."""
        if self._group is not None:
            await self._group.check()

    async def __del__(self) -> None:
        # Serve awaits this before it ends the process.
        group = getattr(self, "_group", None)
        if group is not None:
            await group.stop(drain_s=DRAIN_S)

    def _merge(self, changed: dict[str, Any]) -> Config:
        size = self._values["draft"].get("tensor_parallel_size", 1)
        if changed.get("tensor_parallel_size", size) != size:
            raise ConfigError(
                f"user_config of Draft has draft.tensor_parallel_size {changed['tensor_parallel_size']}; "
                f"allowed: {size}, for which the deployment has room; args can change it"
            )
        return parse_config({**self._values, "draft": {**self._values["draft"], **changed}})


def place_followers(config: Config) -> PlacedRanks:
    placement_group = get_current_placement_group()
    assert placement_group is not None, "a Draft of several ranks has a placement group"
    return PlacedRanks(config, DraftRank, placement_group)
