"""Where a router leases its draft: a Serve handle inside Ray."""

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
from specray.rpc.connections.drafter import GrpcDrafter
from specray.rpc.loop_thread import run_on

logger = logging.getLogger(__name__)

NUM_ASKED = 4
"""Serve spreads calls that overlap: of a few drafts all are asked, of many some, at random."""
GRACE_S = 0.25
"""For others' answers once the first is there."""


class ServeDrafterSource:
    """interfaces.DrafterPool over the Draft deployment; gRPC carries the tokens.

    Serve knows how many calls a replica has, but a lease is over as soon as it is answered. So several
    replicas are asked at once how many routers they have, and the one with the fewest is taken: the power of
    a few choices, over the real load. One that hangs is not waited for.

    Args:
        handle: of the Draft deployment.
        serve_loop: the event loop on which the handle may be used; connections live on the caller's.
        timeout_s: for the answers and for a connection, each, in seconds.
        options: of the connections.
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
        """See interfaces.DrafterPool: the other must have at least two routers fewer, so moves even out."""
        offers = await run_on(self._serve_loop, self._ask())
        if len(offers) < 2:
            return None
        info = await current.fetch_info()
        return await self._connect(offers[0]) if offers[0].num_routers + 2 <= info.num_routers else None

    async def _connect(self, offer: DraftLease) -> Drafter:
        return await GrpcDrafter.connect(offer.address, timeout_s=self._timeout_s, options=self._options)

    async def _ask(self) -> list[DraftLease]:
        """Offers, the best first, at least one. Raises EngineLostError."""
        asking = {asyncio.ensure_future(self._ask_one()) for _ in range(NUM_ASKED)}
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
    # Among equals any will do, but not the same for all who ask at once.
    return offer.num_routers, round(offer.busy_share, 1), random.random()
