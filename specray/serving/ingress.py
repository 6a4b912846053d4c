"""The Ingress deployment: HTTP through Serve's proxy or its own server, gRPC through its own server.

Serve's gRPC proxy has no TLS, no interceptors and no standard health service, and reports bytes that do not
parse as INTERNAL. The server in ``specray.rpc.inference.server`` has all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from specray.actors.live import LiveReplica
from specray.actors.mailbox import Mailbox
from specray.actors.node import keep_serve_on_loopback, listen_address
from specray.actors.router import RouterReplica
from specray.actors.telemetry import begin_logs, begin_traces, shown_by_node
from specray.config import Config, parse_config
from specray.config.live import LiveConfig, Served
from specray.errors import ConfigError
from specray.loading.owner import ModelUse
from specray.rpc.channel import ChannelOptions, channel_options, check_can_listen, parse_address
from specray.rpc.inference.messages import MAX_OPEN_CALLS
from specray.rpc.inference.server import InferenceServer
from specray.serving.admission.api_keys import Keyring
from specray.serving.behind import Behind, OnePair, Parts, SeveralModels
from specray.serving.gc_schedule import Collector
from specray.serving.grpc.handler import served
from specray.serving.http.edge.connections import Connections
from specray.serving.http.server import PORT_WAIT_S, HttpServer
from specray.serving.observe import CallObserver
from specray.serving.ports import claimed

STOP_MARGIN_S = 10.0


def ingress_deployment(config: Config, *, num_cpus: float) -> serve.Deployment:
    """Returns the deployment whose replicas serve both endpoints; not yet bound to its arguments."""
    deployment: serve.Deployment = serve.deployment(
        name="Ingress",
        num_replicas=config.ingress.num_replicas,
        # Serve calls ``reconfigure`` at the start only where there is one.
        user_config={},
        ray_actor_options={"num_cpus": num_cpus, **config.ingress.ray_actor_options},
        max_ongoing_requests=config.ingress.max_ongoing_requests,
        # A call that waits in a proxy is invisible; so the proxy refuses it, as this process would.
        max_queued_requests=config.ingress.max_queued_requests,
        backpressure_config={"status_code": 429, "retry_after_s": 1.0},
        health_check_period_s=1,
        # After three failures in a row a replica is replaced: 15 s for one that hangs, 30 until another
        # serves.
        health_check_timeout_s=4,
        # Longer than the Router's, which ends what it does not finish with a message.
        graceful_shutdown_timeout_s=config.router.drain_timeout_s + STOP_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
    )(serve.ingress()(IngressReplica))
    return deployment


class IngressReplica:
    """A Serve replica in front of the Routers, with an HTTP application and a gRPC server."""

    def __init__(
        self, values: dict[str, Any], _: DeploymentHandle[RouterReplica], store: str | None = None
    ) -> None:
        config = self._config = parse_config(values)
        keep_serve_on_loopback()
        begin_logs(config)
        self._now = LiveConfig(config)
        self._now.listen(begin_logs)
        self._live = LiveReplica(self._now, store=store)
        self._store = store
        self._tracing = begin_traces(config, role="ingress")
        self._mailbox = Mailbox(listen_address(config, "ingress"), options=channel_options(config.rpc))
        parts = Parts(
            self._now,
            self._mailbox,
            CallObserver(config.logging, tracing=self._tracing),
            Keyring(config.auth),
            serve.get_replica_context().app_name,
            store,
        )
        self._behind: Behind = SeveralModels(parts) if config.models else OnePair(parts)
        self._has_http_server = config.http.server == "ingress"

    @property
    def _shares_ports(self) -> bool:
        return self._config.ingress.num_replicas > 1

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._behind.http_app(
            self._lifespan,
            # Serve's proxy sets the header, where there is one.
            names_answers=self._has_http_server,
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Takes the live values of ``user_config``, see LiveReplica. Calls under way go on.

        Serve calls it before it routes any call here. The first time the servers start, since only now the
        keys are known that are in force. Raises ConfigError.
        """
        await self._live.reconfigure(user_config)
        await self._servers.start()

    async def check_health(self) -> None:
        """Answers: Serve calls it on the event loop of the endpoints, and replaces a replica that hangs."""

    async def reload(self, values: dict[str, Any]) -> str:
        """Takes live values and returns their digest. Raises ConfigError; nothing has changed then."""
        return await self._live.take(values)

    async def served(self) -> Served:
        return Served(self._now.now.model_dump(mode="json"), self._store, self._behind.deployments)

    async def named_ends(self) -> str:
        return self._behind.named_ends()

    async def model_usage(self) -> dict[str, ModelUse]:
        """See ``owner.Ingresses``; of this one."""
        return self._several.catalog.uses.usage()

    async def close_model(self, name: str, is_forced: bool) -> bool:
        """See ``owner.Ingresses``; of this one."""
        return self._several.catalog.uses.close(name, is_forced=is_forced)

    @property
    def _several(self) -> SeveralModels:
        assert isinstance(self._behind, SeveralModels), "only Models asks for uses"
        return self._behind

    @shown_by_node
    async def metrics_text(self) -> str:
        return self._behind.observer.metrics.text()

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self._tracing is not None:
                stack.push_async_callback(asyncio.to_thread, self._tracing.close)
            stack.push_async_callback(self._mailbox.stop)
            await self._mailbox.start()
            self._servers = IngressServers(self._start_grpc, partial(self._start_http, app))
            stack.push_async_callback(self._servers.stop)
            collector = asyncio.create_task(Collector(lambda: self._behind.admission.places.num_calls).run())
            stack.callback(collector.cancel)
            yield

    async def _start_grpc(self, stack: AsyncExitStack) -> None:
        grpc = self._config.grpc
        if grpc.port:
            grace_s = self._config.router.drain_timeout_s
            self._claim(stack, "grpc.port", grpc.host, grpc.port)
            if not self._shares_ports:
                await _wait_for_port("grpc.port", f"{grpc.host}:{grpc.port}")
            await stack.enter_async_context(
                served(self._grpc_server(), self._behind.admission.routers, grace_s=grace_s)
            )

    async def _start_http(self, app: FastAPI, stack: AsyncExitStack) -> None:
        if self._has_http_server:
            self._claim(stack, "http.port", self._config.http.host, self._config.http.port)
            server = self._http_server(app)
            stack.push_async_callback(server.stop)
            await server.start()

    def _claim(self, stack: AsyncExitStack, field: str, host: str, port: int) -> None:
        service = self._store
        if service is None:
            app = f"{ray.get_runtime_context().gcs_address} {serve.get_replica_context().app_name}"
            service = hashlib.sha256(app.encode()).hexdigest()[:16]
        stack.enter_context(claimed(field, host, port, service=service))

    def _http_server(self, app: FastAPI) -> HttpServer:
        config = self._config
        return HttpServer(
            app,
            host=config.http.host,
            port=config.http.port,
            connections=Connections(config.http.max_connections),
            shares_port=self._shares_ports,
            grace_s=config.router.drain_timeout_s,
        )

    def _grpc_server(self) -> InferenceServer:
        config, handler = self._config, self._behind.grpc_handler()
        return InferenceServer(
            handler,
            address=f"{config.grpc.host}:{config.grpc.port}",
            options=ChannelOptions(
                max_receive_bytes=config.grpc.max_message_bytes,
                reuse_port=self._shares_ports,
                max_connections=config.http.max_connections,
            ),
            admit=handler.admitter(self._behind.keyring),
            on_refused=handler.refused,
            has_reflection=config.grpc.reflection,
            # Those whose messages come, those that are answered, and those that are refused meanwhile.
            max_calls=3 * config.ingress.max_ongoing_requests + MAX_OPEN_CALLS,
        )


async def _wait_for_port(field: str, address: str) -> None:
    """Waits for a port: a replica may start a moment before the one it replaces has left.

    Raises:
        ConfigError: it is still in use after PORT_WAIT_S.
    """
    end_s = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            return check_can_listen(parse_address(address))
        except ConfigError as error:
            if time.monotonic() > end_s:
                raise ConfigError(f"{field}: {error}") from None
        await asyncio.sleep(0.1)


class IngressServers:
    """The servers of this process. At the end the calls of all have their grace at the same time.

    Args:
        starters: start one server each, whose end they push onto the stack.
    """

    def __init__(self, *starters: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
        self._starters = starters
        self._stacks = [AsyncExitStack() for _ in starters]
        self._is_started = False

    async def start(self) -> None:
        """Starts the servers; later calls change nothing. Raises ConfigError."""
        if self._is_started:
            return
        self._is_started = True
        for starter, stack in zip(self._starters, self._stacks, strict=True):
            await starter(stack)

    async def stop(self) -> None:
        await asyncio.gather(*(stack.aclose() for stack in self._stacks))
