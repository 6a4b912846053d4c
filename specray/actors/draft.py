"""The Draft deployment: one draft engine and one gRPC server per replica, leased by Routers."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

import ray

from specray.actors.node import keep_serve_on_loopback, listen_address
from specray.config import parse_config
from specray.errors import EngineLostError


@dataclass(frozen=True, slots=True)
class DraftLease:
    """Where a Router reaches the draft that it was given."""

    replica_id: str
    node_id: str
    pid: int
    address: str
    """Of the replica's DraftService: ``unix:/path`` or ``host:port``."""


class DraftReplica:
    """A Serve replica around a draft worker. Calls through Serve only lease; tokens go over gRPC."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(self, values: dict[str, Any]) -> None:  # type: ignore[misc]
        from ray import serve

        from specray.actors.workers import start_draft

        config = parse_config(values)
        keep_serve_on_loopback()
        self._server, address = await asyncio.to_thread(
            start_draft, config, address=listen_address(config, "draft")
        )
        self._lease = DraftLease(
            replica_id=serve.get_replica_context().replica_id.unique_id,
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
            address=address,
        )

    async def lease(self) -> DraftLease:
        """The way to this replica's engine. Serve chose the replica."""
        return self._lease

    async def check_health(self) -> None:
        """Liveness, cheap: the server and its engine are there. Raises EngineLostError."""
        if not self._server.is_alive:
            raise EngineLostError("the draft's engine is broken")

    async def __del__(self) -> None:
        # Serve awaits this before it ends the replica's process.
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.stop)
