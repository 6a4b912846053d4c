"""The Router deployment: one router and its target group per replica."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from functools import partial
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import get_current_placement_group

from specray.actors.draft import DraftReplica
from specray.actors.group import TargetGroup
from specray.actors.node import keep_serve_on_loopback
from specray.actors.source import ServeDrafterSource
from specray.actors.target_source import TargetSource
from specray.config import Config, parse_config
from specray.interfaces import DrafterSource
from specray.router import Router
from specray.rpc.channel import channel_options
from specray.rpc.loop_thread import LoopThread, run_on
from specray.rpc.verifier import GrpcVerifier
from specray.tokenization import Tokenizer, make_stop_matcher
from specray.types import GenerateRequest, OutputChunk, ServiceInfo

T = TypeVar("T")

LEASE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 20.0


class RouterReplica:
    """A Serve replica around a router; it owns its target group and dies with it.

    The router and its two streams have an event loop and a thread of their own: Serve's loop has calls,
    health checks and statistics to serve, and each would be a delay in somebody's round.
    """

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self, values: dict[str, Any], draft: DeploymentHandle[DraftReplica] | None = None
    ) -> None:
        config = parse_config(values)
        keep_serve_on_loopback()
        placement_group = get_current_placement_group()
        assert placement_group is not None, "the Router deployment has a placement group"
        self._drain_timeout_s = config.router.drain_timeout_s
        source = None
        if draft is not None:
            source = ServeDrafterSource(
                draft,
                serve_loop=asyncio.get_running_loop(),
                timeout_s=LEASE_TIMEOUT_S,
                options=channel_options(config.rpc),
            )
        self._loop_thread = LoopThread("specray-router")
        self._target = TargetSource(lambda: TargetGroup(config, placement_group), partial(_connect, config))
        self._router = await self._on_loop(_start_router(config, self._target, source))
        gc.collect()
        gc.freeze()

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        return await self._on_loop(self._router.complete(request))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        """See interfaces.RouterClient."""
        chunks = self._router.stream(request)
        try:
            while (chunk := await self._on_loop(_next(chunks))) is not None:
                yield chunk
        finally:
            await self._on_loop(chunks.aclose())

    async def service_info(self) -> ServiceInfo:
        """See interfaces.RouterClient."""
        return await self._on_loop(self._router.service_info())

    async def check_ready(self) -> None:
        """See interfaces.RouterClient."""
        await self._on_loop(self._router.check_ready())

    async def metrics_text(self) -> str:
        """See interfaces.RouterClient."""
        return await self._on_loop(self._router.metrics_text())

    async def trace_text(self) -> str | None:
        """See interfaces.RouterClient."""
        return await self._on_loop(self._router.trace_text())

    async def check_health(self) -> None:
        """Liveness, cheap: raises EngineLostError when there will be no target; Serve then replaces both.

        While a target is started anew the replica is healthy: its sessions live here and go on afterwards.
        """
        failure = self._router.failure
        if failure is not None:
            raise failure

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await run_on(self._loop_thread.loop, work)

    async def __del__(self) -> None:
        # Serve awaits this before it ends the replica's process.
        if hasattr(self, "_router"):
            await self._on_loop(self._router.stop(drain=True, drain_timeout_s=self._drain_timeout_s))
        if hasattr(self, "_target"):
            await self._on_loop(_stop_target(self._target))
            await asyncio.to_thread(self._loop_thread.stop)


async def _next(chunks: AsyncGenerator[OutputChunk, None]) -> OutputChunk | None:
    return await anext(chunks, None)


async def _connect(config: Config, address: str) -> GrpcVerifier:
    return await GrpcVerifier.connect(
        address, timeout_s=CONNECT_TIMEOUT_S, options=channel_options(config.rpc)
    )


async def _stop_target(target: TargetSource) -> None:
    target.stop()


async def _start_router(config: Config, target: TargetSource, source: DrafterSource | None) -> Router:
    tokenizer = await asyncio.to_thread(Tokenizer.load, config.target.model)
    router = Router(
        target.connect,
        source,
        router=config.router,
        speculation=config.speculation,
        model=config.model_name,
        stop_matchers=make_stop_matcher(tokenizer),
        draft=config.draft.kind_in_use,
    )
    try:
        await router.start()
    except BaseException:
        target.stop()
        raise
    return router
