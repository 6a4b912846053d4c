"""Where a router leases its draft: a Serve handle inside Ray, a fixed address outside."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.handle import DeploymentHandle

from specray.actors.client import SERVE_ERRORS
from specray.actors.draft import DraftLease, DraftReplica
from specray.errors import EngineLostError
from specray.interfaces import Drafter
from specray.rpc.channel import ChannelOptions
from specray.rpc.drafter import GrpcDrafter
from specray.rpc.loop_thread import run_on


class ServeDrafterSource:
    """interfaces.DrafterSource over the Draft deployment: Serve picks the replica, gRPC carries the tokens.

    Args:
        handle: of the Draft deployment.
        serve_loop: the event loop on which the handle may be used; the connection lives on the caller's.
        timeout_s: for a lease and the connection, each, in seconds.
        options: of the connection.
    """

    def __init__(
        self,
        handle: DeploymentHandle[DraftReplica],
        *,
        serve_loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        options: ChannelOptions | None = None,
    ) -> None:
        self._options = options
        self._handle = handle
        self._serve_loop = serve_loop
        self._timeout_s = timeout_s

    async def lease(self) -> Drafter:
        """See interfaces.DrafterSource."""
        lease = await run_on(self._serve_loop, self._ask())
        return await GrpcDrafter.connect(lease.address, timeout_s=self._timeout_s, options=self._options)

    async def _ask(self) -> DraftLease:
        response: Any = self._handle.lease.remote()
        try:
            async with asyncio.timeout(self._timeout_s):
                lease: DraftLease = await response
                return lease
        except TimeoutError:
            response.cancel()
            raise EngineLostError(f"no draft could be leased within {self._timeout_s:g} s") from None
        except SERVE_ERRORS as error:
            raise EngineLostError(f"no draft can be leased: {type(error).__name__}") from error
