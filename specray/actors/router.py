"""The Router deployment: one router and its target group per replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import get_current_placement_group

from specray.actors.draft import DraftReplica
from specray.actors.group import TargetGroup
from specray.actors.source import ServeDrafterSource
from specray.config import parse_config
from specray.errors import EngineLostError
from specray.router import Router
from specray.rpc.verifier import GrpcVerifier
from specray.tokenization import Tokenizer, make_stop_matcher
from specray.types import GenerateRequest, OutputChunk, ServiceInfo

LEASE_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 20.0


class RouterReplica:
    """A Serve replica around a router; it owns its target group and dies with it."""

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self, values: dict[str, Any], draft: DeploymentHandle[DraftReplica] | None = None
    ) -> None:
        config = parse_config(values)
        placement_group = get_current_placement_group()
        assert placement_group is not None, "the Router deployment has a placement group"
        self._group = TargetGroup(config, placement_group)
        address = await self._group.start()
        verifier = await GrpcVerifier.connect(address, timeout_s=CONNECT_TIMEOUT_S)
        tokenizer = await asyncio.to_thread(Tokenizer.load, config.target.model)
        self._router = Router(
            verifier,
            ServeDrafterSource(draft, timeout_s=LEASE_TIMEOUT_S) if draft is not None else None,
            router=config.router,
            speculation=config.speculation,
            model=config.model_name,
            stop_matchers=make_stop_matcher(tokenizer),
        )
        await self._router.start()

    async def complete(self, request: GenerateRequest) -> OutputChunk:
        """See interfaces.RouterClient."""
        return await self._router.complete(request)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[OutputChunk]:
        """See interfaces.RouterClient."""
        async for chunk in self._router.stream(request):
            yield chunk

    async def service_info(self) -> ServiceInfo:
        """See interfaces.RouterClient."""
        return await self._router.service_info()

    async def check_ready(self) -> None:
        """See interfaces.RouterClient."""
        await self._router.check_ready()

    async def metrics_text(self) -> str:
        """See interfaces.RouterClient."""
        return await self._router.metrics_text()

    async def check_health(self) -> None:
        """Liveness, cheap: raises EngineLostError when a rank has ended; Serve then replaces the group."""
        failure = self._group.failure()
        if failure is not None:
            raise EngineLostError(failure)

    async def __del__(self) -> None:
        # Serve awaits this before it ends the replica's process.
        if hasattr(self, "_router"):
            await self._router.stop(drain=False)
        if hasattr(self, "_group"):
            self._group.stop()
