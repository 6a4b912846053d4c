"""The Draft deployment: one draft engine and one gRPC server per replica, leased by Routers."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any

import ray

from specray.actors.node import keep_serve_on_loopback, listen_address
from specray.actors.telemetry import begin_logs, with_labels
from specray.config import Config, parse_config
from specray.errors import ConfigError, EngineLostError
from specray.metrics import DraftMetrics
from specray.rpc.worker import EngineServerThread

logger = logging.getLogger(__name__)

DRAIN_S = 5.0
"""A draft that ends, or gets another model, serves its routers so long while they look for another."""
GRACE_S = 1.0
MAX_CALL_S = 60.0
"""An engine call that lasts so long never ends: its size is bounded, and it should take milliseconds."""


@dataclass(frozen=True, slots=True)
class DraftLease:
    """Where a Router reaches a draft, and how much that has to do."""

    replica_id: str
    node_id: str
    pid: int
    address: str
    """Of the replica's DraftService: ``unix:/path`` or ``host:port``."""
    num_routers: int = 0
    """That use it now."""
    busy_share: float = 0.0
    """Of the last seconds, how much it computed: 0..1."""


class DraftReplica:
    """A Serve replica around a draft worker. Calls through Serve only lease; tokens go over gRPC.

    The engine is loaded by ``reconfigure``, which Serve calls after the constructor, and again when the
    deployment's ``user_config`` changes: so a service that runs gets another draft model, one replica after
    the other, and neither its routers nor their targets notice more than a move.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        keep_serve_on_loopback()
        begin_logs(parse_config(values))
        self._metrics = DraftMetrics()
        self._values = values
        self._config: Config | None = None
        self._server: EngineServerThread | None = None
        self._address = ""
        self._retiring: set[asyncio.Task[None]] = set()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Loads the draft that the configuration names; one that serves already does so until then.

        Args:
            user_config: ``{"draft": {...}}``: values that take the place of those of the service's own
                configuration.

        Raises:
            ConfigError: a value is wrong, or the model is. Serve then replaces the replica.
            EngineLostError: the model was not loaded in time.
        """
        from specray.actors.workers import start_draft

        config = self._merge(user_config)
        if config == self._config:
            return
        server, address = await asyncio.to_thread(
            start_draft, config, address=listen_address(config, "draft")
        )
        before, self._server = self._server, server
        self._config, self._address = config, address
        if before is not None:
            logger.info("the draft is %s from now on", config.draft.model)
            task = asyncio.create_task(asyncio.to_thread(before.stop, grace_s=GRACE_S, drain_s=DRAIN_S))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def lease(self) -> DraftLease:
        """The way to this replica's engine, and its load. Raises EngineLostError before it is loaded."""
        server = self._server
        if server is None:
            raise EngineLostError("the draft is not loaded yet")
        context = ray.get_runtime_context()
        return DraftLease(
            replica_id=context.get_actor_id() or "",
            node_id=context.get_node_id(),
            pid=os.getpid(),
            address=self._address,
            num_routers=server.num_routers,
            busy_share=server.busy_share,
        )

    async def metrics_text(self) -> str:
        """This replica's metrics, with its labels."""
        server = self._server
        return with_labels(self._metrics.text(None if server is None else server.info))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """For ``scaling.DraftScalingPolicy``."""
        server = self._server
        if server is None:
            return {"busy_share": 0.0, "num_routers": 0.0}
        return {"busy_share": server.busy_share, "num_routers": float(server.num_routers)}

    async def check_health(self) -> None:
        """Liveness, cheap: the server is there, and its engine works and gets on. Raises EngineLostError."""
        server = self._server
        if server is None:
            return
        if not server.is_alive:
            raise EngineLostError("the draft's engine is broken")
        if server.call_s > MAX_CALL_S:
            raise EngineLostError(f"the draft's engine has not ended a call for {MAX_CALL_S:g} s")

    async def __del__(self) -> None:
        # Serve awaits this before it ends the replica's process.
        server = getattr(self, "_server", None)
        if server is not None:
            await asyncio.to_thread(server.stop, grace_s=GRACE_S, drain_s=DRAIN_S)

    def _merge(self, user_config: dict[str, Any]) -> Config:
        unknown = sorted(user_config.keys() - {"draft"})
        if unknown:
            raise ConfigError(f"user_config of Draft has {', '.join(unknown)}; allowed: draft")
        changed = user_config.get("draft") or {}
        return parse_config({**self._values, "draft": {**self._values["draft"], **changed}})
