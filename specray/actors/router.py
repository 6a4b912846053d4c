"""The Router deployment: one router with its target group per replica."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import get_current_placement_group

from specray.actors.answers import error_as_value
from specray.actors.drafts.deployment import DraftReplica
from specray.actors.drafts.source import ServeDrafterSource
from specray.actors.live import LiveReplica
from specray.actors.node import keep_serve_on_loopback, memory_bytes
from specray.actors.routing import routes_by_prefix
from specray.actors.stream_sinks import StreamSinks
from specray.actors.targets.group import TargetGroup
from specray.actors.targets.source import TargetSource
from specray.actors.telemetry import SpansElsewhere, begin_logs, begin_traces, shown_by_node
from specray.config import Config, parse_config
from specray.config.live import LiveConfig
from specray.errors import SpecrayError
from specray.grammar import GuidedOutputs, PreparedCompiler
from specray.interfaces import DrafterSource, RequestTracer
from specray.requests import GenerateRequest, OutputChunk, ServiceInfo
from specray.router import Router
from specray.router.transport.clock import SystemClock
from specray.rpc.channel import channel_options
from specray.rpc.connection import GrpcVerifier
from specray.rpc.loop_thread import LoopThread, run_on
from specray.tokenization import load_tokenizer, make_stop_matcher

T = TypeVar("T")

LEASE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 20.0


class RouterReplica:
    """A Serve replica around a router; it owns its target group and dies with it.

    The router and its two streams have their own event loop and thread: on Serve's loop, calls, health checks
    and statistics would delay rounds.
    """

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self,
        values: dict[str, Any],
        draft: DeploymentHandle[DraftReplica] | None = None,
        store: str | None = None,
    ) -> None:
        config = parse_config(values)
        keep_serve_on_loopback()
        begin_logs(config)
        live = LiveConfig(config)
        live.listen(begin_logs)
        self._live = LiveReplica(live, store=store, apply=self._configure)
        self._tracing = begin_traces(config, role="router")
        tracer = None
        if self._tracing is not None:
            tracer = SpansElsewhere(self._tracing, asyncio.get_running_loop())
        placement_group = get_current_placement_group()
        assert placement_group is not None, "the Router deployment has a placement group"
        self._is_chosen = routes_by_prefix(config)
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
        self._sinks = StreamSinks(
            SystemClock(),
            interval_s=config.router.stream_interval_ms / 1e3,
            options=channel_options(config.rpc),
        )
        self._target = TargetSource(lambda: TargetGroup(live.now, placement_group), partial(_connect, config))
        self._router = await self._on_loop(_start_router(config, self._target, source, tracer))
        gc.collect()
        gc.freeze()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Takes the live values of ``user_config``, see LiveReplica. Running requests go on."""
        await self._live.reconfigure(user_config)

    async def reload(self, values: dict[str, Any]) -> str:
        return await self._live.take(values)

    # Calls of ServeRouterClient: errors for the caller are answers, see ``actors.answers``.

    async def complete(self, request: GenerateRequest) -> OutputChunk | SpecrayError:
        return await error_as_value(self._on_loop(self._router.complete(request)))

    async def deliver(self, request: GenerateRequest, address: str) -> SpecrayError | None:
        """Streams the output as it is committed to the mailbox at ``address``; returns when it is complete.

        Errors are those of ``complete``, and EngineLostError when the mailbox cannot be reached.
        """
        return await error_as_value(self._on_loop(self._deliver(request, address)))

    async def service_info(self) -> ServiceInfo | SpecrayError:
        return await error_as_value(self._on_loop(self._router.service_info()))

    async def load_adapter(self, folder: str, digest: bytes, is_pinned: bool) -> bytes | SpecrayError:
        load = self._router.load_adapter(folder, digest, is_pinned=is_pinned)
        return await error_as_value(self._on_loop(load))

    async def unload_adapter(self, digest: bytes) -> SpecrayError | None:
        return await error_as_value(self._on_loop(self._router.unload_adapter(digest)))

    async def check_ready(self) -> SpecrayError | None:
        return await error_as_value(self._on_loop(self._router.check_ready()))

    @shown_by_node
    async def metrics_text(self) -> str:
        return await self._on_loop(self._router.metrics_text())

    async def memory_bytes(self) -> int:
        """Bytes of this process and its target's ranks. Raises what a lost rank raises."""
        return memory_bytes() + await self._on_loop(self._target.memory_bytes())

    async def trace_text(self) -> str | None:
        return await self._on_loop(self._router.trace_text())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Figures for ``scaling.RouterScalingPolicy``."""
        return self._router.load()

    async def record_routing_stats(self) -> dict[str, Any]:
        """How busy this router is, for ``routing.PrefixRequestRouter``; nothing where it has no choice."""
        return asdict(self._router.routing_load()) if self._is_chosen else {}

    async def check_health(self) -> None:
        """Cheap liveness check. Raises EngineLostError when the target is lost for good; Serve replaces both.

        While a target restarts, the replica is healthy: its sessions continue afterwards.
        """

        async def failure() -> Exception | None:
            return self._router.failure

        # On the router's own loop, which may hang by itself.
        if (found := await self._on_loop(failure())) is not None:
            raise found

    async def _configure(self, config: Config) -> None:
        async def configure() -> None:
            self._sinks.set_interval(config.router.stream_interval_ms / 1e3)
            self._router.configure(config.router, config.speculation)

        await self._on_loop(configure())

    async def _deliver(self, request: GenerateRequest, address: str) -> None:
        await self._router.deliver(request, self._sinks.to(address))

    async def _on_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await run_on(self._loop_thread.loop, work)

    async def __del__(self) -> None:
        # Serve awaits this before it ends the process.
        if hasattr(self, "_router"):
            await self._on_loop(self._router.stop(drain=True, drain_timeout_s=self._drain_timeout_s))
            await self._on_loop(self._sinks.close())
        if hasattr(self, "_target"):
            await self._on_loop(self._target.end())
            await asyncio.to_thread(self._loop_thread.stop)
        tracing = getattr(self, "_tracing", None)
        if tracing is not None:
            # After the callbacks that the router's end has scheduled on this loop.
            await asyncio.sleep(0)
            await asyncio.to_thread(tracing.close)


async def _connect(config: Config, address: str) -> GrpcVerifier:
    return await GrpcVerifier.connect(
        address, timeout_s=CONNECT_TIMEOUT_S, options=channel_options(config.rpc)
    )


async def _start_router(
    config: Config, target: TargetSource, source: DrafterSource | None, tracer: RequestTracer | None
) -> Router:
    tokenizer = await asyncio.to_thread(load_tokenizer, config.target.model)
    compiler = PreparedCompiler.of(tokenizer)
    compiler.prepare()
    router = Router(
        target.connect,
        source,
        router=config.router,
        speculation=config.speculation,
        model=config.model_name,
        stop_matchers=make_stop_matcher(tokenizer),
        grammars=GuidedOutputs(compiler),
        tracer=tracer,
        draft=config.draft.kind_in_use,
        draft_on_demand=config.draft.scales_to_none,
        adapters=config.target.adapters,
    )
    try:
        await router.start()
    except BaseException:
        target.stop()
        raise
    return router
