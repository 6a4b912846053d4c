"""Standard gRPC health service (grpc.health.v1), for Kubernetes probes and grpc-health-probe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

LOOK_PERIOD_S = 5.0
"""Seconds between two looks while a client watches: the delay until a load balancer sees what has changed."""

Look = Callable[[], Awaitable[None]]
"""Finds out how a service is, and sets its status where that has changed."""


class _Servicer(health_aio.HealthServicer):  # type: ignore[misc]
    """Looks before it answers, and while it is watched; nobody asks, nobody looks."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look

    async def Check(self, request: object, context: object) -> object:
        await self._look()
        return await super().Check(request, context)

    async def Watch(self, request: object, context: object) -> None:
        looking = asyncio.create_task(self._look_for_ever())
        try:
            await super().Watch(request, context)
        finally:
            looking.cancel()

    async def _look_for_ever(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(LOOK_PERIOD_S)


class Health:
    """Health status of one service and, with the same value, of the whole server (service name "")."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._servicer: health_aio.HealthServicer | None = None
        self._is_serving = False

    @property
    def is_serving(self) -> bool:
        return self._is_serving

    async def attach(self, server: aio.Server, look: Look | None = None) -> None:
        """Adds the health service to a server before its start; the status is NOT_SERVING.

        Args:
            look: called when a client asks or watches; None: whoever knows sets the status.
        """
        self._servicer = health_aio.HealthServicer() if look is None else _Servicer(look)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self.set_serving(False)

    async def set_serving(self, is_serving: bool) -> None:
        self._is_serving = is_serving
        assert self._servicer is not None, "attach comes before"
        status = health_pb2.HealthCheckResponse.SERVING
        if not is_serving:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", self._service):
            await self._servicer.set(service, status)

    async def stop(self) -> None:
        """Sets NOT_SERVING for good and notifies watchers."""
        self._is_serving = False
        assert self._servicer is not None, "attach comes before"
        await self._servicer.enter_graceful_shutdown()
