"""Connects the Router to its target, and reconnects after a loss."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from specray.config import RouterConfig
from specray.control.controller import Controller
from specray.errors import ConfigError, EngineLostError
from specray.interfaces import Clock, Verifier
from specray.router.transport.clock import within
from specray.router.transport.links import Inbox, TargetLink, close_unused, measure_round_trip

logger = logging.getLogger(__name__)

VerifierFactory = Callable[[], Awaitable[Verifier]]

BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0
"""Longest mean seconds between two attempts to connect; the first wait is BACKOFF_S."""


class TargetRenewal:
    """Connects to a target, and to another one after a loss; one search at a time.

    Args:
        source: a connection, or a factory that makes the first one and another after each loss.
    """

    def __init__(
        self,
        source: Verifier | VerifierFactory,
        *,
        inbox: Inbox,
        clock: Clock,
        config: RouterConfig,
        controller: Controller,
        rng: random.Random,
        on_found: Callable[[TargetLink], None],
        on_given_up: Callable[[Exception], None],
    ) -> None:
        self.lost: Exception | None = None
        """Error for which there is no target and none is being sought; None: there is one, or a search for
        one."""
        self._source = source
        self._inbox = inbox
        self._clock = clock
        self._config = config
        self._controller = controller
        self._rng = rng
        self._on_found = on_found
        self._on_given_up = on_given_up
        self._search: asyncio.Task[None] | None = None

    async def connect(self) -> TargetLink:
        """Connects, and returns a link to the target.

        Raises:
            EngineLostError: no target within start_timeout_s, or the source says so before.
            ConfigError: the source says that a setting is wrong.
        """
        verifier = await self._ask() if callable(self._source) else self._source
        try:
            if verifier.info.step_times:
                round_trip_s = await measure_round_trip(verifier.fetch_info, self._clock)
                info = verifier.info
                self._controller.cost_model.expect_target(
                    info.step_times,
                    round_trip_s,
                    context_token_s=info.context_token_s,
                    context_row_share=info.context_row_share,
                    experts=info.experts,
                )
        except BaseException:
            # No link will close it, and it would stay open next to the next connection.
            await close_unused(verifier, self._clock)
            raise
        return TargetLink(verifier, self._inbox)

    def on_lost(self, link: TargetLink, error: Exception, *, is_stopping: bool) -> None:
        """Seeks another target, if the source can make one and the router is not stopping."""
        logger.error("target lost: %s", error)
        is_renewable = callable(self._source) and not is_stopping
        if not is_renewable:
            self._give_up(error)
        self._search = asyncio.create_task(self._renew(link, is_renewable=is_renewable))

    async def stop(self) -> None:
        """Ends a search that is under way; idempotent."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)

    async def _ask(self) -> Verifier:
        assert callable(self._source)
        timeout_s = self._config.start_timeout_s
        try:
            return await within(self._clock, timeout_s, self._source())
        except TimeoutError:
            raise EngineLostError(f"no target within start_timeout_s = {timeout_s:g} s") from None

    async def _renew(self, lost: TargetLink, *, is_renewable: bool) -> None:
        """Closes the lost link and connects again, with backoff, for at most start_timeout_s."""
        began_s = self._clock.monotonic()
        await lost.close(self._clock)
        if not is_renewable:
            return
        give_up_s = began_s + self._config.start_timeout_s
        backoff_s = BACKOFF_S
        while True:
            try:
                link = await self.connect()
                break
            except Exception as error:
                logger.warning("target still lost: %s", error)
                # A wrong setting stays wrong.
                if isinstance(error, ConfigError) or self._clock.monotonic() + backoff_s > give_up_s:
                    self._give_up(error)
                    return
            await self._clock.sleep(backoff_s * self._rng.uniform(0.5, 1.5))
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
        logger.warning("target connected anew after %.1f s", self._clock.monotonic() - began_s)
        self._on_found(link)

    def _give_up(self, error: Exception) -> None:
        self.lost = error
        self._on_given_up(error)
