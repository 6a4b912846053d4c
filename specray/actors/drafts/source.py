"""Source from which a router leases its draft, by a Serve handle of the Draft deployment."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

from ray.serve.handle import DeploymentHandle

from specray.actors.client import SERVE_ERRORS
from specray.actors.drafts.deployment import DraftLease, DraftReplica
from specray.errors import EngineLostError
from specray.interfaces import Drafter
from specray.rpc.channel import ChannelOptions
from specray.rpc.connection import GrpcDrafter
from specray.rpc.loop_thread import run_on

logger = logging.getLogger(__name__)

GRACE_S = 0.25
"""Seconds to wait for further answers after the first one."""


class ServeDrafterSource:
    """interfaces.DrafterPool over the Draft deployment; gRPC carries the tokens.

    Serve balances by running calls, but a lease call ends at once. So several replicas are asked at once how
    many routers they have, and the one with the fewest is taken (power of a few choices). One that hangs is
    not waited for.

    Args:
        handle: handle of the Draft deployment.
        serve_loop: event loop on which the handle may be used; connections live on the caller's.
        timeout_s: seconds for the answers, and again for a connection.
        options: gRPC options of the connections.
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
        error: EngineLostError | None = None
        for offer in await run_on(self._serve_loop, self._ask()):
            try:
                return await self._connect(offer)
            except EngineLostError as lost:
                logger.info("a draft that was offered is gone: %s", lost)
                error = lost
        assert error is not None, "there is an offer, or an exception"
        raise error

    async def lease_better(self, current: Drafter) -> Drafter | None:
        """See interfaces.DrafterPool: the other draft must have at least two routers fewer, to end moves."""
        offers = await run_on(self._serve_loop, self._ask())
        if len(offers) < 2:
            return None
        info = await current.fetch_info()
        return await self._connect(offers[0]) if offers[0].num_routers + 2 <= info.num_routers else None

    async def _connect(self, offer: DraftLease) -> Drafter:
        return await GrpcDrafter.connect(offer.address, timeout_s=self._timeout_s, options=self._options)

    async def _ask(self) -> list[DraftLease]:
        """Returns at least one offer, the best first. Raises EngineLostError."""
        # Concurrent lease calls. Serve spreads them over replicas: they reach all of a few drafts, a sample
        # of many.
        asking = {asyncio.ensure_future(self._ask_one()) for _ in range(4)}
        offers: dict[str, DraftLease] = {}
        errors: list[BaseException] = []
        end = asyncio.get_running_loop().time() + self._timeout_s
        try:
            while asking:
                left_s = max(0.0, end - asyncio.get_running_loop().time())
                done, asking = await asyncio.wait(asking, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is not None:
                        errors.append(error)
                    else:
                        offers[task.result().address] = task.result()
                if not done:
                    break
                if offers:
                    end = min(end, asyncio.get_running_loop().time() + GRACE_S)
        finally:
            for task in asking:
                task.cancel()
        if offers:
            return sorted(offers.values(), key=_load)
        if errors:
            raise EngineLostError(f"no draft can be leased: {type(errors[0]).__name__}") from errors[0]
        raise EngineLostError(f"no draft could be leased within {self._timeout_s:g} s")

    async def _ask_one(self) -> DraftLease:
        response: Any = self._handle.lease.remote()
        try:
            lease: DraftLease = await response
            return lease
        except asyncio.CancelledError:
            response.cancel()
            raise
        except SERVE_ERRORS as error:
            raise EngineLostError(f"a draft does not answer: {type(error).__name__}") from error


def _load(offer: DraftLease) -> tuple[int, float, float]:
    # Ties are broken at random, so that routers asking at the same time do not all take the same draft.
    return offer.num_routers, round(offer.busy_share, 1), random.random()
