"""Leasing drafts: one at a time, in the background, with bounded and jittered backoff."""

from __future__ import annotations

import asyncio
import logging
import random

from specray.errors import ConfigError
from specray.interfaces import Clock, Drafter, DrafterSource
from specray.metrics import RouterMetrics
from specray.router.clock import within
from specray.router.links import DraftLink, Inbox, measure_round_trip
from specray.router.policy import Policy
from specray.types import EngineInfo

logger = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 30.0
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 10.0


class DraftLeases:
    """Holds the link to the leased draft, and gets a new one after it was lost.

    Args:
        source: where drafts come from.
        target_info: what a draft must agree with.
        inbox: of the loop; it is woken when a draft has come.
        clock: of deadlines and backoff.
        metrics: counts leases and losses.
        rng: jitter, so that many routers do not ask at once.
        policy: learns what a new draft says of its speed.
    """

    def __init__(
        self,
        source: DrafterSource,
        target_info: EngineInfo,
        *,
        inbox: Inbox,
        clock: Clock,
        metrics: RouterMetrics,
        rng: random.Random,
        policy: Policy,
    ) -> None:
        self._source = source
        self._target_info = target_info
        self._inbox = inbox
        self._clock = clock
        self._metrics = metrics
        self._rng = rng
        self._policy = policy
        self._leasing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.link: DraftLink | None = None
        self.model: str | None = None
        """Of the draft leased last."""

    async def start(self) -> None:
        """Asks for a first draft and waits for the answer; without one, goes on asking in the background.

        Raises:
            ConfigError: the draft does not fit the target.
        """
        try:
            await self._lease()
        except ConfigError:
            raise
        except Exception as error:
            logger.warning("no draft yet, decoding without: %s", error)
            self._lease_in_background()

    def lose(self, link: DraftLink) -> bool:
        """Gives up a draft and asks for another. False when it had been given up before."""
        if link is not self.link:
            return False
        self.link = None
        self._metrics.draft_lost.inc()
        self._metrics.draft_connected.set(0)
        closing = asyncio.create_task(link.close(self._clock))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        self._lease_in_background()
        return True

    async def close(self) -> None:
        """Ends the lease and all asking."""
        if self._leasing is not None:
            self._leasing.cancel()
            await asyncio.gather(self._leasing, return_exceptions=True)
        if self.link is not None:
            link, self.link = self.link, None
            await link.close(self._clock)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _lease_in_background(self) -> None:
        if self._leasing is None or self._leasing.done():
            self._leasing = asyncio.create_task(self._keep_asking())

    async def _keep_asking(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            await self._clock.sleep(backoff_s * self._rng.uniform(0.5, 1.5))
            try:
                await self._lease()
            except Exception as error:
                logger.warning("no draft, decoding without: %s", error or type(error).__name__)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
            else:
                return

    async def _lease(self) -> None:
        drafter = await within(self._clock, LEASE_TIMEOUT_S, self._source.lease())
        try:
            check_draft(drafter.info, self._target_info)
        except ConfigError:
            self._metrics.draft_refused.inc()
            await self._close_refused(drafter)
            raise
        if drafter.info.step_times:
            round_trip_s = await measure_round_trip(drafter.fetch_info, self._clock)
            self._policy.expect_draft(drafter.info.step_times, round_trip_s)
        self.link = DraftLink(drafter, self._inbox)
        self.model = drafter.info.model
        self._metrics.draft_leases.inc()
        self._metrics.draft_connected.set(1)
        self._inbox.wake()

    async def _close_refused(self, drafter: Drafter) -> None:
        try:
            await within(self._clock, LEASE_TIMEOUT_S, drafter.close())
        except Exception as error:
            logger.warning("closing a refused draft: %s", error)


def check_draft(draft: EngineInfo, target: EngineInfo) -> None:
    """Refuses a draft whose tokens do not mean what the target's mean.

    Raises:
        ConfigError: names the field and both values.
    """
    for field in ("vocab_size", "tokenizer_fingerprint", "protocol_version"):
        ours, theirs = getattr(target, field), getattr(draft, field)
        if ours != theirs:
            raise ConfigError(
                f"draft {draft.model} has {field} {theirs!r}, target {target.model} has {ours!r};"
                " they must be equal"
            )
