"""The Ingress deployment: HTTP through Serve's proxy, gRPC through a server of its own.

Serve's gRPC proxy has neither TLS nor interceptors nor the standard health service, and turns bytes that do
not parse into INTERNAL; the server in ``specray.rpc.inference`` has all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from ray import serve

from specray.actors.client import ServeRouterClient
from specray.actors.node import keep_serve_on_loopback
from specray.config import Config
from specray.rpc.channel import ChannelOptions
from specray.rpc.inference import InferenceServer
from specray.serving.auth import Keyring
from specray.serving.grpc_ingress import GrpcIngress
from specray.serving.http import build_http_app
from specray.tokenization import Tokenizer

ROUTER_CALL_MARGIN_S = 10.0
"""A call to the router outlives the router's own request deadline by this, so that its message arrives."""


def ingress_deployment(config: Config, *, num_cpus: float) -> serve.Deployment:
    """The deployment whose replicas serve both endpoints; its bound argument is the Router."""

    def build_asgi_app() -> FastAPI:
        return _build_replica_app(config)

    deployment: serve.Deployment = serve.deployment(
        name="Ingress",
        num_replicas=config.ingress.num_replicas,
        ray_actor_options={"num_cpus": num_cpus, **config.ingress.ray_actor_options},
        max_ongoing_requests=config.ingress.max_ongoing_requests,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=10,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=3,
    )(serve.ingress(build_asgi_app)())
    return deployment


def _build_replica_app(config: Config) -> FastAPI:
    """Runs in the replica, once: the app's lifespan is the gRPC server's."""
    keep_serve_on_loopback()
    handle = serve.get_deployment_handle("Router", app_name=serve.get_replica_context().app_name)
    client = ServeRouterClient(handle, timeout_s=config.router.request_timeout_s + ROUTER_CALL_MARGIN_S)
    tokenizer = Tokenizer.load(config.target.model)
    keyring = Keyring(config.auth)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        server = None
        if config.grpc.port:
            handler = GrpcIngress(client=client, tokenizer=tokenizer, config=config)
            server = InferenceServer(
                handler,
                address=f"{config.grpc.host}:{config.grpc.port}",
                # A replica that replaces another may start before the other has ended.
                options=ChannelOptions(max_receive_bytes=config.grpc.max_message_bytes, reuse_port=True),
                admit=handler.admitter(keyring),
            )
            await server.start()
        try:
            yield
        finally:
            if server is not None:
                await server.stop()

    return build_http_app(
        client=client, tokenizer=tokenizer, config=config, keyring=keyring, lifespan=lifespan
    )
