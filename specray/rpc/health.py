"""Standard gRPC health service (grpc.health.v1), for Kubernetes probes and grpc-health-probe."""

from __future__ import annotations

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio


class Health:
    """Health status of one service and, with the same value, of the whole server (service name "")."""

    def __init__(self, service: str) -> None:
        self._service = service
        self._servicer = health_aio.HealthServicer()
        self._is_serving = False

    @property
    def is_serving(self) -> bool:
        return self._is_serving

    async def attach(self, server: aio.Server) -> None:
        """Adds the health service to a server before its start; the status is NOT_SERVING."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        await self.set_serving(False)

    async def set_serving(self, is_serving: bool) -> None:
        self._is_serving = is_serving
        status = health_pb2.HealthCheckResponse.SERVING
        if not is_serving:
            status = health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", self._service):
            await self._servicer.set(service, status)

    async def stop(self) -> None:
        """Sets NOT_SERVING for good and notifies watchers."""
        self._is_serving = False
        await self._servicer.enter_graceful_shutdown()
