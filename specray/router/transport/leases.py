"""Leases a draft for the Router; replaces it when it is lost, draining, or shared by too many routers."""

from __future__ import annotations

import asyncio
import logging
import random

from specray.control.controller import Controller
from specray.engine_info import EngineInfo
from specray.errors import ConfigError
from specray.interfaces import Clock, Drafter, DrafterPool, DrafterSource
from specray.router.transport.clock import within
from specray.router.transport.links import DraftLink, DraftMoved, Inbox, close_unused, measure_round_trip
from specray.telemetry.metrics import RouterMetrics

logger = logging.getLogger(__name__)

LEASE_TIMEOUT_S = 30.0
"""Seconds within which a source must answer."""
FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
"""Longest mean seconds between two requests for a draft; the first wait is FIRST_BACKOFF_S."""
REBALANCE_INTERVAL_S = 10.0
"""Mean seconds between two requests for a draft that fewer routers share."""


class DraftLeases:
    """Holds the link to the leased draft, and gets a new one after it was lost or before it ends.

    Args:
        source: gives drafts. An interfaces.DrafterPool is also asked from time to time for a draft that fewer
            routers share.
        on_demand: True: ask for a draft only while some session wants one, so that drafts may scale to none.
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
        controller: Controller,
        on_demand: bool = False,
    ) -> None:
        self._source = source
        self._target_info = target_info
        self._inbox = inbox
        self._clock = clock
        self._metrics = metrics
        self._rng = rng
        self._controller = controller
        self._on_demand = on_demand
        self._is_wanted = asyncio.Event()
        self._drafter: Drafter | None = None
        self._leaving: DraftLink | None = None
        """Link that still serves while another draft is sought to replace it."""
        self._leasing: asyncio.Task[None] | None = None
        self._rebalancing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self.link: DraftLink | None = None
        self.model: str | None = None
        """Name of the draft model leased last; None: there was none."""

    async def start(self) -> None:
        """Asks for a first draft and waits for the answer; without one, goes on asking in the background.

        Raises:
            ConfigError: the draft does not fit the target.
        """
        if isinstance(self._source, DrafterPool):
            self._rebalancing = asyncio.create_task(self._rebalance(self._source))
        if self._on_demand:
            self._lease_in_background()
            return
        try:
            await self._lease()
        except ConfigError:
            self._stop_rebalancing()
            raise
        except Exception as error:
            logger.warning("no draft yet, decoding without: %s", error)
            self._lease_in_background()

    def want(self) -> None:
        """Some session could use a draft."""
        self._is_wanted.set()

    def lose(self, link: DraftLink) -> bool:
        """Gives up a draft and asks for another. Returns False if it had been given up before."""
        if link is not self.link:
            return False
        self.link = self._drafter = self._leaving = None
        self._metrics.draft_lost.inc()
        self._metrics.draft_connected.set(0)
        self._close_later(link)
        self._lease_in_background()
        return True

    def leave(self, link: DraftLink, *, is_wanted: bool) -> None:
        """Asks for another draft, since this one will end; it is used until the other is there.

        Args:
            is_wanted: True if some session could use one now.
        """
        if link is self.link and link is not self._leaving:
            self._leaving = link
            if is_wanted:
                self._is_wanted.set()
            self._lease_in_background()

    async def close(self) -> None:
        """Ends the lease and the search for drafts."""
        self._stop_rebalancing()
        tasks = [task for task in (self._leasing, self._rebalancing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.link is not None:
            link, self.link = self.link, None
            await link.close(self._clock)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _stop_rebalancing(self) -> None:
        if self._rebalancing is not None:
            self._rebalancing.cancel()

    def _lease_in_background(self) -> None:
        if self._leasing is None or self._leasing.done():
            self._leasing = asyncio.create_task(self._keep_asking())

    async def _keep_asking(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            await self._clock.sleep(backoff_s * self._rng.uniform(0.5, 1.5))
            if self._on_demand:
                await self._is_wanted.wait()
                self._is_wanted.clear()
            try:
                await self._lease()
            except Exception as error:
                logger.warning("no draft, decoding without: %s", str(error) or type(error).__name__)
                backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
            else:
                return

    async def _rebalance(self, pool: DrafterPool) -> None:
        while True:
            await self._clock.sleep(REBALANCE_INTERVAL_S * self._rng.uniform(0.5, 1.5))
            link, drafter = self.link, self._drafter
            if link is None or drafter is None or link is self._leaving:
                continue
            try:
                better = await within(self._clock, LEASE_TIMEOUT_S, pool.lease_better(drafter))
                if better is None:
                    continue
                if link is self.link:
                    await self._adopt(better)
                else:
                    await close_unused(better, self._clock)
            except Exception as error:
                logger.info("no better draft: %s", str(error) or type(error).__name__)

    async def _lease(self) -> None:
        await self._adopt(await within(self._clock, LEASE_TIMEOUT_S, self._source.lease()))

    async def _adopt(self, drafter: Drafter) -> None:
        """Makes a draft the leased one. Raises ConfigError when it does not fit the target."""
        try:
            check_draft(drafter.info, self._target_info)
            self._controller.allow_overlap(
                not drafter.info.lacks_outcomes and not drafter.info.shares_with(self._target_info)
            )
            if drafter.info.step_times:
                round_trip_s = await measure_round_trip(drafter.fetch_info, self._clock)
                self._controller.cost_model.expect_draft(drafter.info.step_times, round_trip_s)
        except BaseException as error:
            if isinstance(error, ConfigError):
                self._metrics.draft_refused.inc()
            # No link will close it, and the draft would count this router among those it serves for ever.
            await close_unused(drafter, self._clock)
            raise
        before, self.link, self._drafter = self.link, self._link(drafter), drafter
        self._leaving = None
        # Sessions that asked while it was being leased have their draft too.
        self._is_wanted.clear()
        self.model = drafter.info.model
        self._metrics.draft_leases.inc()
        self._metrics.draft_connected.set(1)
        if before is not None:
            self._metrics.draft_moves.inc()
            self._close_later(before)
            self._inbox.put(DraftMoved(self.link))
        self._inbox.wake()

    def _link(self, drafter: Drafter) -> DraftLink:
        is_narrower = drafter.info.vocab_size < self._target_info.vocab_size
        return DraftLink(drafter, self._inbox, is_narrower=is_narrower)

    def _close_later(self, link: DraftLink) -> None:
        closing = asyncio.create_task(link.close(self._clock))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def check_draft(draft: EngineInfo, target: EngineInfo) -> None:
    """Refuses a draft with another tokenizer or protocol than the target, or that reads features which the
    target does not give. Either may pad its vocabulary.

    Raises:
        ConfigError: names the field and both values.
    """
    for field in ("tokenizer_fingerprint", "protocol_version"):
        ours, theirs = getattr(target, field), getattr(draft, field)
        if ours != theirs:
            raise ConfigError(
                f"draft {draft.model} has {field} {theirs!r}, target {target.model} has {ours!r};"
                " they must be equal"
            )
    ours, theirs = _features_of(target), _features_of(draft)
    if draft.feature_size and ours != theirs:
        raise ConfigError(
            f"draft {draft.model} reads features of {theirs}, target {target.model} gives {ours}; they must "
            "be equal (the target's settings have draft.model 'remote-features' and the same target.drafter)"
        )


def _features_of(info: EngineInfo) -> str:
    return f"{info.feature_drafter}, {info.feature_size} numbers each" if info.feature_size else "none"
